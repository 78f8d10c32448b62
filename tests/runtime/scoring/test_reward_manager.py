"""Reward tasks at a stream, without a run: who dies, hangs or is late costs its own group at most."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.tiny import CHARACTERS, save_start

from dora.config import load
from dora.core.events import GroupScored, ScoringFailed
from dora.core.types import GroupId, RequestId
from dora.errors import InputError, RunError
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import WorkerMessages, receive
from dora.runtime.scoring.reward_manager import (
    MANY,
    MAX_FAILED_STARTS,
    MAX_IDLE_DEATHS,
    RewardManager,
    RewardTask,
    reward_tasks,
)
from dora.runtime.scoring.reward_worker import RewardSpec, encode_prompt_row
from dora.stream.metadata import BatchRequest
from dora.stream.run_stream import RunStream
from dora.stream.sample_db import Trajectory

TASK = """
import os, signal, time
from pathlib import Path


def reward(prompt, completion, *, mood="good", **row):
    flag = Path(__file__).with_name("has died")
    if mood == "hangs":
        time.sleep(3600)
    if mood == "kills" or (mood == "kills once" and not flag.exists()):
        flag.touch()
        os.kill(os.getpid(), 9)
    if mood == "stops" or (mood == "stops once" and not flag.exists()):
        flag.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    if mood == "waits":
        while not flag.exists():
            time.sleep(0.01)
    return float(len(completion))


class Together:
    def __init__(self, worth):
        self.worth = worth

    def __call__(self, prompts, completions, mood, **columns):
        if "bad" in mood:
            raise ValueError("bad mood")
        return [self.worth * len(prompts)] * len(prompts)
"""


class Bench:
    """A feed with groups of two answers, three for held-out prompts, and its reward tasks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, save_start(folder / "start")
        (folder / "tasks.py").write_text(TASK)
        self.told = WorkerMessages()
        self.facts: list[GroupScored | ScoringFailed] = []
        self.notices: list[str] = []

    def task(
        self,
        name: str = "reward",
        what: str = "reward",
        options: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
        **rules: Any,
    ) -> RewardTask:
        function, key = f"{self.folder}/tasks.py:{what}", f"reward_task.{name}.class"
        judge = RewardSpec(name, function, key, self.model, options or {})
        return RewardTask(judge, timeout_s, f"{name}.timeout_s", **rules)

    def open(self, *tasks: RewardTask, host: str | None = None) -> None:
        """With a `host` workers come to the stream as from another machine, and leave it without a word."""
        leases = {task.name: task.lease_s() for task in tasks}
        self.feed = RunStream(self.folder / "stream", 2, tasks=leases, held_out_size=3, host=host)
        self.rewarding = RewardManager(tasks, self.feed, 60.0, self.told, self.notices.append)

    def ask(self, row: int, version: int = 0, **columns: Any) -> GroupId:
        """A group whose answers have one and two characters."""
        group = GroupId(0, row)
        for sibling in range(2):
            ids = [CHARACTERS.index("7")] * (sibling + 1)
            self.feed.put(Trajectory(RequestId(*group, sibling), version, "", [1], ids, [-1.0] * len(ids)))
        self.feed.flush()
        self.rewarding.submit(group, encode_prompt_row("7:", columns))
        return group

    def hear(self, num_facts: int) -> Sequence[GroupScored | ScoringFailed]:
        while len(self.facts) < num_facts:
            self.listen()
        return self.facts

    def listen(self) -> None:
        for worker, message in receive(self.told, 0.1):
            self.facts += self.rewarding.hear(worker, message) or []
        self.facts += self.rewarding.check_deadlines()

    def close(self) -> None:
        self.rewarding.kill()
        self.feed.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """In a folder with a short name, for that of a socket may have 107 letters."""
    folder = Path(tempfile.mkdtemp(prefix="dora-"))
    made = Bench(folder)
    yield made
    made.close()
    shutil.rmtree(folder)


anywhere = pytest.mark.parametrize("host", [None, "127.0.0.1"])


def test_the_rewards_of_all_tasks_are_weighed_and_added(bench: Bench) -> None:
    bench.open(bench.task(), bench.task("sum", "Together", {"worth": 0.25}, weight=-2.0))
    group = bench.ask(1, mood="good")
    held_out = GroupId(-4, 1)
    bench.rewarding.submit(held_out, encode_prompt_row("7:", {"mood": "good"}), [[], [7], [7, 7]])
    assert {*bench.hear(2)} == {
        GroupScored(group, (1.0 - 1.0, 2.0 - 1.0)),
        GroupScored(held_out, (-1.5, 1.0 - 1.5, 2.0 - 1.5)),
    }


