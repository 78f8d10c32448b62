"""A process in which environments are played, and what it is told and tells.

It has one thread for all of them; what it says of an episode is a word of `dora.envs.runner`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from dora.auth_token import read_auth_token
from dora.core.types import GroupId, RequestId
from dora.envs.base import Environment
from dora.envs.runner import (
    EnvDone,
    EnvFailure,
    EnvObservation,
    EnvReply,
    EnvReset,
    EnvRunner,
    EpisodeLimits,
    TextCodec,
)
from dora.errors import EnvError, RunError
from dora.runtime.process.messages import WorkerExited, WorkerReady
from dora.runtime.process.worker_process import Worker, WorkerInbox, WorkerMessages, WorkerOutbox, receive
from dora.runtime.rollout import episodes
from dora.runtime.rollout.episodes import EpisodeId, PolicyTurn
from dora.runtime.run_setup import RunSetup


@dataclass(frozen=True)
class EnvSpec:
    """Environments of the class named, or those of `hosts`; the model folder whose tokenizer they speak.

    `token` is what hosts are shown; `template`, whether they speak in the model's chat template, then with
    a `system_prompt`.
    """

    environment: str | None
    hosts: tuple[str, ...]
    token: str
    rules: EpisodeLimits
    model: Path
    template: bool
    system_prompt: str | None


@dataclass(frozen=True)
class StartEpisode:
    """Reset an environment to a row of the dataset."""

    episode: EpisodeId
    row: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class SubmitTurn:
    """Have the environment of an episode answer a turn; `num_left` tokens may follow it."""

    episode: EpisodeId
    token_ids: list[int]
    num_left: int


@dataclass(frozen=True)
class CancelEpisode:
    """Nobody waits for this episode any more."""

    episode: EpisodeId


@dataclass(frozen=True)
class EnvWorkerReply:
    """What is to be said of an episode."""

    episode: EpisodeId
    word: EnvReply


@dataclass(frozen=True)
class HostUnreachable:
    """One of `hosts` could not be reached, and another one was tried."""

    host: str
    reason: str


def run_env_worker(outbox: WorkerOutbox, inbox: WorkerInbox, spec: EnvSpec) -> None:
    """Play episodes on order until the process ends. Raises EnvError if they cannot be loaded."""
    make = _make_environments(spec, lambda host, reason: outbox.send(HostUnreachable(host, reason)))
    language = _language(spec)
    outbox.send(WorkerReady())
    asyncio.run(_play(outbox, inbox, make, spec.rules, language))


async def _play(
    outbox: WorkerOutbox,
    inbox: WorkerInbox,
    make: Callable[[], Environment],
    rules: EpisodeLimits,
    language: TextCodec,
) -> None:
    host = EnvRunner(make, rules, language, lambda episode, word: outbox.send(EnvWorkerReply(episode, word)))
    while True:
        for message in await asyncio.to_thread(lambda: list(inbox.receive(None))):
            match message:
                case StartEpisode(episode, row, seed):
                    host.start(episode, row, seed)
                case SubmitTurn(episode, token_ids, num_left):
                    host.submit_turn(episode, token_ids, num_left)
                case CancelEpisode(episode):
                    host.cancel(episode)


def _make_environments(spec: EnvSpec, pass_over: Callable[[str, str], None]) -> Callable[[], Environment]:
    """What makes environments; those of several hosts go round, so that each gets its share.

    `pass_over` gets a host that cannot be reached, and why.
    """
    if spec.environment is not None:
        from dora.envs.base import load_environment

        return load_environment(spec.environment)
    from dora.envs.remote import RemoteEnvironment

    hosts, turns = spec.hosts, count()

    def make() -> Environment:
        first = next(turns) % len(hosts)
        rotated = [*hosts[first:], *hosts[:first]]
        return RemoteEnvironment(rotated, spec.token, spec.rules.timeout_s / 2, pass_over)

    return make


def _language(spec: EnvSpec) -> TextCodec:
    from dora.data.chat import ChatTemplate, PromptEncoder
    from dora.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(spec.model)
    encoder = PromptEncoder(
        tokenizer, ChatTemplate(spec.model, spec.system_prompt) if spec.template else None
    )
    return TextCodec(encoder.encode, encoder.encode_observation, tokenizer.decode)


# === dora.runtime.rollout.env_pool: Plays the episodes of a run in environments, which live in worker processes of their own.
#
# Whatever an environment does wrong breaks its episode by name. A process that dies, or owes a word for
# too long, breaks those that were in it, and is replaced.

MAX_GAP_S = 1.0  # between two looks at the deadlines; the rest of a longer one the driver slept


@dataclass(eq=False)
class _Home:
    """A worker process, its episodes, and since when each is owed a word (s); None: it is not."""

    worker: Worker
    began_s: float
    is_ready: bool = False
    owed: dict[EpisodeId, float | None] = field(default_factory=dict)


class EnvPool:
    """A player: each episode is in one environment of one process, the one with the fewest."""

    def __init__(self, plan: RunSetup, told: WorkerMessages, notice: Callable[[str], None]) -> None:
        """Start the processes; `notice` gets the first failure in full, and each host that is passed over."""
        self._plan, self._told, self._notice = plan, told, notice
        self._spec = env_spec(plan)
        self._now_s, self._looked_s = 0.0, time.monotonic()  # seconds that the driver was awake
        self._turns: dict[EpisodeId, int] = {}  # the last one of each
        self._was_ready = self._has_failed = False
        self._passed_over: set[str] = set()
        self._homes = [self._start(f"environments {k}") for k in range(plan.config.env.num_workers)]

    def start(self, episode: EpisodeId, version: int) -> None:
        """Reset an environment to the episode's row; all versions get the same beginning."""
        home = min(self._homes, key=lambda home: len(home.owed))
        group = episode.request.group
        row = self._plan.source_of(group).row(group.row)
        home.owed[episode] = self._now_s
        home.worker.send(StartEpisode(episode, row, _seed(self._plan.config.run.seed, group)))

    def on_turn(self, turn: PolicyTurn) -> None:
        """Have the environment answer; one that has died has said so."""
        if (home := self._home_of(turn.episode)) is not None:
            self._turns[turn.episode] = turn.number
            home.owed[turn.episode] = self._now_s
            home.worker.send(SubmitTurn(turn.episode, turn.token_ids, turn.num_left))

    def release(self, episode: EpisodeId) -> None:
        """Let the environment go, wherever it is."""
        self._turns.pop(episode, None)
        if (home := self._home_of(episode)) is not None:
            del home.owed[episode]
            home.worker.send(CancelEpisode(episode))

    def on_message(self, worker: Worker, message: Any) -> bool:
        """Raises EnvError if environments cannot be loaded at the start, RunError if they no longer can."""
        home = next((home for home in self._homes if home.worker is worker), None)
        if home is None:
            return False
        match message:
            case WorkerReady():
                home.is_ready = self._was_ready = True
                home.owed = dict.fromkeys(home.owed, self._now_s)  # nothing was owed before
            case WorkerExited():
                self._died(home)
            case HostUnreachable(host, reason) if host not in self._passed_over:
                self._passed_over.add(host)
                self._notice(f"{host} of env.hosts is passed over, also later without a word: {reason}")
            case EnvWorkerReply(episode, word) if episode in home.owed:
                home.owed[episode] = None
                self._say(episode, word)
        return True

    def check_deadlines(self) -> None:
        """Replace a process that owes a word for twice the time it may take, which it could have said itself.

        Raises RunError for one that does not start.
        """
        now_s = time.monotonic()
        self._now_s += min(now_s - self._looked_s, MAX_GAP_S)
        self._looked_s = now_s
        timeout_s, start_timeout_s = self._spec.rules.timeout_s, self._plan.config.runtime.start_timeout_s
        for home in self._homes:
            if not home.is_ready and self._now_s - home.began_s > start_timeout_s:
                raise RunError(
                    f"{home.worker.name} did not start within runtime.start_timeout_s = {start_timeout_s:g} s"
                )
            since_s = min((s for s in home.owed.values() if s is not None), default=self._now_s)
            if home.is_ready and self._now_s - since_s > 2 * timeout_s + MAX_GAP_S:
                self._replace(home, f"environment or one beside it hangs, env.timeout_s = {timeout_s:g}")

    @property
    def not_started(self) -> list[str]:
        """The processes that have not started yet."""
        return [home.worker.name for home in self._homes if not home.is_ready]

    def close(self) -> None:
        """End the processes."""
        for home in self._homes:
            home.worker.kill()

    def _start(self, name: str) -> _Home:
        return _Home(Worker(name, run_env_worker, self._spec, self._told), self._now_s)

    def _home_of(self, episode: EpisodeId) -> _Home | None:
        return next((home for home in self._homes if episode in home.owed), None)

    def _say(self, episode: EpisodeId, word: EnvReply) -> None:
        """Put into the driver's queue what a process said."""
        said: episodes.EpisodeReply
        match word:
            case EnvReset(prompt_ids):
                said = episodes.EpisodeStarted(episode, tuple(prompt_ids))
            case EnvObservation(token_ids):
                said = episodes.EpisodeObservation(episode, self._turns[episode], tuple(token_ids))
            case EnvDone(reward):
                config = self._plan.config
                is_judged = config.reward.function is not None or bool(config.reward_task)
                said = episodes.EpisodeEnded(episode, self._turns[episode], None if is_judged else reward)
            case EnvFailure(reason, detail):
                self._tell_first(f"{reason}\n{detail}")
                said = episodes.EpisodeFailed(episode, reason)
        self._told.put((None, said))

    def _tell_first(self, failure: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._notice(f"the first episode that broke: {failure.rstrip()}")

    def _died(self, home: _Home) -> None:
        if not home.is_ready:
            told, _, reason = home.worker.traceback.partition("EnvError: ")
            is_input = told and not self._was_ready
            raise EnvError(reason.strip()) if is_input else RunError(home.worker.exit_reason)
        self._replace(home, f"environment's process ended: {home.worker.exit_reason}")

    def _replace(self, home: _Home, reason: str) -> None:
        """All its episodes are lost; the others go on."""
        home.worker.kill()
        for episode in home.owed:
            self._say(episode, EnvFailure(reason, ""))
        self._homes[self._homes.index(home)] = self._start(home.worker.name)


def env_spec(plan: RunSetup) -> EnvSpec:
    """What a process needs to play the environments of a run. Raises ConfigError for a bad token."""
    config = plan.config
    file = config.env.token_file
    return EnvSpec(
        environment=config.env.environment,
        hosts=tuple(config.env.hosts),
        token="" if file is None else read_auth_token(file, "env.token_file"),
        rules=EpisodeLimits(config.data.max_prompt_length, config.env.max_turns, config.env.timeout_s),
        model=Path(config.model.path),
        template=config.data.chat_template,
        system_prompt=config.data.system_prompt,
    )


def try_environment(plan: RunSetup) -> str:
    """Begin an episode of the first row, as a run would; how it begins. Raises EnvError if it does not."""
    told = WorkerMessages()
    failures: list[str] = []
    player = EnvPool(plan, told, failures.append)
    try:
        player.start(EpisodeId(RequestId(0, 0, 0), 0), version=0)
        while True:
            for worker, message in receive(told, 0.2):
                if isinstance(message, episodes.EpisodeStarted):
                    text = plan.tokenizer.decode(message.prompt_ids)
                    return f"begins with {text[:60]!r}, {len(message.prompt_ids)} tokens"
                if isinstance(message, episodes.EpisodeFailed):
                    raise EnvError(_why_not_begun(plan, message.reason, failures[0]))
                assert worker is not None
                player.on_message(worker, message)
            player.check_deadlines()
    finally:
        player.close()


def _why_not_begun(plan: RunSetup, reason: str, failure: str) -> str:
    """A sentence; the last line of `failure` says what was raised."""
    last = failure.rstrip().splitlines()[-1]
    why = reason if reason in last else f"{reason} ({last})"
    name = plan.config.env.environment or f"(env.hosts = {plan.config.env.hosts})"
    return (
        f"env.environment = {name}: the episode of the first row does not begin: {why}; have "
        "reset return text of characters that the model's tokenizer knows, of 1 to "
        f"data.max_prompt_length = {plan.config.data.max_prompt_length} tokens, in time"
    )


def _seed(seed: int, group: GroupId) -> int:
    """31 bits that siblings share; those of held-out rows do not depend on the version."""
    epoch = -1 if group.is_held_out else group.epoch
    digest = blake2b(f"{seed}/environment/{epoch}/{group.row}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
