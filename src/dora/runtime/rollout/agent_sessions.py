"""Run episodes as sessions, in which external agents request turns and post rewards.

A session has one episode, and with it one policy version, from the agent's first messages to its reward. The
episode fails if the agent makes no call for longer than its lease. Calls are idempotent: a repeated call gets
the same response, so a client can retry after a lost response.

The tokens of a session are an append-only tree. A call whose messages continue an earlier state of the
conversation, or another conversation, is a branch: the model continues from the tokens that both have in
common. A turn of the model always has the tokens that were sampled, also in the history of a branch.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dora.config.schema import Config
from dora.core.types import Branch, RequestId
from dora.data.tool_calls import ParsedTurn, Tool, ToolCall
from dora.envs.episode import (
    EpisodeBranched,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
)
from dora.errors import ServiceError
from dora.runtime.process.supervisor import DriverClock
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.rollout.partial_outputs import SavedEpisode
from dora.runtime.run_dir import SESSIONS
from dora.runtime.run_setup import RunSetup
from dora.stream.sample_db import is_sum_of_turns, split_branches, tokens_before
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


MessageKey = tuple[str, tuple[ToolCall, ...]]


def _key(message: ChatMessage) -> MessageKey:
    """Equal for messages that differ only in spaces at their ends, which clients strip, or in how they write
    whole numbers: a client in JavaScript sends back 1.0 as 1.
    """
    calls = [call._replace(arguments=_with_integers(call.arguments)) for call in message.calls]
    return message.content.strip(), tuple(calls)


def _with_integers(arguments: str) -> str:
    """A JSON object without whole numbers that are written as floats."""
    if "." not in arguments and "e" not in arguments.lower():
        return arguments  # usually
    value = json.loads(arguments, parse_float=lambda text: int(x) if (x := float(text)).is_integer() else x)
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class TurnRequest:
    """A call for the next turn: all messages so far, and what is the same in all calls of a session."""

    messages: tuple[ChatMessage, ...]
    max_tokens: int | None = None
    tools: tuple[Tool, ...] = ()
    is_text: bool = False  # one message, whose text may begin with earlier prompts and turns


@dataclass(frozen=True)
class AssistantTurn:
    """A turn of the model, and its text without special tokens; `parsed` is that without the tool calls."""

    turn: PolicyTurn
    parsed: ParsedTurn
    text: str  # before tool calls were parsed
    num_prompt_tokens: int  # that the turn follows

    @property
    def message(self) -> ChatMessage:
        return ChatMessage("assistant", *self.parsed)

    @property
    def keys(self) -> tuple[MessageKey, MessageKey]:
        """What a client may send back as this turn: the message, or the text with the calls in it."""
        return _key(self.message), _key(ChatMessage("assistant", self.text))


class PastTurn(NamedTuple):
    """A turn of the model, the call that it answers, and the end of the turn in the session's tree."""

    call: TurnRequest
    answer: AssistantTurn
    end: int

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        """The messages up to the turn."""
        return (*self.call.messages, self.answer.message)