@anywhere
def test_a_worker_that_dies_once_costs_nothing(bench: Bench, host: str | None) -> None:
    bench.open(bench.task(), host=host)
    groups = [bench.ask(1, mood="kills once"), bench.ask(2)]
    assert bench.hear(2) == [GroupScored(group, (1.0, 2.0)) for group in groups]
    assert bench.notices == ["the rewarder is replaced: rewarder was killed by SIGKILL"]


def test_a_worker_that_dies_while_it_starts_is_started_again_a_few_times(bench: Bench) -> None:
    def kill(times: int) -> None:
        """The worker that is ready, and then those that start in its place."""
        for _ in range(times):
            (worker,) = multiprocessing.active_children()
            worker.kill()
            num_notices = len(bench.notices)
            while len(bench.notices) == num_notices:
                bench.listen()

    bench.open(bench.task())
    groups = [bench.ask(1)]
    bench.hear(1)
    kill(times=MAX_FAILED_STARTS)
    groups.append(bench.ask(2))
    assert bench.hear(2) == [GroupScored(group, (1.0, 2.0)) for group in groups]
    with pytest.raises(RunError, match="rewarder was killed by SIGKILL"):
        kill(times=1 + MAX_FAILED_STARTS)


def test_workers_that_die_whenever_they_are_ready_end_the_run(bench: Bench) -> None:
    def die() -> None:
        (process,) = multiprocessing.active_children()
        process.kill()
        while True:
            worker, message = bench.told.get(timeout=60)
            if isinstance(message, m.WorkerExited):
                bench.rewarding.hear(worker, m.WorkerReady())
                bench.rewarding.hear(worker, message)
                return

    bench.open(bench.task())
    for _ in range(MAX_IDLE_DEATHS):
        die()
    with pytest.raises(RunError, match="killed by SIGKILL, as the 3 before it, and none of them had a group"):
        die()


def test_a_run_in_which_rewards_find_no_room_ends_once(bench: Bench) -> None:
    """Whatever a worker says or does later, the driver may still wait for its trainer, and save."""
    bench.open(bench.task())
    worker, _ = bench.told.get(timeout=60)
    with pytest.raises(RunError, match="rewarder: no room in the stream"):
        bench.rewarding.hear(worker, m.StreamFull("no room in the stream"))
    assert bench.rewarding.hear(worker, m.StreamFull("no room in the stream")) == []
    assert bench.rewarding.hear(worker, m.WorkerExited()) == []
    assert bench.notices == []


def test_a_limit_of_tokens_alone_limits_tokens_alone(task: Path) -> None:
    """Without any, a task takes one group after the other."""
    wants = []
    for limits in ("", "micro_batch_tokens = 512", "micro_batch_tokens = 512\nmicro_batch_size = 8"):
        text = f'[[reward_task]]\nname = "sum"\nclass = "task.py:reward"\n{limits}\n'
        path = task.with_name("with a task.toml")
        path.write_text(task.read_text() + text)
        wants.append(reward_tasks(load.read_config(path))[1].want)
    assert wants == [BatchRequest(), BatchRequest(MANY, 512), BatchRequest(8, 512)]


def test_a_group_that_two_workers_die_of_fails_and_no_other_does(bench: Bench) -> None:
    bench.open(bench.task())
    groups = [bench.ask(1, mood="kills"), bench.ask(2)]
    reason = "reward ended its process: rewarder was killed by SIGKILL"
    assert bench.hear(2) == [ScoringFailed(groups[0], reason), GroupScored(groups[1], (1.0, 2.0))]
    assert bench.rewarding.first_failure.startswith(reason)


def test_a_group_that_hangs_fails_and_no_other_does(bench: Bench) -> None:
    bench.open(bench.task("slow", num_workers=2, timeout_s=2.0))
    hanging, *others = bench.ask(0, mood="hangs"), *(bench.ask(row) for row in range(1, 4))
    assert {*bench.hear(4)} == {
        ScoringFailed(hanging, "slow took longer than slow.timeout_s = 2"),
        *(GroupScored(group, (1.0, 2.0)) for group in others),
    }


