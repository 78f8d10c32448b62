"""Plays the episodes of a run through sessions, in which agents outside ask for turns and post rewards.

A session has one episode, and with it one version, from the agent's first messages to its reward. An
agent that is silent for longer than its lease has failed it. Every call may be repeated: the same
one has the same answer, so that what is lost on the way can be sent again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dora.errors import ServiceError
from dora.runtime.process.worker_process import Worker, WorkerMessages
from dora.runtime.rollout.episodes import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeStarted,
    PolicyTurn,
)
from dora.runtime.rollout.episodes import EpisodeReply as Said
from dora.runtime.run_setup import RunSetup
from dora.text import plural

MAX_ENDED = 10_000  # sessions whose end is remembered
MAX_GAP_S = 1.0  # between two looks at the leases; the rest of a longer one the driver slept
MAX_CHARACTERS = 32  # of a token, on average: longer messages are not even tokenized
NOTICE_S = 30.0  # without an agent, until the person watching is told, and told again


class ChatMessage(NamedTuple):
    """One of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class AssistantTurn:
    """What the model wrote in a turn: all its tokens, and their text without special ones."""

    turn: PolicyTurn
    text: str
    num_prompt_tokens: int  # all that it had read and written before


@dataclass(eq=False)
class AgentSession:
    """One episode in the hands of an agent."""

    name: str
    episode: EpisodeId
    version: int
    deadline_s: float | None  # of its lease, which does not run while the model writes
    messages: tuple[ChatMessage, ...] = ()  # the last call's
    max_turn_tokens: int | None = None  # as the first call had it
    answer: AssistantTurn | None = None  # to the last call
    num_tokens: int = 0  # read and written so far
    end_reason: str = ""  # how it ended, though the driver still holds it

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        """What a call that goes on begins with."""
        return (*self.messages, ChatMessage("assistant", self.answer.text)) if self.answer else ()


