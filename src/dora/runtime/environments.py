"""Plays the episodes of a run in environments, which live in worker processes of their own.

Whatever an environment does wrong breaks its episode by name. A process that dies, or owes a word for
too long, breaks those that were in it, and is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dora.core.records import GroupId, RequestId
from dora.envs.host import Broke, Ended, Opened, Replied, Rules
from dora.envs.host import Word as Said
from dora.errors import EnvError, RunError
from dora.runtime import players
from dora.runtime.env_worker import Begin, EnvSpec, Forget, PassedOver, Saying, Step, run_environments
from dora.runtime.messages import Gone, Ready
from dora.runtime.plan import Plan
from dora.runtime.players import Episode, Turn
from dora.runtime.process import Told, Worker, take
from dora.tokens import read_token

MAX_GAP_S = 1.0  # between two looks at the deadlines; the rest of a longer one the driver slept


@dataclass(eq=False)
class _Home:
    """A worker process, its episodes, and since when each is owed a word (s); None: it is not."""

    worker: Worker
    began_s: float
    is_ready: bool = False
    owed: dict[Episode, float | None] = field(default_factory=dict)


class Environments:
    """A player: each episode is in one environment of one process, the one with the fewest."""

    def __init__(self, plan: Plan, told: Told, notice: Callable[[str], None]) -> None:
        """Start the processes; `notice` gets the first failure in full, and each host that is passed over."""
        self._plan, self._told, self._notice = plan, told, notice
        self._spec = env_spec(plan)
        self._now_s, self._looked_s = 0.0, time.monotonic()  # seconds that the driver was awake
        self._turns: dict[Episode, int] = {}  # the last one of each
        self._was_ready = self._has_failed = False
        self._passed_over: set[str] = set()
        self._homes = [self._start(f"environments {k}") for k in range(plan.config.env.num_workers)]

    def begin(self, episode: Episode, version: int) -> None:
        """Reset an environment to the episode's row; all versions get the same beginning."""
        home = min(self._homes, key=lambda home: len(home.owed))
        group = episode.request.group
        row = self._plan.source_of(group).row(group.row)
        home.owed[episode] = self._now_s
        home.worker.send(Begin(episode, row, _seed(self._plan.config.run.seed, group)))

    def take_turn(self, turn: Turn) -> None:
        """Have the environment answer; one that has died has said so."""
        if (home := self._home_of(turn.episode)) is not None:
            self._turns[turn.episode] = turn.number
            home.owed[turn.episode] = self._now_s
            home.worker.send(Step(turn.episode, turn.token_ids, turn.num_left))

    def forget(self, episode: Episode) -> None:
        """Let the environment go, wherever it is."""
        self._turns.pop(episode, None)
        if (home := self._home_of(episode)) is not None:
            del home.owed[episode]
            home.worker.send(Forget(episode))

    def hear(self, worker: Worker, message: Any) -> bool:
        """Raises EnvError if environments cannot be loaded at the start, RunError if they no longer can."""
        home = next((home for home in self._homes if home.worker is worker), None)
        if home is None:
            return False
        match message:
            case Ready():
                home.is_ready = self._was_ready = True
                home.owed = dict.fromkeys(home.owed, self._now_s)  # nothing was owed before
            case Gone():
                self._died(home)
            case PassedOver(host, reason) if host not in self._passed_over:
                self._passed_over.add(host)
                self._notice(f"{host} of env.hosts is passed over, also later without a word: {reason}")
            case Saying(episode, word) if episode in home.owed:
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
    def late(self) -> list[str]:
        """The processes that have not started yet."""
        return [home.worker.name for home in self._homes if not home.is_ready]

    def close(self) -> None:
        """End the processes."""
        for home in self._homes:
            home.worker.kill()

    def _start(self, name: str) -> _Home:
        return _Home(Worker(name, run_environments, self._spec, self._told), self._now_s)

    def _home_of(self, episode: Episode) -> _Home | None:
        return next((home for home in self._homes if episode in home.owed), None)

    def _say(self, episode: Episode, word: Said) -> None:
        """Put into the driver's queue what a process said."""
        said: players.Word
        match word:
            case Opened(prompt_ids):
                said = players.Began(episode, tuple(prompt_ids))
            case Replied(token_ids):
                said = players.Observed(episode, self._turns[episode], tuple(token_ids))
            case Ended(reward):
                config = self._plan.config
                is_judged = config.reward.function is not None or bool(config.task)
                said = players.Over(episode, self._turns[episode], None if is_judged else reward)
            case Broke(reason, detail):
                self._tell_first(f"{reason}\n{detail}")
                said = players.Broken(episode, reason)
        self._told.put((None, said))

    def _tell_first(self, failure: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._notice(f"the first episode that broke: {failure.rstrip()}")

    def _died(self, home: _Home) -> None:
        if not home.is_ready:
            told, _, reason = home.worker.crash.partition("EnvError: ")
            is_input = told and not self._was_ready
            raise EnvError(reason.strip()) if is_input else RunError(home.worker.how_it_ended)
        self._replace(home, f"environment's process ended: {home.worker.how_it_ended}")

    def _replace(self, home: _Home, reason: str) -> None:
        """All its episodes are lost; the others go on."""
        home.worker.kill()
        for episode in home.owed:
            self._say(episode, Broke(reason, ""))
        self._homes[self._homes.index(home)] = self._start(home.worker.name)


def env_spec(plan: Plan) -> EnvSpec:
    """What a process needs to play the environments of a run. Raises ConfigError for a bad token."""
    config = plan.config
    file = config.env.token_file
    return EnvSpec(
        environment=config.env.environment,
        hosts=tuple(config.env.hosts),
        token="" if file is None else read_token(file, "env.token_file"),
        rules=Rules(config.data.max_prompt_length, config.env.max_turns, config.env.timeout_s),
        model=Path(config.model.path),
        template=config.data.chat_template,
        system_prompt=config.data.system_prompt,
    )


def try_environment(plan: Plan) -> str:
    """Begin an episode of the first row, as a run would; how it begins. Raises EnvError if it does not."""
    told = Told()
    failures: list[str] = []
    player = Environments(plan, told, failures.append)
    try:
        player.begin(Episode(RequestId(0, 0, 0), 0), version=0)
        while True:
            for worker, message in take(told, 0.2):
                if isinstance(message, players.Began):
                    text = plan.tokenizer.decode(message.prompt_ids)
                    return f"begins with {text[:60]!r}, {len(message.prompt_ids)} tokens"
                if isinstance(message, players.Broken):
                    raise EnvError(_why_not_begun(plan, message.reason, failures[0]))
                assert worker is not None
                player.hear(worker, message)
            player.check_deadlines()
    finally:
        player.close()


def _why_not_begun(plan: Plan, reason: str, failure: str) -> str:
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
