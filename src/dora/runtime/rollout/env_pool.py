"""Runs the environments of a run in worker processes.

A worker process runs many environments in one asyncio loop (`dora.envs.runner`). An exception of an
environment fails its episode. A worker that exits or hangs is replaced, and all its episodes fail.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from dora.auth_token import read_auth_token
from dora.core.types import GroupId, RequestId
from dora.envs.base import Environment
from dora.envs.episode import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeReply,
    EpisodeStarted,
    PolicyTurn,
)
from dora.envs.runner import EnvRunner, EpisodeLimits, TextCodec
from dora.errors import EnvError
from dora.runtime.process.messages import WorkerReady
from dora.runtime.process.supervisor import MAX_GAP_S, Loss, Role, Slot, Supervisor
from dora.runtime.process.worker_process import (
    Worker,
    WorkerInbox,
    WorkerMessages,
    WorkerOutbox,
    allow_multiprocessing,
)
from dora.runtime.rollout.partial_outputs import SavedEpisode
from dora.runtime.run_setup import RunSetup

IN_RESET = re.compile(r"runner\.py\", line \d+, in reset$", re.MULTILINE)  # in a traceback of the runner


@dataclass(frozen=True)
class EnvSpec:
    """The environments of a worker: the environment class `environment`, or the environments of `hosts`."""

    environment: str | None
    options: Mapping[str, Any]  # keyword arguments of the class
    hosts: tuple[str, ...]
    token: str  # auth token for the hosts
    limits: EpisodeLimits
    model: Path  # folder with the tokenizer
    has_chat_template: bool
    system_prompt: str | None  # of the chat template, as the next
    chat_template_kwargs: Mapping[str, Any]


# from the driver to a worker, with `PolicyTurn`


@dataclass(frozen=True)
class StartEpisode:
    """Reset an environment to a row of the dataset, or restore it if its episode is `saved`."""

    episode: EpisodeId
    row: Mapping[str, Any]
    seed: int
    saved: SavedEpisode | None


@dataclass(frozen=True)
class CancelEpisode:
    """Stop an episode; no reply is expected."""

    episode: EpisodeId


# from a worker to the driver, with `EpisodeReply`


@dataclass(frozen=True)
class HostUnreachable:
    """One of `hosts` could not be reached, and the next one was tried."""

    host: str
    reason: str


def run_env_worker(outbox: WorkerOutbox, inbox: WorkerInbox, spec: EnvSpec) -> None:
    """Run episodes until the process ends. Raises EnvError if the environments cannot be loaded."""
    allow_multiprocessing()
    make = _make_environments(spec, lambda host, reason: outbox.send(HostUnreachable(host, reason)))
    codec = _make_codec(spec)
    outbox.send(WorkerReady())
    asyncio.run(_run_episodes(outbox, inbox, make, spec.limits, codec))


async def _run_episodes(
    outbox: WorkerOutbox,
    inbox: WorkerInbox,
    make: Callable[[], Environment],
    limits: EpisodeLimits,
    codec: TextCodec,
) -> None:
    runner = EnvRunner(make, limits, codec, outbox.send)
    while True:
        for message in await asyncio.to_thread(lambda: list(inbox.receive(None))):
            match message:
                case StartEpisode(episode, row, seed, None):
                    runner.start(episode, row, seed)
                case StartEpisode(episode, saved=SavedEpisode() as saved):
                    runner.restore(episode, saved.state, saved.prompt_ids)
                case PolicyTurn():
                    runner.submit_turn(message)
                case CancelEpisode(episode):
                    runner.cancel(episode)


def _make_environments(
    spec: EnvSpec, on_unreachable: Callable[[str, str], None]
) -> Callable[[], Environment]:
    """Returns a function that makes an environment, on the hosts in turn.

    `on_unreachable` gets a host that cannot be reached, and the reason.
    """
    if spec.environment is not None:
        from dora.envs.base import load_environment

        return load_environment(spec.environment, spec.options)
    from dora.envs.remote import RemoteEnvironment

    hosts, calls = spec.hosts, count()

    def make() -> Environment:
        first = next(calls) % len(hosts)
        rotated = [*hosts[first:], *hosts[:first]]
        return RemoteEnvironment(rotated, spec.token, spec.limits.timeout_s / 2, on_unreachable)

    return make


def _make_codec(spec: EnvSpec) -> TextCodec:
    from dora.data.chat import ChatTemplate, PromptEncoder
    from dora.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(spec.model)
    template = None
    if spec.has_chat_template:
        template = ChatTemplate(spec.model, spec.system_prompt, spec.chat_template_kwargs)
    encoder = PromptEncoder(tokenizer, template)
    return TextCodec(encoder.encode, encoder.encode_observation, tokenizer.decode)


class EnvPool:
    """An `EpisodeRunner`: each episode has an environment in the worker process with the fewest episodes."""

    def __init__(self, setup: RunSetup, supervisor: Supervisor, notice: Callable[[str], None]) -> None:
        """Start the workers. `notice` gets the first failure in full, and each unreachable host once."""
        self._setup, self._supervisor, self._notice = setup, supervisor, notice
        self._spec = env_spec(setup)
        self._saved: dict[EpisodeId, SavedEpisode] = {}  # episodes that continue from a state
        self._has_failed = False
        self._unreachable: set[str] = set()
        role, numbers = Role("environments", restarts_at_once=True), range(setup.config.env.num_workers)
        # The episodes of each worker, and since when a reply is awaited; None: no reply is awaited.
        self._episodes: dict[Slot, dict[EpisodeId, float | None]] = {
            supervisor.add(self, role, number): {} for number in numbers
        }
        for slot in self._episodes:
            self.restart(slot)

    def start(self, episode: EpisodeId, version: int, saved: SavedEpisode | None = None) -> None:
        """Reset an environment to the episode's row, or restore it. The version does not matter to it."""
        if saved is not None:
            self._saved[episode] = saved
        slot = min(self._episodes, key=lambda slot: (not slot.workers, len(self._episodes[slot])))
        self._await(slot, episode)
        if slot.workers:  # else `restart` starts the episode with the next worker
            self._send_start(slot, episode)

    def on_turn(self, turn: PolicyTurn) -> None:
        """Step the environment. If its worker has exited, the failure of the episode is already queued."""
        if (slot := self._slot_of(turn.episode)) is not None:
            self._await(slot, turn.episode)
            slot.worker.send(replace(turn, logprobs=()))  # environments do not need them

    def release(self, episode: EpisodeId) -> None:
        """Cancel the episode in its worker."""
        self._saved.pop(episode, None)
        if (slot := self._slot_of(episode)) is not None:
            del self._episodes[slot][episode]
            slot.has_task = bool(self._episodes[slot])
            if slot.workers:
                slot.worker.send(CancelEpisode(episode))

    def on_message(self, slot: Slot, worker: Worker, message: Any) -> None:
        """Handle a message of a worker."""
        episodes = self._episodes[slot]
        match message:
            case WorkerReady():  # environment timeouts do not include the start of the process
                self._episodes[slot] = dict.fromkeys(episodes, self._supervisor.clock.now_s)
            case HostUnreachable(host, reason) if host not in self._unreachable:
                self._unreachable.add(host)
                self._notice(f"{host} of env.hosts is unreachable; skipping it (logged once): {reason}")
            case _ if isinstance(message, EpisodeReply) and message.episode in episodes:
                episodes[message.episode], slot.made_progress = None, True
                self._forward(message)

    def check_deadlines(self) -> None:
        """Replace workers that hang. The worker itself reports a timeout of one environment."""
        now_s, timeout_s = self._supervisor.clock.now_s, self._spec.limits.timeout_s
        for slot, episodes in self._episodes.items():
            waits_s = [now_s - since_s for since_s in episodes.values() if since_s is not None]
            if slot.is_ready and max(waits_s, default=0.0) > 2 * timeout_s + MAX_GAP_S:
                reason = f"{slot.name}: an environment in this process hangs, env.timeout_s = {timeout_s:g}"
                self._supervisor.report_lost(slot, reason, is_timeout=True)

    def on_lost(self, slot: Slot, loss: Loss) -> None:
        """The worker's episodes fail. Raises InputError or RunError if the worker is not restarted."""
        if loss.restart_in_s is None:
            raise loss.error
        reason = loss.reason if loss.is_timeout else f"environment's process ended: {loss.reason}"
        episodes, self._episodes[slot] = self._episodes[slot], {}
        for episode in episodes:
            self._forward(EpisodeFailed(episode, reason))

    def restart(self, slot: Slot) -> None:
        self._supervisor.start(slot, f"environments {slot.number}", run_env_worker, self._spec)
        slot.has_task = bool(self._episodes[slot])
        for episode in self._episodes[slot]:
            self._send_start(slot, episode)

    def close(self) -> None:
        """Kill the workers."""
        for slot in self._episodes:
            self._supervisor.end(slot)

    def _await(self, slot: Slot, episode: EpisodeId) -> None:
        self._episodes[slot][episode] = self._supervisor.clock.now_s
        slot.has_task = True

    def _send_start(self, slot: Slot, episode: EpisodeId) -> None:
        group = episode.request.group
        row, seed = self._setup.source_of(group).row(group.row), _seed(self._setup.config.run.seed, group)
        slot.worker.send(StartEpisode(episode, row, seed, self._saved.get(episode)))

    def _slot_of(self, episode: EpisodeId) -> Slot | None:
        return next((slot for slot, episodes in self._episodes.items() if episode in episodes), None)

    def _forward(self, reply: EpisodeReply) -> None:
        """Put a reply into the driver's messages. Reward tasks score an episode in place of its rewards."""
        if isinstance(reply, EpisodeEnded) and self._setup.config.reward_weights:
            reply = replace(reply, reward=None, turn_rewards=())
        if isinstance(reply, EpisodeFailed) and not self._has_failed:
            self._has_failed = True
            self._notice(f"first failed episode: {reply.reason}\n{reply.detail}".rstrip())
        self._supervisor.messages.put((None, reply))


