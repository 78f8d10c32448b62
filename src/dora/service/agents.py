"""Sessions of agents: each is one episode, whose turns are OpenAI chat completions.

A session is named by a header, or by the URL for programs that can only be given a base URL and an API key.
`dora.runtime.rollout.agent_sessions` has the rules of sessions; this module has their routes and JSON.
"""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Request
from pydantic import BaseModel, Field

from dora.errors import ServiceError
from dora.runtime.rollout.agent_sessions import AgentSession, AgentSessions, AssistantTurn, ChatMessage
from dora.service.context import Run, RunContext, RunHandle, while_connected
from dora.service.models import RequestBody, RewardValue, Wait

router = APIRouter(prefix="/v1", tags=["agents"])
session_router = APIRouter(prefix="/s/{session}", tags=["agents"])
TURN_TIMEOUT_S = 300.0  # for the model's turn, before the client has to repeat the request
OPEN_TIMEOUT_S = 30.0  # for an episode, if the first completion in a URL opens its session

NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
SessionName = Annotated[str, Path(pattern=NAME_PATTERN, description="chosen by the agent, used once")]
SessionHeader = Annotated[str, Header(pattern=NAME_PATTERN, description="name of the session")]


class SessionInfo(BaseModel):
    """A session: its episode, and the row of the dataset."""

    session: str
    version: int
    group: str
    sibling: int
    is_held_out: bool  # the episode belongs to an evaluation and is not trained on
    prompt: Any  # of the dataset: text, or messages
    fields: dict[str, Any]  # the other columns of its row
    lease_s: float
    num_tokens: int  # prompt, observations and generated tokens so far
    num_turns: int


class TextPart(RequestBody):
    """Text as part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessageParam(RequestBody):
    """A message of a conversation. Only `role` and `content` reach the model."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: None = None
    function_call: None = None
    refusal: None = None
    annotations: None = None
    audio: None = None

    def to_message(self) -> ChatMessage:
        """The parts of the content are concatenated."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return ChatMessage(self.role, text)


class ChatCompletionRequest(RequestBody):
    """A request for the model's next turn. The run fixes the sampling parameters, as it trains on them."""

    model: Literal["policy"] = "policy"
    messages: list[ChatMessageParam] = Field(min_length=1)
    max_tokens: int | None = Field(
        default=None, ge=1, description="maximum length of a turn, the same in all requests of a session"
    )
    max_completion_tokens: int | None = Field(default=None, ge=1, description="the same as max_tokens")
    temperature: float | None = None
    top_p: float | None = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None
    stop: None = None
    seed: None = None


class EpisodeReward(RequestBody):
    """The reward of an episode; null: the run's reward tasks score it."""

    reward: RewardValue | None


class SessionEnd(BaseModel):
    """How a session ended."""

    session: str
    end_reason: str


class AssistantMessage(BaseModel):
    """The message that the model generated."""

    role: Literal["assistant"] = "assistant"
    content: str


class Choice(BaseModel):
    """The only choice of a completion."""

    index: Literal[0] = 0
    message: AssistantMessage
    finish_reason: Literal["stop", "length"]
    token_ids: list[int]  # as sampled, and as trained on


class Usage(BaseModel):
    """Numbers of tokens; the prompt is all that the turn follows."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(BaseModel):
    """OpenAI's chat completion, with the policy version and the tokens left in the episode."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: Literal["policy"] = "policy"
    choices: list[Choice]
    usage: Usage
    version: int  # that generated the turn
    num_tokens_left: int  # that the episode may still have


class ServedModel(BaseModel):
    """The policy, as a model of OpenAI's API."""

    id: Literal["policy"] = "policy"
    object: Literal["model"] = "model"
    owned_by: str = "dora"


class ModelList(BaseModel):
    """The models of the service."""

    object: Literal["list"] = "list"
    data: list[ServedModel] = [ServedModel()]


@session_router.get("/v1/models")
@router.get("/models")
async def get_models() -> ModelList:
    """The only model is the policy, in the version of the session."""
    return ModelList()


@router.put("/sessions/{session}")
async def open_session(session: SessionName, run: Run, request: Request, wait_s: Wait = 0.0) -> SessionInfo:
    """Open an episode that waits for an agent; 429 if there is none. A repeated request changes nothing."""

    def open_waiting(context: RunContext) -> SessionInfo | None:
        opened = _agent_sessions(context).open(session)
        return None if opened is None else _session_info(context, opened)

    opened = await while_connected(request, run.wait(open_waiting, wait_s))
    if opened is None:
        raise ServiceError(429, "no episode is waiting for an agent; try again")
    return opened


@router.get("/sessions/{session}")
async def get_session(session: SessionName, run: Run) -> SessionInfo:
    """The state of the session. Renews its lease, so that it does not expire during a long tool call."""
    return await run(lambda context: _session_info(context, _agent_sessions(context).get(session)))


