"""Reward tasks at a stream: a worker that crashes, hangs or times out costs at most its own group."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.runtime.scoring.conftest import RewardBench

from dora.config import load
from dora.core.events import GroupScored, ScoringFailed
from dora.core.types import GroupId
from dora.errors import InputError, RunError, StreamError
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import WorkerOutbox
from dora.runtime.scoring.reward_manager import (
    UNLIMITED_ROWS,
    RewardTask,
    reward_tasks,
)
from dora.runtime.scoring.reward_worker import RewardWorker, encode_prompt_row
from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest
from dora.stream.sample_db import HeldOutResponse

MAX_RESTARTS = 3  # the default of runtime.max_restarts
NO_RESTARTS_LEFT = (
    r"killed by SIGKILL; it has no restarts left \(it was restarted runtime.max_restarts = 3 times in a "
    r"row\). The run cannot continue without its reward workers. Resume the run: dora train --resume"
)
local_and_remote = pytest.mark.parametrize("host", [None, "127.0.0.1"])


def test_rewards_of_all_tasks_are_summed_with_their_weights(bench: RewardBench) -> None:
    bench.open(bench.task(), bench.task("sum", "Batched", {"factor": 0.25}, weight=-2.0))
    group = bench.submit(1, behavior="normal")
    held_out, responses = GroupId(-4, 1), [HeldOutResponse([7] * k, "stop") for k in range(3)]
    bench.manager.submit(held_out, encode_prompt_row("7:", {"behavior": "normal"}), responses)
    assert {*bench.wait_for(2)} == {
        GroupScored(group, (1.0 - 1.0, 2.0 - 1.0)),
        GroupScored(held_out, (-1.5, 1.0 - 1.5, 2.0 - 1.5)),
    }


def test_a_reward_of_weight_0_is_reported_and_does_not_change_the_sum(bench: RewardBench) -> None:
    bench.open(bench.task(), bench.task("length", weight=0.0))
    group = bench.submit(1)
    assert bench.wait_for(1) == [GroupScored(group, (1.0, 2.0))]
    assert bench.task_rewards == [{"reward": (1.0, 2.0), "length": (1.0, 2.0)}]


def test_a_reward_gets_the_finish_reasons_of_training_and_of_held_out_responses(bench: RewardBench) -> None:
    bench.open(bench.task(function="is_truncated"), bench.task("all", "are_truncated"))
    group, held_out = bench.submit(1), GroupId(-4, 1)
    responses = [HeldOutResponse([7], reason) for reason in ("length", "turn_length", None)]
    bench.manager.submit(held_out, encode_prompt_row("7:", {}), responses)
    assert {*bench.wait_for(2)} == {
        GroupScored(group, (0.0, 2.0)),
        GroupScored(held_out, (2.0, 0.0, 0.0)),
    }


@local_and_remote
def test_a_group_is_retried_after_a_crash_of_its_worker(bench: RewardBench, host: str | None) -> None:
    bench.open(bench.task(), host=host)
    groups = [bench.submit(1, behavior="crashes once"), bench.submit(2)]
    assert bench.wait_for(2) == [GroupScored(group, (1.0, 2.0)) for group in groups]
    assert bench.notices == ["the reward worker is replaced: reward worker was killed by SIGKILL"]


def test_a_worker_that_connects_again_loses_the_leases_of_its_lost_connection(bench: RewardBench) -> None:
    """The storage does not detect the end of a remote connection."""
    bench.open(bench.task(), host="127.0.0.1")
    bench.wait_until_idle()
    (workers,) = bench.manager._workers
    ((slot, call),) = workers._calls.items()
    remote = bench.stream.storage.remote
    assert remote is not None
    with StreamClient(remote) as lost:
        new_id, call.client_id = call.client_id, lost.client_id
        workers.on_message(slot, slot.worker, m.WorkerReady(client_id=new_id))
        assert call.client_id == new_id
        with pytest.raises(StreamError, match="was evicted"):
            lost.status()


def test_an_idle_worker_that_keeps_crashing_is_replaced_up_to_the_limit(bench: RewardBench) -> None:
    """A scored group in between gives all restarts back."""

    def kill(num_times: int = 1) -> None:
        for _ in range(num_times):
            bench.wait_until_idle()
            (worker,) = multiprocessing.active_children()
            worker.kill()
            num_notices = len(bench.notices)
            while len(bench.notices) == num_notices:
                bench.poll()

    bench.open(bench.task())
    for row in range(2):
        group = bench.submit(row)
        assert bench.wait_for(row + 1)[row] == GroupScored(group, (1.0, 2.0))
        kill(MAX_RESTARTS)
    assert {*bench.notices} == {"the reward worker is replaced: reward worker was killed by SIGKILL"}
    with pytest.raises(RunError, match=NO_RESTARTS_LEFT):
        kill(2)  # the first does not count if the worker is scoring a group that it has not committed


def test_a_worker_that_keeps_crashing_after_its_result_is_not_replaced_forever(bench: RewardBench) -> None:
    """The same group again is no progress."""
    bench.open(bench.task())
    group = bench.submit(1, behavior="crashes before the commit")
    assert bench.wait_for(1) == [GroupScored(group, (1.0, 2.0))]
    with pytest.raises(RunError, match=NO_RESTARTS_LEFT):
        bench.wait_for(2)
    assert len(bench.events) == 1


def test_a_token_limit_alone_does_not_limit_rows(task: Path) -> None:
    """Without any limit, a task gets one group at a time."""
    requests = []
    for limits in ("", "micro_batch_tokens = 512", "micro_batch_tokens = 512\nmicro_batch_size = 8"):
        text = f'[[reward_task]]\nname = "sum"\nclass = "task.py:reward"\n{limits}\n'
        path = task.with_name("with a task.toml")
        path.write_text(task.read_text() + text)
        requests.append(reward_tasks(load.read_config(path))[1].batch_request)
    assert requests == [BatchRequest(), BatchRequest(UNLIMITED_ROWS, 512), BatchRequest(8, 512)]


def test_only_a_group_that_crashes_two_workers_fails(bench: RewardBench) -> None:
    bench.open(bench.task())
    groups = [bench.submit(1, behavior="crashes"), bench.submit(2)]
    reason = "reward ended its process: reward worker was killed by SIGKILL"
    assert bench.wait_for(2) == [ScoringFailed(groups[0], reason), GroupScored(groups[1], (1.0, 2.0))]
    assert bench.manager.first_failure.startswith(reason)


def test_only_a_group_whose_call_takes_too_long_fails(bench: RewardBench) -> None:
    bench.open(bench.task("slow", num_workers=2))
    hanging, *others = bench.submit(0, behavior="hangs"), *(bench.submit(row) for row in range(1, 4))
    scored = {GroupScored(group, (1.0, 2.0)) for group in others}
    assert {*bench.wait_for(3)} == scored
    bench.time_out(hanging)
    failed = ScoringFailed(hanging, "slow took longer than slow.timeout_s = 60")
    later = GroupScored(bench.submit(4), (1.0, 2.0))
    assert {*bench.wait_for(5)} == {*scored, failed, later}


@local_and_remote
def test_a_worker_stopped_between_calls_is_replaced(bench: RewardBench, host: str | None) -> None:
    """The stopped worker may hold the lease of a group; the group is scored nevertheless."""
    bench.open(bench.task(), host=host)
    groups = [bench.submit(1)]
    bench.wait_for(1)
    bench.wait_until_idle()
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    groups.append(bench.submit(2))
    while not bench.notices:
        bench.pass_time(5.0)
        bench.poll()
    assert bench.wait_for(2) == [GroupScored(group, (1.0, 2.0)) for group in groups]
    reason = "reward worker sent no heartbeat for more than runtime.heartbeat_timeout_s = 15 s"
    (notice,) = bench.notices
    assert notice.startswith(f"the reward worker is replaced: {reason}")


def test_a_group_whose_worker_is_stopped_during_the_call_is_retried_once(bench: RewardBench) -> None:
    bench.open(bench.task())
    once = bench.submit(1, behavior="stops once")
    bench.time_out(once, is_silent=True)
    assert bench.wait_for(1) == [GroupScored(once, (1.0, 2.0))]
    always = bench.submit(2, behavior="stops")
    for _ in range(2):
        bench.time_out(always, is_silent=True)
    reason = "reward worker sent no heartbeat, and reward.timeout_s = 60 s is over"
    assert bench.wait_for(2)[1] == ScoringFailed(always, f"reward blocked its process: {reason}")


def test_only_the_bad_group_of_a_micro_batch_fails(bench: RewardBench) -> None:
    bench.open(bench.task("sum", "Batched", {"factor": 1.0}, batch_request=BatchRequest(max_rows=100)))
    behaviors = ("normal", "raises", "normal")
    groups = [bench.submit(row, behavior=behavior) for row, behavior in enumerate(behaviors)]
    assert {*bench.wait_for(3)} == {
        GroupScored(groups[0], (2.0, 2.0)),
        GroupScored(groups[2], (2.0, 2.0)),
        ScoringFailed(groups[1], "sum: reward raised ValueError"),
    }
    assert "bad row" in bench.manager.first_failure


def test_the_first_failure_of_each_task_is_printed_once_with_its_traceback(bench: RewardBench) -> None:
    bench.open(bench.task(), bench.task("sum", "Batched", {"factor": 1.0}))
    first = bench.submit(0, behavior="raises")
    bench.wait_for(1)
    bench.submit(1, behavior="raises")
    bench.wait_for(2)
    (notice,) = bench.notices
    reason, traceback = notice.split("\n", 1)
    assert reason == f"first failure of sum, group {first}: sum: reward raised ValueError"
    assert traceback.startswith("Traceback")
    assert traceback.endswith("ValueError: bad row")


@pytest.mark.parametrize("behavior", ["crashes", "hangs"])
def test_only_the_group_of_a_micro_batch_that_ends_or_blocks_its_worker_fails(
    bench: RewardBench, behavior: str
) -> None:
    bench.open(bench.task("sum", "Batched", {"factor": 1.0}, batch_request=BatchRequest(max_rows=100)))
    groups = [bench.submit(row, behavior=each) for row, each in enumerate(("normal", behavior, "normal"))]
    if behavior == "hangs":
        for _ in range(2):  # in the micro-batch, and alone
            bench.time_out(groups[1])
    scored = {GroupScored(groups[row], (2.0, 2.0)) for row in (0, 2)}
    (failed,) = {*bench.wait_for(3)} - scored
    assert isinstance(failed, ScoringFailed)
    assert failed.group == groups[1]
    later = GroupScored(bench.submit(3, behavior="normal"), (2.0, 2.0))
    assert {*bench.wait_for(4)} == {*scored, failed, later}


def test_micro_batches_return_once_the_cause_of_several_losses_has_failed(bench: RewardBench) -> None:
    """A worker's reward is the number of responses in its call."""
    request = BatchRequest(max_rows=100)
    bench.open(bench.task("sum", "Batched", {"factor": 1.0}, batch_request=request, num_workers=2))
    for row, behavior in enumerate(("normal", "hangs", "normal")):
        bench.submit(row, behavior=behavior)
    while not any(isinstance(event, ScoringFailed) for event in bench.events):
        bench.time_out(GroupId(0, 1))
    bench.wait_for(3)
    bench.wait_until_idle()
    bench.submit(10, behavior="waits 10")
    bench.wait_until_scored(1)
    bench.submit(20, behavior="waits 20")
    for row in (10, 20):
        bench.wait_until_scored(2)  # by both workers, one of which ends its call
        pair = [bench.submit(row + number, behavior="normal") for number in (1, 2)]
        (bench.folder / f"flag {row}").touch()
        events = bench.wait_for(len(bench.events) + 3)
        assert {*events[-2:]} == {GroupScored(group, (4.0, 4.0)) for group in pair}
        bench.submit(row + 3, behavior=f"waits {row + 3}")


