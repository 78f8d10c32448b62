"""The reward tasks of a run: a group is judged once all of them have judged it, and fails if one cannot.

Each task is a crew of workers that take groups out of the stream. Its reward counts `weight` times in
the total, which is all that the orchestrator and the trainer see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dora.config import Config
from dora.core.events import GroupScored, GroupUnscorable
from dora.core.records import GroupId
from dora.core.wording import counted
from dora.errors import RunError
from dora.runtime import messages as m
from dora.runtime.collecting import Collector
from dora.runtime.consumer import ConsumerSpec
from dora.runtime.crew import Crew, CrewSpec
from dora.runtime.judging import REWARD, Judge, JudgeSpec
from dora.runtime.lending import SERVICE, OutsideJudge
from dora.runtime.process import Pulse, Told, Worker
from dora.stream.feed import Feed, reward_column
from dora.stream.ledger import FOREVER
from dora.stream.lines import Want

Fact = GroupScored | GroupUnscorable
A_GROUP = Want()
MANY = 1_000_000  # rows at once, where tokens alone are the limit


@dataclass(frozen=True)
class RewardTask:
    """A judge, how many of it there are, what they take at once, and what their rewards count."""

    judge: JudgeSpec
    timeout_s: float
    timeout_key: str
    weight: float = 1.0
    num_workers: int = 1
    want: Want = A_GROUP
    heartbeat_timeout_s: float = 5.0

    @property
    def name(self) -> str:
        return self.judge.name

    @property
    def is_outside(self) -> bool:
        """Whether its rewards come through the service."""
        return self.judge.function == SERVICE

    def lease_s(self, is_spread: bool = False) -> float:
        """How long somebody may have a group before another gets it. A crew's worker: for ever, as its death
        is seen or told; where a run `is_spread`, no longer than a call may take, in case it is not.
        """
        if self.is_outside:
            return self.timeout_s / 2
        return self.timeout_s if is_spread else FOREVER

    def outside_judge(self, feed: Feed) -> OutsideJudge:
        """Who lends its groups, from the stream of a feed."""
        return OutsideJudge(self.name, self.timeout_s, self.timeout_key, feed.folder, self.judge.model)

    def crew_spec(self, feed: Feed) -> CrewSpec:
        """Its workers, at the stream of a feed."""
        return CrewSpec(
            ConsumerSpec(
                reward_column(self.name), feed.folder, partial(Judge, self.judge), self.want, feed.storage.far
            ),
            title="rewarder" if self.name == REWARD else self.name,
            what=self.name,
            num_workers=self.num_workers,
            timeout_s=self.timeout_s,
            timeout_key=self.timeout_key,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
        )


def reward_tasks(config: Config, columns: tuple[str, ...] | None = None) -> list[RewardTask]:
    """The task of the section [reward], and one for each [[task]]; `columns` are those of the dataset."""
    model, reward = Path(config.model.path), config.reward
    beats_s = config.runtime.heartbeat_timeout_s
    tasks = []
    if reward.function is not None:
        judge = JudgeSpec(REWARD, reward.function, "reward.function", model, columns=columns)
        tasks.append(
            RewardTask(
                judge,
                reward.timeout_s,
                "reward.timeout_s",
                num_workers=reward.num_workers,
                heartbeat_timeout_s=beats_s,
            )
        )
    for task in config.task:
        key = f"task.{task.name}"
        judge = JudgeSpec(task.name, task.factory, f"{key}.class", model, task.options, columns)
        num_rows = task.micro_batch_rows or (MANY if task.micro_batch_tokens else A_GROUP.num_rows)
        tasks.append(
            RewardTask(
                judge,
                task.timeout_s,
                f"{key}.timeout_s",
                weight=task.weight,
                num_workers=task.num_workers,
                want=Want(num_rows, task.micro_batch_tokens),
                heartbeat_timeout_s=beats_s,
            )
        )
    return tasks


class Rewarding:
    """Groups in, `GroupScored` or `GroupUnscorable` out, once for each."""

    def __init__(
        self,
        tasks: Sequence[RewardTask],
        feed: Feed,
        start_timeout_s: float,
        told: Told,
        notice: Callable[[str], None],
    ) -> None:
        """The feed knows the tasks. What is said is put into `told`; who reads it lets us `hear`."""
        self._feed, self._weights = feed, {task.name: task.weight for task in tasks}
        self._awaited: dict[GroupId, tuple[bytes, Sequence[Sequence[int]]]] = {}  # as they were asked
        self._by_task: dict[GroupId, dict[str, tuple[float, ...]]] = {}
        self.first_failure = ""  # reason and traceback of the first group that could not be judged
        self.outside = {task.name: task.outside_judge(feed) for task in tasks if task.is_outside}
        self._crews = [
            Crew(task.crew_spec(feed), start_timeout_s, told, notice, self._drop, feed.bury)
            for task in tasks
            if not task.is_outside
        ]
        self._judges: list[Crew | OutsideJudge] = [*self._crews, *self.outside.values()]
        is_replaced = feed.storage.has_successors
        self._collect = partial(Collector, feed.folder, [*self._weights], told, is_replaced=is_replaced)
        if tasks:
            self._collect()

    @property
    def late(self) -> list[str]:
        """The workers that have not started yet."""
        return [name for crew in self._crews for name in crew.late]

    @property
    def headcount(self) -> str:
        """How many processes judge, in words."""
        return counted(sum(crew.num_workers for crew in self._crews), "rewarder")

    def by_task(self, group: GroupId) -> dict[str, tuple[float, ...]]:
        """What the rewards of a group that was just scored sum up, if there are several tasks; said once."""
        return self._by_task.pop(group, {})

    def submit(self, group: GroupId, question: bytes, held_out: Sequence[Sequence[int]] = ()) -> None:
        """As `Feed.ask`; a fact will follow."""
        self._awaited[group] = question, held_out
        self._ask(group)

    def ask_again(self) -> None:
        """Another storage has the rows: what was not judged by all tasks is judged by all again."""
        for crew in self._crews:
            crew.move(self._feed.storage.far)
        for judge in self.outside.values():
            judge.reconnect()
        if self._weights:
            self._collect()
        for group in self._awaited:
            self._ask(group)

    def hear(self, worker: Worker | None, message: Any) -> list[Fact] | None:
        """Facts that follow from a message; None if it is none of ours. Raises InputError and RunError."""
        if isinstance(message, m.Judgement):
            return self._judged(message)
        if worker is None and isinstance(message, m.Crashed):
            raise RunError(f"rewards cannot be collected any more:\n{message.traceback}".rstrip())
        for crew in self._crews:
            if worker is not None and crew.has(worker):
                return self._failed(crew.hear(worker, message))
        return None

    def check_deadlines(self, asleep_s: float = 0.0) -> list[Fact]:
        """Fail groups whose judge takes too long, time that the driver slept itself left out.

        Raises RunError if a worker does not start.
        """
        return [fact for judges in self._judges for fact in self._failed(judges.check_deadlines(asleep_s))]

    def pulses(self) -> list[Pulse]:
        """What is known of each process that judges."""
        return [pulse for crew in self._crews for pulse in crew.pulses()]

    def kill(self) -> None:
        """End the workers; the collector ends with the storage."""
        for crew in self._crews:
            crew.kill()
        for judge in self.outside.values():
            judge.close()

    def _ask(self, group: GroupId) -> None:
        self._feed.ask(group, *self._awaited[group])
        for judge in self.outside.values():
            judge.ask(group)

    def _judged(self, message: m.Judgement) -> list[Fact]:
        group = message.group
        if group not in self._awaited:
            return []  # it has failed in the meantime
        parts = [
            [self._weights[task] * reward for reward in rewards] for task, rewards in message.rewards.items()
        ]
        totals = tuple(map(sum, zip(*parts, strict=True)))
        for total in totals:
            if not math.isfinite(total):
                return self._failed([m.Unable((group,), f"the weighted sum of rewards is {total}", "")])
        self._settle(group)
        if len(self._weights) > 1:
            self._by_task[group] = message.rewards
        return [GroupScored(group, totals)]

    def _failed(self, unable: Iterable[m.Unable]) -> list[Fact]:
        facts: list[Fact] = []
        for word in unable:
            for group in word.groups:
                if group in self._awaited:  # and no late word of another task
                    self.first_failure = self.first_failure or f"{word.reason}\n{word.detail}"
                    self._settle(group)
                    facts.append(GroupUnscorable(group, word.reason))
        return facts

    def _drop(self, groups: Iterable[GroupId]) -> None:
        """Take out of the stream what has failed; what somebody judges once more is the trainer's by now."""
        self._feed.drop([group for group in groups if group in self._awaited])

    def _settle(self, group: GroupId) -> None:
        """The core has this group's fact; what is held out nobody else needs."""
        self._awaited.pop(group, None)
        for judges in self._judges:
            judges.forget(group)
        if group.is_held_out:
            self._feed.drop([group])