class AgentSessions:
    """A player; its methods for sessions, too, are the driver's to call."""

    def __init__(self, plan: RunSetup, told: WorkerMessages, notice: Callable[[str], None]) -> None:
        self._plan, self._told, self._notice = plan, told, notice
        self._now_s, self._looked_s = 0.0, time.monotonic()  # seconds that the driver was awake
        self._alone_s = 0.0  # since when episodes wait and nobody opens a session
        self._seats: dict[EpisodeId, int] = {}  # episode -> version: they wait for an agent
        self._sessions: dict[str, AgentSession] = {}
        self._ended: OrderedDict[str, AgentSession] = OrderedDict()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        """Episodes that wait for an agent."""
        return len(self._seats)

    # what agents ask

    def open(self, name: str) -> AgentSession | None:
        """The session of this name, if need be a new one of the oldest version that waits; None: none waits.

        Raises ServiceError for one that has ended.
        """
        if name in self._sessions or name in self._ended:
            return self.get(name)
        if not self._seats:
            return None
        episode = min(self._seats, key=lambda episode: self._seats[episode])
        session = AgentSession(name, episode, self._seats.pop(episode), self._lease_s)
        self._sessions[name] = session
        self._alone_s = self._now_s
        return session

    def get(self, name: str) -> AgentSession:
        """A session that goes on; its lease begins anew. Raises ServiceError for one that does not."""
        session = self._sessions.get(name) or self._ended.get(name)
        if session is None:
            raise ServiceError(404, "there is no session of this name; open one with PUT /v1/sessions/NAME")
        if session.end_reason:
            raise ServiceError(410, f"this session has ended: {session.end_reason}; open another one")
        if session.deadline_s is not None:
            session.deadline_s = self._lease_s
        return session

    def complete(
        self, name: str, messages: tuple[ChatMessage, ...], max_tokens: int | None
    ) -> AssistantTurn | None:
        """The model's answer to a conversation; None: it is being written, ask again.

        The first call is the episode's prompt; each further one has all that was said before, word for
        word, and what is new. Raises ServiceError or DataError for one that cannot follow.
        """
        session = self.get(name)
        if messages == session.messages:
            return session.answer
        if not session.messages:
            self._begin(session, messages, max_tokens)
        elif session.answer is None:
            raise ServiceError(409, "the answer to other messages is being written; wait for it")
        else:
            self._go_on(session, session.answer, messages, max_tokens)
        session.messages, session.answer, session.deadline_s = messages, None, None
        return None

    def finish(self, name: str, reward: float | None) -> AgentSession:
        """The episode is over, and was worth this; None: the run's own tasks judge it.

        Raises ServiceError before the model has answered, or for a session that ended otherwise.
        """
        known = self._sessions.get(name) or self._ended.get(name)
        if known is not None and known.end_reason == _finished(reward):
            return known
        session = self.get(name)
        if session.answer is None:
            raise ServiceError(409, "the model has not answered yet; post the reward after its last turn")
        if reward is None and not self._is_judged:
            raise ServiceError(400, "this run has no reward tasks; post a number")
        self._close(
            session, _finished(reward), EpisodeEnded(session.episode, session.answer.turn.number, reward)
        )
        return session

    def abandon(self, name: str) -> AgentSession:
        """The agent cannot go on. An episode that has not begun waits for another one; others fail."""
        session = self.get(name)
        self._break(session, "session given up by its agent")
        return session

    # what the driver says

    def start(self, episode: EpisodeId, version: int) -> None:
        """An episode waits for an agent from now on."""
        if not self._seats:
            self._alone_s = self._now_s
        self._seats[episode] = version

    def on_turn(self, turn: PolicyTurn) -> None:
        """The agent's call is answered, and its lease begins."""
        session = self._of(turn.episode)
        if session is not None and not session.end_reason:
            text = self._plan.tokenizer.decode(turn.token_ids)
            session.answer = AssistantTurn(turn, text, session.num_tokens)
            session.num_tokens += len(turn.token_ids)
            session.deadline_s = self._lease_s

    def release(self, episode: EpisodeId) -> None:
        """Whoever has it is told so, if it is no news of their own."""
        self._seats.pop(episode, None)
        if (session := self._of(episode)) is not None:
            session.end_reason = (
                session.end_reason or "its group has failed, or its engine was lost and it begins anew"
            )
            self._forget(session)

    def on_message(self, worker: Worker, message: Any) -> bool:
        """Agents are no workers."""
        return False

    def check_deadlines(self) -> None:
        """Give up for agents that have fallen silent."""
        now_s = time.monotonic()
        self._now_s += min(now_s - self._looked_s, MAX_GAP_S)
        self._looked_s = now_s
        for session in [*self._sessions.values()]:
            if session.deadline_s is not None and self._now_s > session.deadline_s:
                self._break(session, "session expired")
        if self._seats and not self._sessions and self._now_s > self._alone_s + NOTICE_S:
            self._notice(f"no agent opens a session: {plural(len(self._seats), 'answer')} not begun")
            self._alone_s = self._now_s

    @property
    def not_started(self) -> list[str]:
        """The run does not wait for agents to begin."""
        return []

    def close(self) -> None:
        """Nothing was started."""

    @property
    def _is_judged(self) -> bool:
        """Whether the run itself can tell how good an answer is."""
        return self._plan.config.reward.function is not None or bool(self._plan.config.reward_task)

    @property
    def _lease_s(self) -> float:
        """When a lease that begins now ends."""
        return self._now_s + self._plan.config.service.session_timeout_s

    def _begin(
        self, session: AgentSession, messages: tuple[ChatMessage, ...], max_tokens: int | None
    ) -> None:
        most = self._plan.config.data.max_prompt_length
        _check_length(messages, most)
        prompt_ids = self._plan.prompts.encode(self._written(messages))
        if not 1 <= len(prompt_ids) <= most:
            raise ServiceError(
                400,
                f"the messages have {len(prompt_ids)} tokens; the rule is 1 to data.max_prompt_length = "
                f"{most}; send fewer",
            )
        session.max_turn_tokens, session.num_tokens = max_tokens, len(prompt_ids)
        self._say(EpisodeStarted(session.episode, tuple(prompt_ids), max_tokens))

    def _go_on(
        self,
        session: AgentSession,
        answer: AssistantTurn,
        messages: tuple[ChatMessage, ...],
        max_tokens: int | None,
    ) -> None:
        history = session.history
        if messages[: len(history)] != history or len(messages) == len(history):
            raise ServiceError(
                409,
                "a session goes on where it is: send the messages of the last call, the answer word for word "
                "and at least one message more; for another beginning open another session",
            )
        if max_tokens not in (None, session.max_turn_tokens):
            raise ServiceError(
                400, f"max_tokens was {session.max_turn_tokens} in the session's first call; repeat it"
            )
        _check_length(messages[len(history) :], answer.turn.num_left)
        new = self._written(messages[len(history) :])
        observed = self._plan.prompts.encode_observation(new, answer.turn.token_ids)
        if not 1 <= len(observed) < answer.turn.num_left:
            raise ServiceError(
                409,
                f"the new messages have {len(observed)} tokens, and the episode may only have "
                f"{answer.turn.num_left} more, with an answer to them; post the reward",
            )
        session.num_tokens += len(observed)
        self._say(EpisodeObservation(session.episode, answer.turn.number, tuple(observed)))

    def _written(self, messages: Sequence[ChatMessage]) -> str | list[dict[str, str]]:
        """Messages for the chat template, or one after the other where there is none."""
        if any(message.role == "assistant" for message in messages):
            raise ServiceError(400, "a new message is the assistant's; its messages are the model's to write")
        if self._plan.config.data.chat_template:
            return [message._asdict() for message in messages]
        return "".join(message.content for message in messages)

    def _of(self, episode: EpisodeId) -> AgentSession | None:
        return next((s for s in self._sessions.values() if s.episode == episode), None)

    def _break(self, session: AgentSession, end: str) -> None:
        """The episode has failed, or waits for another agent if nothing was asked yet."""
        if session.messages:
            self._close(session, end, EpisodeFailed(session.episode, end))
        else:
            session.end_reason = end
            self._seats[session.episode] = session.version
            self._forget(session)

    def _close(self, session: AgentSession, end: str, said: Said) -> None:
        session.end_reason, session.deadline_s = end, None
        self._say(said)

    def _forget(self, session: AgentSession) -> None:
        """The driver holds it no more; its end is remembered for a while."""
        self._ended[session.name] = self._sessions.pop(session.name)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _say(self, said: Said) -> None:
        self._told.put((None, said))


def _check_length(messages: Sequence[ChatMessage], num_tokens: int) -> None:
    """Raises ServiceError for what cannot be so few tokens, before the driver spends time on it."""
    num_characters, most = sum(len(message.content) for message in messages), MAX_CHARACTERS * num_tokens
    if num_characters > most:
        raise ServiceError(
            400,
            f"the new messages have {num_characters} characters; {num_tokens} tokens have at most {most}; "
            "send less",
        )


def _finished(reward: float | None) -> str:
    return "finished, for the run to judge" if reward is None else f"finished with reward {reward!r}"
