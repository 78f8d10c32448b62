"""Sessions of agents: each is one episode, whose turns are requested in OpenAI's or Anthropic's API.

`dora.runtime.rollout.agent_sessions` has the rules of sessions; this module has their routes and JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, Field

from dora.data.tool_calls import ToolCall
from dora.errors import ServiceError
from dora.runtime.rollout.agent_sessions import AgentSession, AgentSessions, AssistantTurn, TurnRequest
from dora.service.context import Run, RunContext, RunHandle, while_connected
from dora.service.models import RequestBody, RewardValue, Wait

router = APIRouter(prefix="/v1", tags=["agents"])
session_router = APIRouter(prefix="/s/{session}", tags=["agents"])
TURN_TIMEOUT_S = 300.0  # for the model's turn, before the client has to repeat the request
OPEN_TIMEOUT_S = 30.0  # for an episode, if the first request in a URL opens its session

NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
SessionName = Annotated[str, Path(pattern=NAME_PATTERN, description="chosen by the agent, used once")]


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


class EpisodeReward(RequestBody):
    """The reward of an episode; null: the run's reward tasks score it. `turn_rewards` are its parts, one for
    each turn, for estimators that credit turns.
    """

    reward: RewardValue | None
    turn_rewards: list[RewardValue] = Field(default_factory=list)


class SessionEnd(BaseModel):
    """How a session ended."""

    session: str
    end_reason: str


class TurnBody(Protocol):
    """A request body that asks for the model's next turn, in any API."""

    def to_call(self) -> TurnRequest:
        """Raises ServiceError for messages that cannot be in a conversation."""

    def check(self, context: RunContext) -> None:
        """Raises ServiceError for parameters that the run does not sample with."""


class SessionTurn(NamedTuple):
    """A turn of the model in a session, and the version that generated it."""

    session: str
    version: int
    answer: AssistantTurn
    decode_token: Callable[[int], str]  # of the run's tokenizer

    @property
    def name(self) -> str:
        """Of the turn; no two turns of a run have the same."""
        return f"{self.session}-{self.answer.turn.number}"

    @property
    def calls(self) -> list[tuple[str, ToolCall]]:
        """Its tool calls with their ids, which are the same whenever the request is repeated."""
        return [(f"call_{self.name}-{i}", call) for i, call in enumerate(self.answer.parsed.calls)]

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Of all before the turn, and of the turn."""
        return self.answer.num_prompt_tokens, len(self.answer.turn.token_ids)


@router.put("/sessions/{session}")
async def open_session(session: SessionName, run: Run, request: Request, wait_s: Wait = 0.0) -> SessionInfo:
    """Open an episode that waits for an agent; 429 if there is none. A repeated request changes nothing."""

    def open_waiting(context: RunContext) -> SessionInfo | None:
        opened = agent_sessions(context).open(session)
        return None if opened is None else _session_info(context, opened)

    opened = await while_connected(request, run.wait(open_waiting, wait_s))
    if opened is None:
        raise ServiceError(429, "no episode is waiting for an agent; try again")
    return opened


@router.get("/sessions/{session}")
async def get_session(session: SessionName, run: Run) -> SessionInfo:
    """The state of the session. Renews its lease, so that it does not expire during a long tool call."""
    return await run(lambda context: _session_info(context, agent_sessions(context).get(session)))


@router.delete("/sessions/{session}")
async def abandon_session(session: SessionName, run: Run) -> SessionEnd:
    """The agent cannot continue. The run repeats an episode that has a turn up to `env.max_retries` times."""
    return await run(lambda context: _session_end(agent_sessions(context).abandon(session)))


@session_router.post("/reward")
@router.post("/sessions/{session}/reward")
async def post_reward(session: SessionName, body: EpisodeReward, run: Run) -> SessionEnd:
    """End the episode with its reward."""

    def finish(context: RunContext) -> SessionEnd:
        return _session_end(agent_sessions(context).finish(session, body.reward, body.turn_rewards))

    return await run(finish)


async def open_if_new(session: str, body: TurnBody, run: RunHandle, request: Request) -> None:
    """Open a session for the first request in its URL. Raises ServiceError if no episode is waiting."""
    call = body.to_call()

    def open_waiting(context: RunContext) -> AgentSession | None:
        sessions = agent_sessions(context)
        body.check(context)
        return sessions.open_with(session, call)  # an invalid request takes no episode

    if await while_connected(request, run.wait(open_waiting, OPEN_TIMEOUT_S)) is None:
        raise ServiceError(503, f"no episode was waiting for an agent within {OPEN_TIMEOUT_S:g} s; try again")


async def next_turn(session: str, body: TurnBody, run: RunHandle, request: Request) -> SessionTurn:
    """The model's next turn in an open session. Raises ServiceError."""
    call = body.to_call()

    def complete(context: RunContext) -> SessionTurn | None:
        sessions = agent_sessions(context)
        body.check(context)
        answer = sessions.complete(session, call)
        if answer is None:
            return None
        version = sessions.get(session).version
        return SessionTurn(session, version, answer, context.setup.tokenizer.decode_token)

    turn = await while_connected(request, run.wait(complete, TURN_TIMEOUT_S))
    if turn is None:
        raise ServiceError(
            429, f"no turn within {TURN_TIMEOUT_S:g} s; the model is still generating, repeat the request"
        )
    return turn


def check_sampling(context: RunContext, given: Mapping[str, object]) -> None:
    """Raises ServiceError for sampling parameters, by their key in the configuration, that are not the
    run's, nor those of its evaluations; None is not given.
    """
    config = context.setup.config
    for key, value in given.items():
        expected = getattr(config.sampling, key)
        if value not in (None, expected, getattr(config.eval_sampling, key)):
            raise ServiceError(
                400, f"{key} must be the run's sampling.{key} = {json.dumps(expected)}; leave it out"
            )


def agent_sessions(context: RunContext) -> AgentSessions:
    """Raises ServiceError for a run without agents."""
    sessions = context.agent_sessions
    if sessions is None:
        raise ServiceError(409, "this run has no sessions; start it with service.agents = true")
    return sessions


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


def _to_json(value: Any) -> Any:
    """A value of a dataset as JSON: nan and inf become null, and other types become text."""
    if isinstance(value, dict):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