@dataclass(eq=False)
class AgentSession:
    """An episode that an agent runs."""

    name: str
    episode: EpisodeId
    version: int
    deadline_s: float | None  # of its lease, which is suspended while the model generates
    call: TurnRequest | None = None  # the last one
    max_tokens: int | None = None  # of each turn
    answer: AssistantTurn | None = None  # to the last call
    turns: list[PastTurn] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # all others, in the order in which they came
    branches: list[Branch] = field(default_factory=list)
    path: list[int] = field(default_factory=list)  # the tokens of the conversation as it is now
    is_recorded: bool = False  # its name is in the file of names
    end_reason: str = ""  # set once it has ended, possibly before the driver releases the episode

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """Of the last call."""
        return self.call.messages if self.call else ()

    @property
    def num_tokens(self) -> int:
        """Of the episode so far."""
        return len(self.prompt_ids) + len(self.token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the conversation."""
        self.token_ids += token_ids
        self.path += token_ids

    def path_to(self, position: int) -> list[int]:
        """The tokens before a position of the tree."""
        return tokens_before([*self.prompt_ids, *self.token_ids], self.branches, position)

    def shared_prefix(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """How many of these tokens the tree has already, and the position where they end in it."""
        num_shared = position = 0
        sequences = split_branches(self.prompt_ids, self.token_ids, self.branches)
        for k, (context, start, stop) in enumerate(sequences):
            known = [*context, *self.token_ids[start:stop]]
            length = min(len(known), len(token_ids))
            same = next((i for i in range(length) if known[i] != token_ids[i]), length)
            if same > num_shared and (k == 0 or same > len(context)):  # else another sequence has it
                num_shared, position = same, len(self.prompt_ids) + start + same - len(context)
        return num_shared, position


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
        self._names_file = setup.out / SESSIONS
        self._earlier = _read_names(self._names_file)  # sessions before a resume
        self._no_branches = _why_no_branches(setup.config)
        self.num_branches = 0
        self.num_retokenized = 0  # turns whose sampled tokens are not in the tokens of a history with them

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

        Returns None if no episode waits. Raises ServiceError if the session has ended, also before a resume.
        """
        session = self._open(name)
        if session is not None:
            self._record_name(session)
        return session

    def _open(self, name: str) -> AgentSession | None:
        """The same; the name is recorded once the first call is accepted."""
        if name in self._sessions or name in self._ended or name in self._earlier:
            return self.get(name)
        if not self._waiting:
            return None
        episode = min(self._waiting, key=lambda episode: self._waiting[episode])
        session = AgentSession(name, episode, self._waiting.pop(episode), self._new_deadline_s)
        self._sessions[name] = session
        self._idle_since_s = self._clock.now_s
        return session

    def open_with(self, name: str, call: TurnRequest) -> AgentSession | None:
        """As `open`; a new session starts its episode with this call. If it is refused, nothing changes.

        Raises ServiceError and DataError as `complete`.
        """
        is_new = name not in self._sessions
        session = self._open(name)
        if session is not None and is_new:
            try:
                self.complete(name, call)
            except Exception:
                del self._sessions[name]
                self._waiting[session.episode] = session.version
                raise
        return session

    def get(self, name: str) -> AgentSession:
        """Return an open session and renew its lease. Raises ServiceError if it is unknown or has ended."""
        return self._get(name)

    def _get(self, name: str, expected_end: str = "") -> AgentSession:
        """The same; a session that has ended with this reason is returned, too."""
        session = self._sessions.get(name) or self._ended.get(name)
        if session is None and name in self._earlier:
            raise ServiceError(410, "this session has ended: the run was resumed; open another one")
        if session is None:
            raise ServiceError(
                404,
                "there is no session of this name; open one with PUT /v1/sessions/NAME, or with the first "
                "completion of /s/NAME/v1",
            )
        if session.end_reason not in ("", expected_end):
            raise ServiceError(410, f"this session has ended: {session.end_reason}; open another one")
        if session.deadline_s is not None:
            session.deadline_s = self._new_deadline_s
        return session

    def complete(self, name: str, call: TurnRequest) -> AssistantTurn | None:
        """Return the model's turn in a conversation; None while it is being generated.

        The first call has the episode's prompt. A later call that repeats the conversation so far and appends
        new messages continues it; any other call is a branch. Raises ServiceError or DataError if the call
        has no room, or the run cannot train on branches.
        """
        session = self.get(name)
        if call.is_text:
            call = self._split_text(session, call)
        last = session.call
        if last is not None and (call.messages, call.tools) == (last.messages, last.tools):
            return session.answer
        if call.messages[-1].role == "assistant":
            raise ServiceError(
                400,
                "the last message has role assistant, which is reserved for the model's turn; end with a "
                "message of another role",
            )
        if last is None:
            self._start_episode(session, call)
        elif session.answer is None:
            raise ServiceError(
                409, "the model is generating the turn for an earlier call with other messages; wait for it"
            )
        else:
            self._continue_episode(session, session.answer, call)
        session.call, session.answer, session.deadline_s = call, None, None
        return None

    def finish(self, name: str, reward: float | None, turn_rewards: Sequence[float] = ()) -> AgentSession:
        """End the episode with a reward; None: the reward tasks of the run score it.

        `turn_rewards` are its parts, one for each turn of the model, or empty. Raises ServiceError before the
        model's first turn, and if the session has ended in another way.
        """
        session = self._get(name, _end_reason(reward))
        if session.end_reason:
            return session
        if session.answer is None:
            raise ServiceError(
                409, "the model has not generated a turn yet; post the reward after its last turn"
            )
        if reward is None and not self._setup.config.reward_weights:
            raise ServiceError(400, "this run has no reward tasks; post a number")
        turn = session.answer.turn.number
        if turn_rewards and len(turn_rewards) != turn + 1:
            num = len(turn_rewards)
            raise ServiceError(400, f"{num} turn_rewards for {plural(turn + 1, 'turn')}; post one for each")
        if turn_rewards and reward is None:
            raise ServiceError(400, "turn_rewards need a reward that is a number; post their sum")
        if turn_rewards and not is_sum_of_turns(turn_rewards, reward or 0.0):
            raise ServiceError(400, f"turn_rewards do not give the reward {reward}; post their sum as reward")
        self._end(session, _end_reason(reward), EpisodeEnded(session.episode, turn, reward, (*turn_rewards,)))
        return session

    def abandon(self, name: str) -> AgentSession:
        """End the session at the agent's request. Without messages its episode waits for another agent, else
        it fails.
        """
        reason = "session abandoned by its agent"
        session = self._get(name, reason)
        if not session.end_reason:
            self._fail(session, reason)
        return session

    # the episode runner of the driver

    def start(self, episode: EpisodeId, version: int, saved: SavedEpisode | None = None) -> None:
        """Let an episode wait for an agent. Its prompt comes from there, so none is saved."""
        if not self._waiting:
            self._idle_since_s = self._clock.now_s
        self._waiting[episode] = version

    def on_turn(self, turn: PolicyTurn) -> None:
        """Return the turn to the agent's call and start the session's lease."""
        session = self._session_of(turn.episode)
        if session is not None and not session.end_reason:
            text, call = self._setup.tokenizer.decode(turn.token_ids), session.call
            parser = self._setup.prompts.tool_parser
            parsed = parser(text, call.tools) if parser and call and call.tools else ParsedTurn(text, ())
            session.answer = AssistantTurn(turn, parsed, text, len(session.path))
            session.append(turn.token_ids)
            if call is not None:
                session.turns.append(PastTurn(call, session.answer, session.num_tokens))
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
        self._record_name(session)
        session.prompt_ids, session.path, session.max_tokens = [*prompt_ids], [*prompt_ids], call.max_tokens
        self._send(EpisodeStarted(session.episode, tuple(prompt_ids), call.max_tokens))

    def _continue_episode(self, session: AgentSession, answer: AssistantTurn, call: TurnRequest) -> None:
        if call.max_tokens not in (None, session.max_tokens):
            raise ServiceError(
                400, f"max_tokens was {session.max_tokens} in the session's first call; repeat it"
            )
        turn = answer.turn
        token_ids = self._tokens_of(session, call, turn.num_left)
        num_shared, position = len(session.path), session.num_tokens
        is_branch = token_ids[:num_shared] != session.path or len(token_ids) == num_shared
        if is_branch:
            if self._no_branches:
                raise ServiceError(
                    409,
                    f"the messages do not continue the session, and {self._no_branches}, so it trains on no "
                    "branches; send the messages of the last call, the model's turn unchanged and at least "
                    "one new message, or open another session",
                )
            num_shared, position = session.shared_prefix(token_ids)
        new = token_ids[num_shared:]
        if len(new) >= turn.num_left:
            raise ServiceError(
                409,
                f"the new messages have {len(new)} tokens, and the episode may only have {turn.num_left} "
                "more, including the next turn; post the reward instead",
            )
        if is_branch:
            session.branches.append(Branch(session.num_tokens, position))
            session.path = token_ids[:num_shared]
            self.num_branches += 1
            self._send(EpisodeBranched(session.episode, turn.number, tuple(token_ids), len(new), position))
        else:
            self._send(EpisodeObservation(session.episode, turn.number, tuple(new)))
        session.append(new)

    def _tokens_of(self, session: AgentSession, call: TurnRequest, num_left: int) -> list[int]:
        """All tokens of a conversation. What the model has generated in this session is not tokenized."""
        prompts, messages = self._setup.prompts, call.messages
        known = {key: past for past in session.turns for key in past.answer.keys}
        sampled = {
            i: known[_key(message)].answer.turn.token_ids
            for i, message in enumerate(messages)
            if message.role == "assistant" and _key(message) in known
        }
        same = [past for past in session.turns if past.call.tools == call.tools]
        for past in reversed(same):
            if past.call.messages == messages:  # once more
                return session.path_to(past.end)[: past.answer.num_prompt_tokens]
        base = max(
            (past for past in reversed(same) if messages[: len(past.history)] == past.history),
            key=lambda past: len(past.history),
            default=None,
        )
        num_old = 0 if base is None else len(base.history)
        texts = [message for i, message in enumerate(messages) if i >= num_old and i not in sampled]
        limit = num_left if base else self._setup.config.max_sequence_length
        _check_length(texts, limit, json.dumps(call.tools) if call.tools and not base else "")
        turns = {i - num_old: ids for i, ids in sampled.items() if i >= num_old}
        new = self._encodable(messages[num_old:], is_text=not turns)
        if base is None:
            token_ids = prompts.encode(new, call.tools, turns)
        else:
            end = base.answer.turn.token_ids
            token_ids = session.path_to(base.end) + prompts.encode_observation(new, end, turns)
        data = np.array(token_ids, np.int32).tobytes()
        self.num_retokenized += sum(
            not any(_contains(data, ids) for ids in _sampled_as(session, _key(messages[i]))) for i in sampled
        )
        return token_ids

    @staticmethod
    def _split_text(session: AgentSession, call: TurnRequest) -> TurnRequest:
        """The messages of a text that begins with earlier prompts and turns of the session."""
        (message,) = call.messages
        known: tuple[ChatMessage, ...] = ()
        num_known = 0
        for past in session.turns:
            text = "".join(each.content for each in past.history)
            has_text = past.answer.text != "" or text != message.content  # else the past call is repeated
            if max(1, num_known) <= len(text) and has_text and message.content.startswith(text):
                known, num_known = past.history, len(text)
        messages = (*known, message._replace(content=message.content[num_known:]))
        return replace(call, messages=messages, is_text=False)

    def _encodable(self, messages: Sequence[ChatMessage], is_text: bool = True) -> str | list[dict[str, Any]]:
        """Messages for the chat template; without a template, their contents joined if `is_text`."""
        if not self._setup.config.data.chat_template and is_text:
            return "".join(message.content for message in messages)
        return [_to_dict(message) for message in messages]

    def _record_name(self, session: AgentSession) -> None:
        """A client of a session that has ended with its process must not get another episode by its name."""
        if session.is_recorded:
            return
        try:
            with self._names_file.open("a", encoding="utf-8") as file:
                file.write(f"\n{session.name}")  # first the end of a line that a crash may have cut
                if self._setup.config.journal.fsync:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise ServiceError(503, f"cannot store the session: {error.strerror}; free disk space") from error
        session.is_recorded = True

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
        """Move a session to the ended ones, of which the latest are kept, without their conversations."""
        del self._sessions[session.name]
        name, reason = session.name, session.end_reason
        self._ended[name] = AgentSession(name, session.episode, session.version, None, end_reason=reason)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _send(self, reply: EpisodeReply) -> None:
        self._driver_messages.put((None, reply))


def _read_names(file: Path) -> frozenset[str]:
    """The names of all sessions that an earlier process of the run has opened."""
    return frozenset(file.read_text(encoding="utf-8").split() if file.exists() else ())


def _check_length(messages: Sequence[ChatMessage], num_tokens: int, tools: str = "") -> None:
    """Raises ServiceError for messages that cannot fit `num_tokens`, before the driver tokenizes them."""
    calls = [call for message in messages for call in message.calls]
    if len(messages) + len(calls) > num_tokens:
        raise ServiceError(
            400,
            f"there are {len(messages)} new messages with {len(calls)} tool calls, and each has at least one "
            f"of {num_tokens} tokens; send fewer",
        )
    num_characters = sum(len(message.content) for message in messages) + len(tools)
    num_characters += sum(len(call.name) + len(call.arguments) for call in calls)
    max_characters = MAX_CHARACTERS * num_tokens
    if num_characters > max_characters:
        raise ServiceError(
            400,
            f"the new messages have {num_characters} characters; {num_tokens} tokens have at most "
            f"{max_characters}; send less",
        )


def _end_reason(reward: float | None) -> str:
    return "finished, scored by the run" if reward is None else f"finished with reward {reward!r}"


def _to_dict(message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates take it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        fields["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in message.calls
        ]
    return fields


def _sampled_as(session: AgentSession, key: MessageKey) -> list[list[int]]:
    """The tokens of all turns that a client sends back as the same message."""
    return [past.answer.turn.token_ids for past in session.turns if key in past.answer.keys]


def _contains(data: bytes, part: Sequence[int]) -> bool:
    """Whether int32 tokens, as bytes, contain these tokens in a row."""
    size, wanted = np.dtype(np.int32).itemsize, np.array(part, np.int32).tobytes()
    at = data.find(wanted)
    while at % size and at >= 0:
        at = data.find(wanted, at + 1)
    return at >= 0


def _why_no_branches(config: Config) -> str:
    """Why a run cannot train on branches; empty if it can."""
    settings = {
        "trainer.routing_replay = true": config.trainer.routing_replay,
        'algorithm.policy_loss = "online_dpo"': config.algorithm.policy_loss == "online_dpo",
    }
    return next((f"the run has {name}" for name, is_set in settings.items() if is_set), "")