@anywhere
def test_a_worker_that_is_stopped_between_calls_is_replaced_and_costs_nothing(
    bench: Bench, host: str | None
) -> None:
    """The stream may have lent it a group that it will never begin."""
    bench.open(bench.task(heartbeat_timeout_s=4.0), host=host)
    groups = [bench.ask(1)]
    bench.hear(1)
    while any(pulse.activity for pulse in bench.rewarding.pulses()):  # its result is there before it says so
        bench.listen()
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    groups.append(bench.ask(2))
    assert bench.hear(2) == [GroupScored(group, (1.0, 2.0)) for group in groups]
    why = "the rewarder was silent for more than runtime.heartbeat_timeout_s = 4"
    assert bench.notices == [f"the rewarder is replaced: {why}"]


def test_a_group_whose_worker_is_stopped_in_its_call_is_judged_by_another_one_once(bench: Bench) -> None:
    bench.open(bench.task(timeout_s=3.0))
    once = bench.ask(1, mood="stops once")
    assert bench.hear(1) == [GroupScored(once, (1.0, 2.0))]
    always = bench.ask(2, mood="stops")
    why = "the rewarder was silent when reward.timeout_s = 3 was over"
    assert bench.hear(2)[1] == ScoringFailed(always, f"reward stopped its process: {why}")


def test_only_the_bad_group_of_a_micro_batch_fails(bench: Bench) -> None:
    bench.open(bench.task("sum", "Together", {"worth": 1.0}, want=BatchRequest(max_rows=100)))
    groups = [bench.ask(row, mood=mood) for row, mood in enumerate(("good", "bad", "good"))]
    assert {*bench.hear(3)} == {
        GroupScored(groups[0], (2.0, 2.0)),
        GroupScored(groups[2], (2.0, 2.0)),
        ScoringFailed(groups[1], "sum: reward raised ValueError"),
    }
    assert "bad mood" in bench.rewarding.first_failure


def test_what_one_task_fails_is_told_once_whatever_another_says_later(bench: Bench) -> None:
    bench.open(bench.task("late"), bench.task("sum", "Together", {"worth": 1.0}))
    bad = bench.ask(0, mood="bad")
    assert bench.hear(1) == [ScoringFailed(bad, "sum: reward raised ValueError")]
    bench.feed.clear([bad])
    good = bench.ask(1, mood="good")
    assert bench.hear(2)[1] == GroupScored(good, (3.0, 4.0))


def test_the_oldest_version_is_judged_first(bench: Bench) -> None:
    bench.open(bench.task())
    bench.ask(9, mood="waits")
    groups = {version: bench.ask(version, version) for version in (3, 1, 2)}
    (bench.folder / "has died").touch()
    order = [fact.group for fact in bench.hear(4)][-3:]
    assert order == [groups[1], groups[2], groups[3]]


def test_rewards_whose_sum_is_no_number_fail_their_group(bench: Bench) -> None:
    bench.open(bench.task(weight=1e308), bench.task("sum", "Together", {"worth": 1.0}, weight=1e308))
    group = bench.ask(0, mood="good")
    assert bench.hear(1) == [ScoringFailed(group, "the weighted sum of rewards is inf")]


def test_a_class_that_cannot_be_made_is_bad_input(bench: Bench) -> None:
    bench.open(bench.task("sum", "Together", {"wroth": 1.0}))
    with pytest.raises(InputError, match=r"reward_task.sum.class = .*unexpected keyword argument 'wroth'"):
        bench.hear(1)


def test_a_run_whose_stream_has_ended_says_so(bench: Bench) -> None:
    bench.open(bench.task())
    bench.ask(1, mood="good")
    bench.hear(1)
    bench.feed.close()
    with pytest.raises(RunError, match="rewards cannot be collected any more"):
        bench.hear(2)


def test_a_group_of_a_judge_that_may_die_unseen_is_lent_again_when_a_call_would_be_over() -> None:
    """The storage sees the death of whoever is on its machine; of who is elsewhere only the driver hears."""
    task = RewardTask(
        RewardSpec("reward", "exact_match", "reward.function", Path()), 60.0, "reward.timeout_s"
    )
    assert (task.lease_s(), task.lease_s(is_spread=True)) == (math.inf, 60.0)