def test_a_reward_function_may_use_multiprocessing(bench: RewardBench) -> None:
    bench.open(bench.task("reward", "in_processes"))
    group = bench.submit(0)
    assert bench.wait_for(1) == [GroupScored(group, (1.0, 2.0))]


def test_a_failed_group_has_one_event_although_another_task_scores_it_later(bench: RewardBench) -> None:
    bench.open(bench.task("late"), bench.task("sum", "Batched", {"factor": 1.0}))
    failed = bench.submit(0, behavior="raises")
    assert bench.wait_for(1) == [ScoringFailed(failed, "sum: reward raised ValueError")]
    bench.stream.clear([failed])
    scored = bench.submit(1, behavior="normal")
    assert bench.wait_for(2)[1] == GroupScored(scored, (3.0, 4.0))


def test_the_oldest_version_is_scored_first(bench: RewardBench) -> None:
    bench.open(bench.task())
    bench.submit(9, behavior="waits")
    groups = {version: bench.submit(version, version) for version in (3, 1, 2)}
    (bench.folder / "flag").touch()
    order = [event.group for event in bench.wait_for(4)][-3:]
    assert order == [groups[1], groups[2], groups[3]]


def test_a_sum_of_rewards_that_is_not_finite_fails_its_group(bench: RewardBench) -> None:
    bench.open(bench.task(weight=1e308), bench.task("sum", "Batched", {"factor": 1.0}, weight=1e308))
    group = bench.submit(0, behavior="normal")
    assert bench.wait_for(1) == [ScoringFailed(group, "the weighted sum of rewards is inf")]