def env_spec(setup: RunSetup) -> EnvSpec:
    """The spec of a run's environment workers. Raises ConfigError for a bad token file."""
    config = setup.config
    file = config.env.token_file
    return EnvSpec(
        environment=config.env.environment,
        options=config.env.options,
        hosts=tuple(config.env.hosts),
        token="" if file is None else read_auth_token(file, "env.token_file"),
        limits=EpisodeLimits(config.data.max_prompt_length, config.env.max_turns, config.env.timeout_s),
        model=Path(config.model.path),
        has_chat_template=config.data.chat_template,
        system_prompt=config.data.system_prompt,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )


def try_environment(setup: RunSetup) -> str:
    """Start an episode of the first row and describe its prompt. Raises EnvError if it does not start."""
    replies: list[EpisodeReply] = []
    failures: list[str] = []
    supervisor = Supervisor(setup.config, setup.out, WorkerMessages(), replies.append)
    supervisor.check_starts()
    pool = EnvPool(setup, supervisor, failures.append)
    try:
        pool.start(EpisodeId(RequestId(0, 0, 0), 0), version=0)
        while not replies:
            supervisor.poll(0.2)
            pool.check_deadlines()
    finally:
        pool.close()
    match replies[0]:
        case EpisodeStarted(_, prompt_ids):
            text = setup.tokenizer.decode(prompt_ids)
            return f"first prompt {text[:60]!r}, {len(prompt_ids)} tokens"
        case EpisodeFailed(_, reason):
            raise EnvError(_start_failure(setup, reason, failures[0]))
    raise AssertionError(replies[0])


