"""Sessions of agents: an episode each, whose turns are asked for as at OpenAI's chat completions.

What holds of a session is `dora.runtime.rollout.agent_sessions`' to say; here it is put into words and numbers.
"""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import BaseModel, Field

from dora.errors import ServiceError
from dora.runtime.rollout.agent_sessions import AgentSession, AgentSessions, AssistantTurn, ChatMessage
from dora.service.context import Run, RunContext, while_connected
from dora.service.models import Given

router = APIRouter(prefix="/v1", tags=["agents"])
ANSWER_S = 300.0  # until an agent is told to ask again
MOST_REWARD = 1e6  # in size, as in trainer/scoring.py: beyond it, sums and squares would say nothing

NAME = r"^[A-Za-z0-9_-]{1,64}$"
Name = Annotated[str, Path(pattern=NAME, description="chosen by the agent, used once")]
Named = Annotated[str, Header(pattern=NAME, description="name of the session")]


class Opened(BaseModel):
    """A session: its episode, and what the dataset says of it."""

    session: str
    version: int
    group: str
    sibling: int
    is_held_out: bool  # of an evaluation: nothing is learnt of it
    prompt: Any  # of the dataset: text, or messages
    fields: dict[str, Any]  # the other columns of its row
    lease_s: float
    num_tokens: int  # read and written so far
    num_turns: int


class TextPart(Given):
    type: Literal["text"]
    text: str


class Said(Given):
    """One message of a conversation. What OpenAI's clients say of it besides is not told to the model."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: None = None
    function_call: None = None
    refusal: None = None
    annotations: None = None
    audio: None = None

    def plain(self) -> ChatMessage:
        """Parts are put one after the other."""
        parts = self.content
        return ChatMessage(
            self.role, parts if isinstance(parts, str) else "".join(part.text for part in parts)
        )


class Asked(Given):
    """A chat completion. How tokens are drawn is the run's to say, for it trains on them."""

    model: Literal["policy"] = "policy"
    messages: list[Said] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, description="longest turn, the same in all calls")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="another name of max_tokens")
    temperature: float | None = None
    top_p: float | None = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None
    stop: None = None
    seed: None = None


class Reward(Given):
    """What an episode was worth; null: the run's own reward tasks judge it."""

    reward: Annotated[float, Field(ge=-MOST_REWARD, le=MOST_REWARD)] | None


class Ended(BaseModel):
    session: str
    end: str


class Wrote(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class Choice(BaseModel):
    index: Literal[0] = 0
    message: Wrote
    finish_reason: Literal["stop", "length"]
    token_ids: list[int]  # as they are trained on


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """As OpenAI's, and beside it what an agent that is trained should know."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: Literal["policy"] = "policy"
    choices: list[Choice]
    usage: Usage
    version: int  # that wrote it
    num_left: int  # tokens that the episode may still have


class Model(BaseModel):
    id: Literal["policy"] = "policy"
    object: Literal["model"] = "model"
    owned_by: str = "dora"


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model] = [Model()]


@router.get("/models")
async def models() -> Models:
    """The one model there is: the policy, in the version of the session."""
    return Models()


@router.put("/sessions/{session}")
async def open_session(
    session: Name,
    run: Run,
    request: Request,
    wait_s: Annotated[float, Query(ge=0, le=60, description="for an episode")] = 0.0,
) -> Opened:
    """Take an episode that waits for an agent; 429 if there is none yet. To repeat it changes nothing."""

    def open_one(context: RunContext) -> Opened | None:
        found = agents(context).open(session)
        return None if found is None else _opened(context, found)

    opened = await while_connected(request, run.wait(open_one, wait_s))
    if opened is None:
        raise ServiceError(429, "no episode waits for an agent; ask again")
    return opened


@router.get("/sessions/{session}")
async def look_at_session(session: Name, run: Run) -> Opened:
    """The session as it is; also keeps it from expiring, should a tool take long."""
    return await run(lambda context: _opened(context, agents(context).get(session)))


@router.delete("/sessions/{session}")
async def give_up_session(session: Name, run: Run) -> Ended:
    """The agent cannot go on: the group has failed, unless nothing was asked in the session yet."""
    return await run(lambda context: _ended(agents(context).abandon(session)))


@router.post("/sessions/{session}/reward")
async def post_reward(session: Name, reward: Reward, run: Run) -> Ended:
    """The episode is over, and was worth this."""
    return await run(lambda context: _ended(agents(context).finish(session, reward.reward)))


@router.post("/chat/completions")
async def complete(asked: Asked, run: Run, request: Request, dora_session: Named) -> Completion:
    """The model's answer to a conversation, from the version that the session has."""
    messages = tuple(said.plain() for said in asked.messages)
    max_tokens = asked.max_tokens or asked.max_completion_tokens

    def answer(context: RunContext) -> Completion | None:
        found = agents(context)
        _check_drawing(context, asked)
        done = found.complete(dora_session, messages, max_tokens)
        return None if done is None else _completion(found.get(dora_session), done)

    completion = await while_connected(request, run.wait(answer, ANSWER_S))
    if completion is None:
        raise ServiceError(429, f"no answer within {ANSWER_S:g} s; it is being written, repeat the call")
    return completion


def agents(context: RunContext) -> AgentSessions:
    """The player of a run that agents play. Raises ServiceError for any other run."""
    player = context.agent_sessions
    if player is None:
        raise ServiceError(409, "this run has no sessions; start it with service.agents = true")
    return player


def _check_drawing(context: RunContext, asked: Asked) -> None:
    sampling = context.setup.config.sampling
    for key, fixed in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        if getattr(asked, key) not in (None, fixed):
            raise ServiceError(409, f"{key} is sampling.{key} = {fixed:g} of the run; leave it out")
    if len({asked.max_tokens, asked.max_completion_tokens} - {None}) > 1:
        raise ServiceError(409, "max_tokens and max_completion_tokens are one and differ; leave one out")


def _opened(context: RunContext, session: AgentSession) -> Opened:
    request = session.episode.request
    source = context.setup.source_of(request.group)
    return Opened(
        session=session.name,
        version=session.version,
        group=str(request.group),
        sibling=request.sibling,
        is_held_out=request.is_held_out,
        prompt=source.prompt(request.row),
        fields=_plain(source.fields(request.row)),
        lease_s=context.setup.config.service.session_timeout_s,
        num_tokens=session.num_tokens,
        num_turns=0 if session.answer is None else session.answer.turn.number + 1,
    )


def _ended(session: AgentSession) -> Ended:
    return Ended(session=session.name, end=session.end_reason)


def _completion(session: AgentSession, answer: AssistantTurn) -> Completion:
    turn, num_prompt = answer.turn, answer.num_prompt_tokens
    return Completion(
        id=f"chatcmpl-{session.name}-{turn.number}",
        created=int(time.time()),
        choices=[
            Choice(
                message=Wrote(content=answer.text),
                finish_reason="stop" if turn.finish_reason == "stop" else "length",
                token_ids=turn.token_ids,
            )
        ],
        usage=Usage(
            prompt_tokens=num_prompt,
            completion_tokens=len(turn.token_ids),
            total_tokens=num_prompt + len(turn.token_ids),
        ),
        version=session.version,
        num_left=turn.num_left,
    )


def _plain(value: Any) -> Any:
    """What JSON can say of a value of a dataset: no nan, and other things as text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