def test_a_reward_class_that_cannot_be_instantiated_is_an_input_error(bench: RewardBench) -> None:
    bench.open(bench.task("sum", "Batched", {"fcator": 1.0}))
    with pytest.raises(InputError, match=r"reward_task.sum.class = .*unexpected keyword argument 'fcator'"):
        bench.wait_for(1)


def test_a_closed_stream_fails_the_run(bench: RewardBench) -> None:
    bench.open(bench.task())
    bench.submit(1, behavior="normal")
    bench.wait_for(1)
    bench.stream.close()
    with pytest.raises(RunError, match="the sample stream is closed: its thread has ended"):
        bench.wait_for(2)


def test_leases_expire_only_where_the_end_of_a_worker_may_be_missed() -> None:
    spec = m.RewardSpec("reward", "exact_match", "reward.function", Path())
    task = RewardTask(spec, 60.0, "reward.timeout_s")
    assert (task.lease_s(), task.lease_s(is_multi_node=True)) == (math.inf, 60.0)


def test_the_first_rewards_of_a_task_count(bench: RewardBench) -> None:
    """A worker may be lost after it has sent rewards; then another one scores the group again."""
    bench.open(bench.task("late"), bench.task("sum", "Batched", {"factor": 1.0}))
    group = bench.submit(0, behavior="waits")
    for rewards in ((8.0, 8.0), (9.0, 9.0)):
        bench.manager._on_completed("late", group, rewards)
    (bench.folder / "flag").touch()
    assert bench.wait_for(1) == [GroupScored(group, (10.0, 10.0))]


def test_fast_calls_share_a_report(bench: RewardBench) -> None:
    """A report restarts the timeout of a call; one for each response would cost more than the response."""
    bench.open(bench.task())
    sent: list[object] = []
    spec = m.RewardWorkerSpec(bench.task().reward, bench.folder, BatchRequest())
    worker = RewardWorker(spec, cast(WorkerOutbox, SimpleNamespace(send=sent.append)))
    worker.report((GroupId(0, 1),))
    for _ in range(8):
        worker.restart_timeout()
    assert sent == [m.TaskStarted((GroupId(0, 1),))]