def _start_failure(setup: RunSetup, reason: str, failure: str) -> str:
    """An error message; the last line of `failure` is the exception."""
    exception = failure.rstrip().splitlines()[-1]
    cause = reason if reason in exception else f"{reason} ({exception})"
    name = setup.config.env.environment or f"(env.hosts = {setup.config.env.hosts})"
    problem = f"env.environment = {name}: the episode of the first row does not start: {cause}"
    return f"{problem}; {_start_remedy(setup, failure, exception)}"


def _start_remedy(setup: RunSetup, failure: str, exception: str) -> str:
    """What helps after the `exception` at the end of a traceback."""
    if "Traceback" in failure and not IN_RESET.search(failure):
        return "correct what makes the environment, its constructor or function, or env.options"
    if exception.startswith("KeyError"):
        columns = ", ".join(map(str, setup.source_of(GroupId(0, 0)).row(0)))
        return f"have reset read columns of the row, which has {columns}; rename the others, or add them"
    return (
        "have reset return text of characters that the model's tokenizer knows, of 1 to "
        f"data.max_prompt_length = {setup.config.data.max_prompt_length} tokens, in time"
    )


def _seed(seed: int, group: GroupId) -> int:
    """A seed of 31 bits, the same for all siblings. For held-out rows it does not depend on the version."""
    epoch = -1 if group.is_held_out else group.epoch
    digest = blake2b(f"{seed}/environment/{epoch}/{group.row}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
