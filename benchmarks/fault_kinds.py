"""The faults of a campaign: how each is injected into a process of a run, and when the run has recovered.

A kind is a function of the run and of the number of the fault, by which it selects one of several workers.
The driver calls it between two events. `KINDS` has the faults of every run, `fault_nodes` those of clusters.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dora.runtime.executor import LiveRun
from dora.runtime.process.worker_process import Worker

SLOW_S, SLOW_PERIOD_S, SLOWDOWN = 3.0, 0.2, 10.0  # an engine gets a tenth of the time, for so long
FLAG = "hang"  # file beside the reward function: the call that removes it never returns
REWARD = """
import time
from pathlib import Path
from dora.rewards.gcd import reward as gcd_reward
FLAG = Path(__file__).with_name("hang")
def reward(prompt, completion, **row):
    if FLAG.exists():
        FLAG.unlink(missing_ok=True)
        time.sleep(1e6)
    return gcd_reward(prompt, completion, **row)
"""


ALSO_AFFECTED = {"raylet": ("engine", "reward worker")}  # component -> others that fail with it


@dataclass
class Fault:
    """A fault that was injected into a `component`: when the driver knows, and when the run has recovered."""

    component: str
    is_detected: Callable[[LiveRun], bool] | None  # None: there is nothing to detect
    has_recovered: Callable[[LiveRun], bool]


Inject = Callable[[LiveRun, int], Fault]


def kill(worker: Worker) -> None:
    send_signal(worker, signal.SIGKILL)


def stop(worker: Worker) -> None:
    send_signal(worker, signal.SIGSTOP)


def disconnect(worker: Worker) -> None:
    """Close its channel at both ends, as if the connection was reset; the process continues."""
    process: Any = worker.process
    channel = process._connection if hasattr(process, "_connection") else process._channel
    if hasattr(channel, "fileno"):
        with socket.socket(fileno=os.dup(channel.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
    else:
        channel.close()


def fill_disk(worker: Worker) -> None:
    """Let no file of the process grow: it can write neither a version nor a checkpoint."""
    assert worker.process.pid
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (0, 0))


def send_signal(worker: Worker, number: signal.Signals) -> None:
    if worker.process.pid is not None and worker.process.is_alive:
        os.kill(worker.process.pid, number)


def slow_down(worker: Worker, send: Callable[[Worker, signal.Signals], None] = send_signal) -> None:
    """Stop its process, or those that `send` signals, for nine tenths of the time."""

    def stop_and_continue() -> None:
        until_s = time.monotonic() + SLOW_S
        while time.monotonic() < until_s and worker.process.is_alive:
            send(worker, signal.SIGSTOP)
            time.sleep(SLOW_PERIOD_S * (1 - 1 / SLOWDOWN))
            send(worker, signal.SIGCONT)
            time.sleep(SLOW_PERIOD_S / SLOWDOWN)

    threading.Thread(target=stop_and_continue, daemon=True).start()


def in_engine(
    harm: Callable[[Worker], None], run: LiveRun, number: int, lasts_s: float | None = None
) -> Fault:
    """Has recovered once as many engines have joined as before, or after `lasts_s` if no engine is lost."""
    pool = run.executor.engine_pool
    engine = sorted(pool.joined)[number % len(pool.joined)]
    num_before = len(pool.joined)
    harm(pool.workers[engine])
    if lasts_s is not None:
        until_s = time.monotonic() + lasts_s
        return Fault("engine", None, lambda run: time.monotonic() > until_s)
    return Fault(
        "engine",
        lambda run: engine not in run.executor.engine_pool.workers,
        lambda run: len(run.executor.engine_pool.joined) >= num_before,
    )


def in_trainer(harm: Callable[[Worker], None], run: LiveRun, number: int) -> Fault:
    """Has recovered once another trainer has redone the steps of this one."""
    worker = run.executor.trainer
    harm(worker)

    def has_recovered(run: LiveRun) -> bool:
        state, training = run.state(), run.executor.training
        is_replaced = training.rank0 is not worker and training.is_ready
        return is_replaced and not (state.is_trainer_lost or state.redo_batches)

    return Fault("trainer", lambda run: worker not in run.executor.training.ranks, has_recovered)


def in_reward_worker(harm: Callable[[Worker], None], run: LiveRun, number: int) -> Fault:
    """Has recovered once another reward worker is ready."""
    workers = reward_workers(run)
    worker = workers[number % len(workers)]
    harm(worker)
    return Fault("reward worker", partial(_is_replaced, worker), are_reward_workers_ready)


def hang_reward_function(run: LiveRun, number: int) -> Fault:
    """The next call of the reward function never returns."""
    before = reward_workers(run)
    function = run.setup.config.reward.function
    assert function is not None
    Path(function.rpartition(":")[0]).with_name(FLAG).touch()
    return Fault(
        "reward worker",
        lambda run: any(_is_replaced(worker, run) for worker in before),
        are_reward_workers_ready,
    )


KINDS: dict[str, Inject] = {
    "engine killed": partial(in_engine, kill),
    "trainer killed": partial(in_trainer, kill),
    "reward worker killed": partial(in_reward_worker, kill),
    "engine stopped": partial(in_engine, stop),
    "reward function hangs": hang_reward_function,
    "engine ten times slower": partial(in_engine, slow_down, lasts_s=SLOW_S),
    "trainer stopped": partial(in_trainer, stop),
    "engine's connection cut": partial(in_engine, disconnect),
    "reward worker stopped": partial(in_reward_worker, stop),
    "trainer's disk full": partial(in_trainer, fill_disk),
    "reward worker's connection cut": partial(in_reward_worker, disconnect),
    "trainer's connection cut": partial(in_trainer, disconnect),
}


def component_of(kind: str) -> str:
    """The component that a kind affects: the first word of its name; reward functions run in workers."""
    return "reward worker" if kind.startswith("reward") else kind.partition(" ")[0].removesuffix("'s")


def affected_by(component: str) -> set[str]:
    """The components that must be well before a fault, and get no other fault until they have recovered."""
    return {component, *ALSO_AFFECTED.get(component, ())}


def reward_workers(run: LiveRun) -> list[Worker]:
    return [state.worker for state in run.executor.rewards.worker_states()]


def are_reward_workers_ready(run: LiveRun) -> bool:
    states = run.executor.rewards.worker_states()
    return sum(state.is_ready for state in states) == run.setup.config.num_reward_workers


def _is_replaced(worker: Worker, run: LiveRun) -> bool:
    return all(other is not worker for other in reward_workers(run))
