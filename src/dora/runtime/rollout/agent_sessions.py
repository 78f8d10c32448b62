"""Run episodes as sessions, in which external agents request turns and post rewards.

A session has one episode, and with it one policy version, from the agent's first messages to its reward. The
episode fails if the agent makes no call for longer than its lease. Calls are idempotent: a repeated call gets
the same response, so a client can retry after a lost response.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dora.core.types import RequestId
from dora.data.tool_calls import ParsedTurn, Tool, ToolCall
from dora.errors import ServiceError
from dora.runtime.process.supervisor import DriverClock
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.rollout.episodes import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
    has_reward_tasks,
)
from dora.runtime.run_setup import RunSetup
from dora.text import plural

MAX_ENDED = 10_000  # ended sessions whose end reason is kept
MAX_CHARACTERS = 32  # per token, on average: longer messages are rejected before they are tokenized
NOTICE_S = 30.0  # between two log lines while episodes wait and there is no session


class ChatMessage(NamedTuple):
    """A message of a conversation; `calls` are those of the assistant.

    What else a client writes into a message does not reach the model, and may differ in a repeated one.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class TurnRequest:
    """A call for the next turn: all messages so far, and what is the same in all calls of a session."""

    messages: tuple[ChatMessage, ...]
    max_tokens: int | None = None
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class AssistantTurn:
    """A turn of the model, and its text without special tokens; `parsed` is that without the tool calls."""

    turn: PolicyTurn
    parsed: ParsedTurn
    num_prompt_tokens: int  # of the episode before this turn

    @property
    def message(self) -> ChatMessage:
        return ChatMessage("assistant", *self.parsed)


@dataclass(eq=False)
class AgentSession:
    """An episode that an agent runs."""

    name: str
    episode: EpisodeId
    version: int
    deadline_s: float | None  # of its lease, which is suspended while the model generates
    messages: tuple[ChatMessage, ...] = ()  # of the last call
    first_call: TurnRequest | None = None
    answer: AssistantTurn | None = None  # to the last call
    num_tokens: int = 0  # of the episode so far
    end_reason: str = ""  # set once it has ended, possibly before the driver releases the episode

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        """The messages that the next call must begin with."""
        return (*self.messages, self.answer.message) if self.answer else ()


