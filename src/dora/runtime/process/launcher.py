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
from typing import Any, Protocol

from dora.config.schema import Config
from dora.errors import ConfigError, RunError
from dora.runtime.process.worker_process import ForkedProcess, ProcessHandle, Target, preload_workers


class Launcher(Protocol):
    """Starts processes, wherever it may.

    `host` is where processes of other machines reach this one; None: there are none. Machines that are
    `leaving` are those of `Worker.node`, and `num_free` engines more could start now.
    """

    @property
    def host(self) -> str | None: ...

    @property
    def draining_nodes(self) -> frozenset[str]: ...

    @property
    def num_free_slots(self) -> int: ...

    def start(self, name: str, target: Target, spec: Any) -> ProcessHandle:
        """As `Told.start`. Raises RunError where there is no place for it."""

    def close(self) -> None:
        """End what was started for all of them; their processes have ended."""


class LocalLauncher:
    """This machine, whose workers are forked."""

    host = None
    draining_nodes: frozenset[str] = frozenset()
    num_free_slots = 0

    def __init__(self) -> None:
        preload_workers()

    def start(self, name: str, target: Target, spec: Any) -> ProcessHandle:
        return ForkedProcess(name, target, spec)

    def close(self) -> None:
        """There is nothing else."""


def check_ray_config(config: Config) -> None:
    """Raises ConfigError where the processes cannot be started."""
    if config.runtime.kind != "ray":
        return
    if find_spec("ray") is None:
        raise ConfigError(
            'runtime.kind = "ray": Ray is not installed here; pip install "dora-rl[ray]", or set '
            "runtime.kind = local"
        )
    if config.ray.max_engines is not None and config.ray.max_engines < config.num_engines:
        raise ConfigError(
            f"ray.max_engines = {config.ray.max_engines} is less than the {config.num_engines} engines that "
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


def make_launcher(config: Config, pool_bytes: int, notice: Callable[[str], None]) -> Launcher:
    """That of a run; `notice` gets sentences for the person watching. Raises RunError without a cluster."""
    if config.runtime.kind == "ray":
        address = config.ray.address
        if address is None:
            os.environ["RAY_AUTH_MODE"] = "token"  # of what it starts; Ray reads it when it is imported
        elif address != "auto":
            check_reachable(address)
        set_ray_environment()
        from dora.runtime.process.ray import RayLauncher

        return RayLauncher(config, pool_bytes, notice)
    return LocalLauncher()


# === dora.runtime.process.launcher: Join a Ray cluster: checks and waits that need no import of Ray.

CONNECT_TIMEOUT_S = 3.0  # that a cluster may take to answer
HEAD_RETRY_S = 30.0  # that a head which has not answered is taken to be gone
NOTICE_AFTER_S = 5.0  # after which a wait for room is told of


def check_reachable(address: str, found: str | None = None) -> None:
    """Raises RunError if nobody is at `host:port`, or where "auto" `found` one: Ray would try for minutes."""
    host, _, port = (found or address).rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        where = "there" if found in (None, address) else f"at {found}, where it leads,"
        raise RunError(
            f"ray.address = {address!r}: nobody answers {where} ({error}); start Ray there with "
            "`ray start --head`, or remove ray.address"
        ) from error


class RayHead:
    """Of a cluster. Once it is gone, Ray's calls hang, and Ray ends the process a minute later."""

    def __init__(self, address: str) -> None:
        self.address, self._lost_until_s = address, 0.0

    @property
    def is_reachable(self) -> bool:
        """Whether it answers; one that has not is left alone for a while."""
        if time.monotonic() < self._lost_until_s:
            return False
        try:
            check_reachable(self.address)
        except RunError:
            self._lost_until_s = time.monotonic() + HEAD_RETRY_S
            return False
        return True


def wait_with_notice(wait: Callable[[float], bool], limit_s: float, tell: Callable[[], None]) -> bool:
    """Whether `wait` came to its end within `limit_s`; it is told of once it takes a while."""
    if wait(min(NOTICE_AFTER_S, limit_s)):
        return True
    if limit_s <= NOTICE_AFTER_S:
        return False
    tell()
    return wait(limit_s - NOTICE_AFTER_S)


def run_with_timeout(limit_s: float, call: Callable[[], object]) -> None:
    """Wait no longer for what may hang."""
    trying = threading.Thread(target=call, daemon=True)
    trying.start()
    trying.join(limit_s)


def join_with_timeout(join: Callable[[], object], address: str, limit_s: float) -> None:
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
def preserve_signals() -> Iterator[None]:
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


def set_ray_environment() -> None:
    """What Ray reads when it is imported: its log is not printed, and it joins no cluster by itself.

    Else a thread that asks Ray something when the run has left its cluster would join any other one here.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
