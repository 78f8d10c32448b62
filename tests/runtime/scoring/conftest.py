"""Reward tasks at a sample stream, without a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.tiny import CHARACTERS, save_start, write_task

from dora.config import load
from dora.core.events import GroupScored, ScoringFailed
from dora.core.types import GroupId, RequestId
from dora.runtime.process.messages import RewardSpec
from dora.runtime.process.supervisor import Supervisor
from dora.runtime.process.worker_process import WorkerMessages
from dora.runtime.sample_book import TaskRewards
from dora.runtime.scoring.reward_manager import MAX_SILENCE_S, RewardManager, RewardTask
from dora.runtime.scoring.reward_worker import encode_prompt_row
from dora.stream.run_stream import RunStream
from dora.stream.sample_db import FinishedSample, Trajectory

REASONS = ("stop", "length")  # why the responses of a group have finished
FUNCTIONS = """
import multiprocessing, os, signal, time
from pathlib import Path

from dora.stream.client import StreamClient


def reward(prompt, completion, *, behavior="normal", **row):
    flag = Path(__file__).with_name("flag")
    if behavior == "hangs":
        time.sleep(3600)
    if behavior == "crashes" or (behavior == "crashes once" and not flag.exists()):
        flag.touch()
        os.kill(os.getpid(), 9)
    if behavior == "stops" or (behavior == "stops once" and not flag.exists()):
        flag.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    if behavior == "crashes before the commit":
        StreamClient.get = lambda *arguments: os.kill(os.getpid(), 9)
    if behavior == "waits":
        while not flag.exists():
            time.sleep(0.01)
    return float(len(completion))


def length(text):
    return float(len(text))


def in_processes(prompts, completions, **columns):
    with multiprocessing.Pool(2) as pool:
        return pool.map(length, completions)


def is_truncated(prompt, completion, finish_reason):
    return finish_reason == "length"


def are_truncated(completions, finish_reason, **columns):
    return [reason == "length" for reason in finish_reason]


class Batched:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, prompts, completions, behavior, **columns):
        if "raises" in behavior:
            raise ValueError("bad row")
        if "crashes" in behavior:
            os.kill(os.getpid(), 9)
        if "hangs" in behavior:
            time.sleep(3600)
        for waits in (each for each in behavior if each.startswith("waits")):
            while not Path(__file__).with_name(waits.replace("waits", "flag")).exists():
                time.sleep(0.01)
        return [self.factor * len(prompts)] * len(prompts)
"""


class RewardBench:
    """A stream with groups of two responses and a reward manager."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, save_start(folder / "start")
        (folder / "tasks.py").write_text(FUNCTIONS)
        config = load.read_config(write_task(folder))
        self.supervisor = Supervisor(config, folder / "run", WorkerMessages(), lambda message: None)
        self.responses: dict[GroupId, list[FinishedSample]] = {}
        self.events: list[GroupScored | ScoringFailed] = []
        self.task_rewards: list[TaskRewards] = []
        self.notices: list[str] = []

    def task(
        self,
        name: str = "reward",
        function: str = "reward",
        options: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
        **settings: Any,
    ) -> RewardTask:
        path, key = f"{self.folder}/tasks.py:{function}", f"reward_task.{name}.class"
        spec = RewardSpec(name, path, key, self.model, options or {})
        return RewardTask(spec, timeout_s, f"{name}.timeout_s", **settings)

    def open(self, *tasks: RewardTask, host: str | None = None) -> None:
        """With a `host`, workers use the stream as from another machine, where the storage cannot see their
        end.
        """
        self.num_workers = sum(task.num_workers for task in tasks)
        leases = {task.name: task.lease_s() for task in tasks if not task.is_external}
        self.stream = RunStream(self.folder / "stream", 2, tasks=leases, host=host)
        self.manager = RewardManager(
            tasks,
            self.stream,
            self.supervisor,
            self.responses.__getitem__,
            self._on_score,
            self.notices.append,
        )

    def _on_score(self, event: GroupScored | ScoringFailed, task_rewards: TaskRewards) -> None:
        self.events.append(event)
        self.task_rewards.append(task_rewards)

    def submit(self, row: int, version: int = 0, **columns: Any) -> GroupId:
        """Submit a group whose responses have one and two characters."""
        group = GroupId(0, row)
        for sibling in range(2):
            ids = [CHARACTERS.index("7")] * (sibling + 1)
            reason = REASONS[sibling]
            request, logprobs = RequestId(*group, sibling), [-1.0] * len(ids)
            self.stream.put(Trajectory(request, version, "", [1], ids, logprobs, finish_reason=reason))
            finished = FinishedSample(sibling, np.array(ids, np.int32), None, False, {}, version, reason)
            self.responses.setdefault(group, []).append(finished)
        self.stream.flush()
        self.manager.submit(group, encode_prompt_row("7:", columns))
        return group

    def wait_for(self, num_events: int) -> Sequence[GroupScored | ScoringFailed]:
        """All events so far, once there are that many."""
        while len(self.events) < num_events:
            self.poll()
        return self.events

    def wait_until_idle(self) -> None:
        """Until all workers are ready and score no group; a worker reports after its result."""
        num_idle = 0
        while num_idle < self.num_workers:
            self.poll()
            num_idle = sum(state.is_ready and not state.activity for state in self.manager.worker_states())

    def wait_until_scored(self, num_groups: int) -> None:
        """Until the workers of the only task score so many groups."""
        (workers,) = self.manager._workers
        while sum(len(call.groups) for call in workers._calls.values()) < num_groups:
            self.poll()

    def poll(self) -> None:
        self.supervisor.poll(0.1)
        self.manager.check_deadlines()

    def pass_time(self, seconds: float) -> None:
        """Advance the time during which the driver was running."""
        self.supervisor.clock._ran_s += seconds

    def time_out(self, group: GroupId, is_silent: bool = False) -> None:
        """Let the call for a group take too long, in a worker that still sends heartbeats or does not."""
        (workers,) = self.manager._workers
        while not (slots := [slot for slot, call in workers._calls.items() if group in call.groups]):
            self.poll()
        (slot,) = slots
        while (self.supervisor.silence_s(slot.worker) > MAX_SILENCE_S) != is_silent:
            self.poll()
        workers._calls[slot].since_s -= 2 * workers._task.timeout_s
        self.manager.check_deadlines()

    def close(self) -> None:
        self.manager.close()
        self.stream.close()


@pytest.fixture
def bench(folder: Path) -> Iterator[RewardBench]:
    with closing(RewardBench(folder)) as bench:
        yield bench