class AgentSessions:
    """The episode runner of a run with agents. The service calls its other methods on the driver's thread."""

    def __init__(
        self,
        setup: RunSetup,
        driver_messages: WorkerMessages,
        clock: DriverClock,
        notice: Callable[[str], None],
    ) -> None:
        self._setup, self._driver_messages, self._notice = setup, driver_messages, notice
        self._clock = clock
        self.instructions = ""  # how an agent opens a session; known once the service listens
        self._idle_since_s = 0.0  # last opened session or log line, or start of the wait
        self._waiting: dict[EpisodeId, int] = {}  # episodes without an agent -> version
        self._sessions: dict[str, AgentSession] = {}
        self._ended: OrderedDict[str, AgentSession] = OrderedDict()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        """Episodes without an agent."""
        return len(self._waiting)

    @property
    def missing(self) -> str:
        """That episodes wait and there is no session, and what an agent has to do; else ""."""
        if not self._waiting or self._sessions:
            return ""
        what = f"no agent has a session: {plural(len(self._waiting), 'episode')} waiting"
        return f"{what}; {self.instructions}" if self.instructions else what

    def waits(self) -> dict[RequestId, str]:
        """What each request needs from an agent; those for which the model generates need nothing."""
        waits = {episode.request: "an agent that opens a session" for episode in self._waiting}
        for session in self._sessions.values():
            if session.deadline_s is not None:
                what = "its next messages or its reward" if session.messages else "its first messages"
                waits[session.episode.request] = f"{what}, in session {session.name}"
        return waits

    # calls of agents

    def open(self, name: str) -> AgentSession | None:
        """Return the session of this name, or open it for the waiting episode with the oldest version.

        Returns None if no episode waits. Raises ServiceError if the session has ended.
        """
        if name in self._sessions or name in self._ended:
            return self.get(name)
        if not self._waiting:
            return None
        episode = min(self._waiting, key=lambda episode: self._waiting[episode])
        session = AgentSession(name, episode, self._waiting.pop(episode), self._new_deadline_s)
        self._sessions[name] = session
        self._idle_since_s = self._clock.now_s
        return session

    def get(self, name: str) -> AgentSession:
        """Return an open session and renew its lease. Raises ServiceError if it is unknown or has ended."""
        session = self._sessions.get(name) or self._ended.get(name)
        if session is None:
            raise ServiceError(
                404,
                "there is no session of this name; open one with PUT /v1/sessions/NAME, or with the first "
                "completion of /s/NAME/v1",
            )
        if session.end_reason:
            raise ServiceError(410, f"this session has ended: {session.end_reason}; open another one")
        if session.deadline_s is not None:
            session.deadline_s = self._new_deadline_s
        return session

    def complete(self, name: str, call: TurnRequest) -> AssistantTurn | None:
        """Return the model's turn in a conversation; None while it is being generated.

        The first call has the episode's prompt. Each later call repeats the conversation so far word for word
        and appends new messages. Raises ServiceError or DataError if the call does not continue the
        conversation.
        """
        session = self.get(name)
        if call.messages == session.messages:
            return session.answer
        if session.first_call is None:
            self._start_episode(session, call)
        elif session.answer is None:
            raise ServiceError(
                409, "the model is generating the turn for an earlier call with other messages; wait for it"
            )
        else:
            self._continue_episode(session, session.first_call, session.answer, call)
        session.messages, session.answer, session.deadline_s = call.messages, None, None
        return None

    def finish(self, name: str, reward: float | None) -> AgentSession:
        """End the episode with a reward; None: the reward tasks of the run score it.

        Raises ServiceError before the model's first turn, and if the session has ended in another way.
        """
        known = self._sessions.get(name) or self._ended.get(name)
        if known is not None and known.end_reason == _end_reason(reward):
            return known
        session = self.get(name)
        if session.answer is None:
            raise ServiceError(
                409, "the model has not generated a turn yet; post the reward after its last turn"
            )
        if reward is None and not has_reward_tasks(self._setup.config):
            raise ServiceError(400, "this run has no reward tasks; post a number")
        self._end(
            session, _end_reason(reward), EpisodeEnded(session.episode, session.answer.turn.number, reward)
        )
        return session

    def abandon(self, name: str) -> AgentSession:
        """End the session at the agent's request. Without messages its episode waits for another agent, else
        it fails.
        """
        session = self.get(name)
        self._fail(session, "session abandoned by its agent")
        return session

    # the episode runner of the driver

    def start(self, episode: EpisodeId, version: int) -> None:
        """Let an episode wait for an agent."""
        if not self._waiting:
            self._idle_since_s = self._clock.now_s
        self._waiting[episode] = version

    def on_turn(self, turn: PolicyTurn) -> None:
        """Return the turn to the agent's call and start the session's lease."""
        session = self._session_of(turn.episode)
        if session is not None and not session.end_reason:
            text, first = self._setup.tokenizer.decode(turn.token_ids), session.first_call
            parser = self._setup.prompts.tool_parser
            parsed = parser(text, first.tools) if parser and first and first.tools else ParsedTurn(text, ())
            session.answer = AssistantTurn(turn, parsed, session.num_tokens)
            session.num_tokens += len(turn.token_ids)
            session.deadline_s = self._new_deadline_s

    def release(self, episode: EpisodeId) -> None:
        """End the episode's session, if it has one that is still open."""
        self._waiting.pop(episode, None)
        if (session := self._session_of(episode)) is not None:
            reason = "its group has failed, or its engine was lost and the episode restarts"
            session.end_reason = session.end_reason or reason
            self._remove(session)

    def check_deadlines(self) -> None:
        """End sessions whose lease has expired, and log that episodes wait while there is no session."""
        for session in [*self._sessions.values()]:
            if session.deadline_s is not None and self._clock.now_s > session.deadline_s:
                self._fail(session, "session expired")
        if self._clock.now_s > self._idle_since_s + NOTICE_S and (missing := self.missing):
            self._notice(missing)
            self._idle_since_s = self._clock.now_s

    def close(self) -> None:
        """Do nothing: there are no processes."""

    @property
    def _new_deadline_s(self) -> float:
        """When a lease that starts now expires."""
        return self._clock.now_s + self._setup.config.service.session_timeout_s

    def _start_episode(self, session: AgentSession, call: TurnRequest) -> None:
        max_length = self._setup.config.data.max_prompt_length
        _check_length(call.messages, max_length, json.dumps(call.tools) if call.tools else "")
        prompt_ids = self._setup.prompts.encode(self._encodable(call.messages), call.tools)
        if not 1 <= len(prompt_ids) <= max_length:
            what = "the messages and tools" if call.tools else "the messages"
            raise ServiceError(
                400,
                f"{what} have {len(prompt_ids)} tokens; they must have 1 to data.max_prompt_length = "
                f"{max_length}; send fewer",
            )
        session.first_call, session.num_tokens = call, len(prompt_ids)
        self._send(EpisodeStarted(session.episode, tuple(prompt_ids), call.max_tokens))

    def _continue_episode(
        self, session: AgentSession, first: TurnRequest, answer: AssistantTurn, call: TurnRequest
    ) -> None:
        history, messages = session.history, call.messages
        if messages[: len(history)] != history or len(messages) == len(history):
            raise ServiceError(
                409,
                "the messages do not continue the session: send those of the last call, the model's turn "
                "unchanged and at least one new message; open another session for another conversation",
            )
        if call.max_tokens not in (None, first.max_tokens):
            raise ServiceError(
                400, f"max_tokens was {first.max_tokens} in the session's first call; repeat it"
            )
        if call.tools != first.tools:
            raise ServiceError(400, "the tools differ from those of the session's first call; repeat those")
        _check_length(messages[len(history) :], answer.turn.num_left)
        new = self._encodable(messages[len(history) :])
        observed = self._setup.prompts.encode_observation(new, answer.turn.token_ids)
        if not 1 <= len(observed) < answer.turn.num_left:
            raise ServiceError(
                409,
                f"the new messages have {len(observed)} tokens, and the episode may only have "
                f"{answer.turn.num_left} more, including the next turn; post the reward instead",
            )
        session.num_tokens += len(observed)
        self._send(EpisodeObservation(session.episode, answer.turn.number, tuple(observed)))

    def _encodable(self, messages: Sequence[ChatMessage]) -> str | list[dict[str, str]]:
        """Messages for the chat template; without a template, their contents joined."""
        if any(message.role == "assistant" for message in messages):
            raise ServiceError(
                400, "a new message has role assistant, which is reserved for the model; remove it"
            )
        if self._setup.config.data.chat_template:
            return [{"role": message.role, "content": message.content} for message in messages]
        return "".join(message.content for message in messages)

    def _session_of(self, episode: EpisodeId) -> AgentSession | None:
        return next((s for s in self._sessions.values() if s.episode == episode), None)

    def _fail(self, session: AgentSession, reason: str) -> None:
        """End a session. Its episode fails, or waits for another agent if it has not started."""
        if session.messages:
            self._end(session, reason, EpisodeFailed(session.episode, reason))
        else:
            session.end_reason = reason
            self._waiting[session.episode] = session.version
            self._remove(session)

    def _end(self, session: AgentSession, reason: str, reply: EpisodeReply) -> None:
        session.end_reason, session.deadline_s = reason, None
        self._send(reply)

    def _remove(self, session: AgentSession) -> None:
        """Move a session to the ended ones, of which the latest are kept."""
        self._ended[session.name] = self._sessions.pop(session.name)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _send(self, reply: EpisodeReply) -> None:
        self._driver_messages.put((None, reply))


def _check_length(messages: Sequence[ChatMessage], num_tokens: int, tools: str = "") -> None:
    """Raises ServiceError for messages that cannot fit `num_tokens`, before the driver tokenizes them."""
    num_characters = sum(len(message.content) for message in messages) + len(tools)
    max_characters = MAX_CHARACTERS * num_tokens
    if num_characters > max_characters:
        raise ServiceError(
            400,
            f"the new messages have {num_characters} characters; {num_tokens} tokens have at most "
            f"{max_characters}; send less",
        )


def _end_reason(reward: float | None) -> str:
    return "finished, scored by the run" if reward is None else f"finished with reward {reward!r}"
