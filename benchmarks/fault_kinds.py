"""The faults of a campaign: how each is done to a real process of a run, and when the run is over it.

A kind is a function of a run's insides and of a number by which engines and judges have their turns; the
driver calls it between two facts. `KINDS` has those of every run, `fault_nodes` one of clusters.
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

from dora.runtime.process.worker_process import Worker
from dora.service.context import RunContext

SLOW_S, SLOW_BEAT_S, SLOWNESS = 3.0, 0.2, 10.0  # an engine decodes in a tenth of the time, for so long
FLAG = "hang"  # beside the reward function: who takes it away never returns
REWARD = """
import time
from pathlib import Path
from dora.rewards.gcd import reward as right
FLAG = Path(__file__).with_name("hang")
def reward(prompt, completion, **row):
    if FLAG.exists():
        FLAG.unlink(missing_ok=True)
        time.sleep(1e6)
    return right(prompt, completion, **row)
"""


REACH = {"raylet": ("engine", "rewarder")}  # station -> others that are hit with it; most are hit alone


@dataclass
class Wound:
    """A fault that was done to a `station`: when it was noticed, and when all was as before."""

    station: str
    is_noticed: Callable[[RunContext], bool] | None  # None: nothing is to be noticed
    is_over: Callable[[RunContext], bool]


Strike = Callable[[RunContext, int], Wound]


def killed(worker: Worker) -> None:
    _signal(worker, signal.SIGKILL)


def stopped(worker: Worker) -> None:
    _signal(worker, signal.SIGSTOP)


def cut(worker: Worker) -> None:
    """Both ends of its line see an end, as of a connection that is reset; its process lives."""
    carrier: Any = worker._carrier
    line = carrier._connection if hasattr(carrier, "_connection") else carrier._line.result()
    if hasattr(line, "fileno"):
        with socket.socket(fileno=os.dup(line.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
    else:
        line.close()


def without_room(worker: Worker) -> None:
    """No file of it can grow: neither a version in the weight store nor a checkpoint."""
    assert worker.pid
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (0, 0))


def slowed(worker: Worker) -> None:
    """It stands still for nine tenths of the time."""

    def hold_up() -> None:
        until_s = time.monotonic() + SLOW_S
        while time.monotonic() < until_s and worker.is_alive:
            _signal(worker, signal.SIGSTOP)
            time.sleep(SLOW_BEAT_S * (1 - 1 / SLOWNESS))
            _signal(worker, signal.SIGCONT)
            time.sleep(SLOW_BEAT_S / SLOWNESS)

    threading.Thread(target=hold_up, daemon=True).start()


def of_engine(harm: Callable[[Worker], None], inside: RunContext, turn: int) -> Wound:
    """Over once as many engines have joined as before."""
    fleet = inside.hands.engine_pool
    engine = sorted(fleet.joined)[turn % len(fleet.joined)]
    num_before = len(fleet.joined)
    harm(fleet.workers[engine])
    if harm is slowed:
        until_s = time.monotonic() + SLOW_S
        return Wound("engine", None, lambda inside: time.monotonic() > until_s)
    return Wound(
        "engine",
        lambda inside: engine not in inside.hands.engine_pool.workers,
        lambda inside: len(inside.hands.engine_pool.joined) >= num_before,
    )


def of_trainer(harm: Callable[[Worker], None], inside: RunContext, turn: int) -> Wound:
    """Over once another one has redone what the first one had trained."""
    worker = inside.hands.trainer
    harm(worker)

    def is_over(inside: RunContext) -> bool:
        state, trainers = inside.state(), inside.hands.training
        is_there = trainers.now is not worker and not trainers.late
        return is_there and not (state.is_trainer_lost or state.redo_batches)

    return Wound("trainer", lambda inside: worker not in inside.hands.training.ranks, is_over)


def of_rewarder(harm: Callable[[Worker], None], inside: RunContext, turn: int) -> Wound:
    """Over once another one is ready."""
    workers = judges(inside)
    worker = workers[turn % len(workers)]
    harm(worker)
    return Wound("rewarder", partial(_is_replaced, worker), are_judges_ready)


def reward_hangs(inside: RunContext, turn: int) -> Wound:
    """The next call of the reward function never returns."""
    before = judges(inside)
    function = inside.plan.config.reward.function
    assert function is not None
    Path(function.rpartition(":")[0]).with_name(FLAG).touch()
    return Wound(
        "rewarder",
        lambda inside: any(_is_replaced(worker, inside) for worker in before),
        are_judges_ready,
    )


KINDS: dict[str, Strike] = {
    "engine killed": partial(of_engine, killed),
    "trainer killed": partial(of_trainer, killed),
    "rewarder killed": partial(of_rewarder, killed),
    "engine stopped": partial(of_engine, stopped),
    "reward function hangs": reward_hangs,
    "engine ten times slower": partial(of_engine, slowed),
    "trainer stopped": partial(of_trainer, stopped),
    "engine's connection cut": partial(of_engine, cut),
    "rewarder stopped": partial(of_rewarder, stopped),
    "trainer's disk full": partial(of_trainer, without_room),
    "rewarder's connection cut": partial(of_rewarder, cut),
    "trainer's connection cut": partial(of_trainer, cut),
}


def station_of(kind: str) -> str:
    """Its first word, but for reward functions, which are a rewarder's."""
    return "rewarder" if kind.startswith("reward") else kind.partition(" ")[0].removesuffix("'s")


def reach_of(station: str) -> set[str]:
    """All that have to be well before it may be hit, and are not to be hit until it is well again."""
    return {station, *REACH.get(station, ())}


def judges(inside: RunContext) -> list[Worker]:
    """The processes that judge."""
    return [pulse.worker for pulse in inside.hands.rewards.pulses()]


def are_judges_ready(inside: RunContext) -> bool:
    """Whether each has started."""
    return not inside.hands.rewards.late


def _is_replaced(worker: Worker, inside: RunContext) -> bool:
    return all(judge is not worker for judge in judges(inside))


def _signal(worker: Worker, number: signal.Signals) -> None:
    if worker.pid is not None and worker.is_alive:
        os.kill(worker.pid, number)
