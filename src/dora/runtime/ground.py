"""Where the processes of a run live: on this machine, or on the nodes of a Ray cluster.

The driver, with the orchestrator and the journal, is on this machine in either case.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from dora.config import Config
from dora.errors import ConfigError, RunError
from dora.fleets import num_engines
from dora.runtime.process import Body, Carrier, Forked, warm_up

if TYPE_CHECKING:
    from dora.runtime.plan import Plan

REACH_S = 3.0  # that a cluster may take to answer
LOST_S = 30.0  # that a head which has not answered is taken to be gone
LATE_S = 5.0  # after which a wait for room is told of


class Ground(Protocol):
    """Starts processes, wherever it may.

    `host` is where processes of other machines reach this one; None: there are none. Machines that are
    `leaving` are those of `Worker.node`, and `num_free` engines more could start now.
    """

    @property
    def host(self) -> str | None: ...

    @property
    def leaving(self) -> frozenset[str]: ...

    @property
    def num_free(self) -> int: ...

    def start(self, name: str, body: Body, spec: Any) -> Carrier:
        """As `Told.start`. Raises RunError where there is no place for it."""

    def close(self) -> None:
        """End what was started for all of them; their processes have ended."""


class Here:
    """This machine, whose workers are forked."""

    host = None
    leaving: frozenset[str] = frozenset()
    num_free = 0

    def __init__(self) -> None:
        warm_up()

    def start(self, name: str, body: Body, spec: Any) -> Carrier:
        return Forked(name, body, spec)

    def close(self) -> None:
        """There is nothing else."""


def check(config: Config) -> None:
    """Raises ConfigError where the processes cannot be started."""
    if config.runtime.kind != "ray":
        return
    if find_spec("ray") is None:
        raise ConfigError(
            'runtime.kind = "ray": Ray is not installed here; pip install "dora-rl[ray]", or set '
            "runtime.kind = local"
        )
    if config.ray.max_engines is not None and config.ray.max_engines < num_engines(config):
        raise ConfigError(
            f"ray.max_engines = {config.ray.max_engines} is less than the {num_engines(config)} engines that "
            "the run begins with: raise it, or lower engine.num_engines"
        )
    if config.trainer.elastic or config.orchestrator.placement == "colocated":
        raise ConfigError(
            'runtime.kind = "ray" gives each engine a place of its own, not one that it shares with the '
            "trainer: remove trainer.elastic and orchestrator.placement = colocated"
        )
    if config.ray.address is None and (mode := os.environ.get("RAY_AUTH_MODE", "token")).lower() != "token":
        raise ConfigError(
            f"RAY_AUTH_MODE = {mode!r}: the run would start Ray for everybody on this machine; unset it, or "
            "start Ray yourself and set ray.address"
        )


def reach(address: str, found: str | None = None) -> None:
    """Raises RunError if nobody is at `host:port`, or where "auto" `found` one: Ray would try for minutes."""
    host, _, port = (found or address).rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        where = "there" if found in (None, address) else f"at {found}, where it leads,"
        raise RunError(
            f"ray.address = {address!r}: nobody answers {where} ({error}); start Ray there with "
            "`ray start --head`, or remove ray.address"
        ) from error


class Head:
    """Of a cluster. Once it is gone, Ray's calls hang, and Ray ends the process a minute later."""

    def __init__(self, address: str) -> None:
        self.address, self._lost_until_s = address, 0.0

    @property
    def is_there(self) -> bool:
        """Whether it answers; one that has not is left alone for a while."""
        if time.monotonic() < self._lost_until_s:
            return False
        try:
            reach(self.address)
        except RunError:
            self._lost_until_s = time.monotonic() + LOST_S
            return False
        return True


def told_late(wait: Callable[[float], bool], limit_s: float, tell: Callable[[], None]) -> bool:
    """Whether `wait` came to its end within `limit_s`; it is told of once it takes a while."""
    if wait(min(LATE_S, limit_s)):
        return True
    if limit_s <= LATE_S:
        return False
    tell()
    return wait(limit_s - LATE_S)


def try_for(limit_s: float, call: Callable[[], object]) -> None:
    """Wait no longer for what may hang."""
    trying = threading.Thread(target=call, daemon=True)
    trying.start()
    trying.join(limit_s)


def join_in_time(join: Callable[[], object], address: str, limit_s: float) -> None:
    """Join a cluster in a thread of its own, for one that hangs lets nobody in for minutes.

    Raises RunError if it takes longer, and what `join` raises.
    """
    joined: Future[None] = Future()

    def attempt() -> None:
        try:
            join()
        except BaseException as error:
            joined.set_exception(error)
        else:
            joined.set_result(None)

    threading.Thread(target=attempt, name="joins a cluster", daemon=True).start()
    try:
        joined.result(limit_s)
    except TimeoutError as error:
        raise RunError(
            f"ray.address = {address!r}: somebody answers there, but has not let the run in within "
            f"runtime.start_timeout_s = {limit_s:g} s; ask `ray status`, start the cluster anew, or raise it"
        ) from error


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """What others make of signals is undone: they are the run's business."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def quiet_ray() -> None:
    """What Ray reads when it is imported: its log is not printed, and it joins no cluster by itself.

    Else a thread that asks Ray something when the run has left its cluster would join any other one here.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def make_ground(plan: Plan, notice: Callable[[str], None]) -> Ground:
    """That of a run; `notice` gets sentences for the person watching. Raises RunError without a cluster."""
    if plan.config.runtime.kind == "ray":
        address = plan.config.ray.address
        if address is None:
            os.environ["RAY_AUTH_MODE"] = "token"  # of what it starts; Ray reads it when it is imported
        elif address != "auto":
            reach(address)
        quiet_ray()
        from dora.runtime.ray import Cluster

        return Cluster(plan, notice)
    return Here()