@router.delete("/sessions/{session}")
async def abandon_session(session: SessionName, run: Run) -> SessionEnd:
    """The agent cannot continue: the group fails, unless the session has no turn yet."""
    return await run(lambda context: _session_end(_agent_sessions(context).abandon(session)))


@session_router.post("/reward")
@router.post("/sessions/{session}/reward")
async def post_reward(session: SessionName, body: EpisodeReward, run: Run) -> SessionEnd:
    """End the episode with its reward."""
    return await run(lambda context: _session_end(_agent_sessions(context).finish(session, body.reward)))


@router.post("/chat/completions")
async def create_completion(
    body: ChatCompletionRequest, run: Run, request: Request, dora_session: SessionHeader
) -> ChatCompletion:
    """The model's next turn in a conversation, by the version of the session."""
    return await _complete(dora_session, body, run, request)


@session_router.post("/v1/chat/completions")
async def create_completion_of_session(
    session: SessionName, body: ChatCompletionRequest, run: Run, request: Request
) -> ChatCompletion:
    """The same without a header; the first request opens the session. 503 if no episode is waiting."""

    def open_waiting(context: RunContext) -> AgentSession | None:
        sessions = _agent_sessions(context)
        _check_sampling(context, body)  # an invalid request takes no episode
        return sessions.open(session)

    if await while_connected(request, run.wait(open_waiting, OPEN_TIMEOUT_S)) is None:
        raise ServiceError(503, f"no episode was waiting for an agent within {OPEN_TIMEOUT_S:g} s; try again")
    return await _complete(session, body, run, request)


async def _complete(
    session: str, body: ChatCompletionRequest, run: RunHandle, request: Request
) -> ChatCompletion:
    messages = tuple(message.to_message() for message in body.messages)
    max_tokens = body.max_tokens or body.max_completion_tokens

    def complete(context: RunContext) -> ChatCompletion | None:
        sessions = _agent_sessions(context)
        _check_sampling(context, body)
        turn = sessions.complete(session, messages, max_tokens)
        return None if turn is None else _completion(sessions.get(session), turn)

    completion = await while_connected(request, run.wait(complete, TURN_TIMEOUT_S))
    if completion is None:
        raise ServiceError(
            429, f"no turn within {TURN_TIMEOUT_S:g} s; the model is still generating, repeat the request"
        )
    return completion


def _agent_sessions(context: RunContext) -> AgentSessions:
    """Raises ServiceError for a run without agents."""
    sessions = context.agent_sessions
    if sessions is None:
        raise ServiceError(409, "this run has no sessions; start it with service.agents = true")
    return sessions


def _check_sampling(context: RunContext, body: ChatCompletionRequest) -> None:
    """Raises ServiceError for sampling parameters that are not the run's."""
    sampling = context.setup.config.sampling
    for key, value in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        if getattr(body, key) not in (None, value):
            raise ServiceError(409, f"{key} must be the run's sampling.{key} = {value:g}; leave it out")
    if len({body.max_tokens, body.max_completion_tokens} - {None}) > 1:
        raise ServiceError(
            409, "max_tokens and max_completion_tokens have the same meaning but differ; leave one out"
        )


def _session_info(context: RunContext, session: AgentSession) -> SessionInfo:
    request = session.episode.request
    source = context.setup.source_of(request.group)
    return SessionInfo(
        session=session.name,
        version=session.version,
        group=str(request.group),
        sibling=request.sibling,
        is_held_out=request.is_held_out,
        prompt=source.prompt(request.row),
        fields=_to_json(source.fields(request.row)),
        lease_s=context.setup.config.service.session_timeout_s,
        num_tokens=session.num_tokens,
        num_turns=0 if session.answer is None else session.answer.turn.number + 1,
    )


def _session_end(session: AgentSession) -> SessionEnd:
    return SessionEnd(session=session.name, end_reason=session.end_reason)


def _completion(session: AgentSession, answer: AssistantTurn) -> ChatCompletion:
    turn, num_prompt_tokens = answer.turn, answer.num_prompt_tokens
    return ChatCompletion(
        id=f"chatcmpl-{session.name}-{turn.number}",
        created=int(time.time()),
        choices=[
            Choice(
                message=AssistantMessage(content=answer.text),
                finish_reason="stop" if turn.finish_reason == "stop" else "length",
                token_ids=turn.token_ids,
            )
        ],
        usage=Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=len(turn.token_ids),
            total_tokens=num_prompt_tokens + len(turn.token_ids),
        ),
        version=session.version,
        num_tokens_left=turn.num_left,
    )


def _to_json(value: Any) -> Any:
    """A value of a dataset as JSON: nan and inf become null, and other types become text."""
    if isinstance(value, dict):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
