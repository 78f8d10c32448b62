"""Checks and timeouts for joining and leaving a Ray cluster. Nothing here imports Ray.

Ray's own calls wait for minutes, or end the process, if the head of a cluster does not reply.
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
from pathlib import Path
from typing import TypeVar

from dora.auth_token import new_auth_token, write_private_file
from dora.errors import RunError

CONNECT_TIMEOUT_S = 3.0  # of a TCP connection to the head
HEAD_RETRY_S = 30.0  # a head that was unreachable counts as lost for this long
HEAD_POLL_S = 1.0  # between two checks of the head during a call of Ray
NOTICE_AFTER_S = 5.0  # a longer wait for resources is reported

T = TypeVar("T")


def check_reachable(address: str, resolved: str | None = None) -> None:
    """Raises RunError if nothing accepts connections at `host:port`, within CONNECT_TIMEOUT_S.

    `resolved` is the `host:port` that an address such as "auto" resolves to.
    """
    host, _, port = (resolved or address).rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        where = "" if resolved in (None, address) else f", which is {resolved},"
        raise RunError(
            f"ray.address = {address!r}{where} is not reachable ({error}); start Ray there with "
            "`ray start --head`, or remove ray.address"
        ) from error


class RayHead:
    """The head of a cluster. Ray's calls hang without it, and Ray ends the process a minute later."""

    def __init__(self, address: str) -> None:
        """`address`: host:port."""
        self.address, self._lost_until_s = address, 0.0

    @property
    def is_reachable(self) -> bool:
        """Whether the head accepts connections; after a failure the result is False for HEAD_RETRY_S, without
        a check.
        """
        if time.monotonic() < self._lost_until_s:
            return False
        try:
            check_reachable(self.address)
        except RunError:
            self._lost_until_s = time.monotonic() + HEAD_RETRY_S
            return False
        return True

    def call(self, call: Callable[[], T]) -> T:
        """Make a call of Ray in a daemon thread. Raises RunError once the head is lost."""
        called = _in_daemon_thread(call)
        while not called.done():
            with contextlib.suppress(
                TimeoutError
            ):  # of this wait: the call's own exception is not raised here
                called.exception(HEAD_POLL_S)
            if not (called.done() or self.is_reachable):
                raise RunError(
                    f"the head of the Ray cluster at {self.address} is lost; check `ray status`, and resume "
                    "with dora train --resume on a healthy cluster"
                )
        return called.result()


def wait_with_notice(wait: Callable[[float], bool], timeout_s: float, notify: Callable[[], None]) -> bool:
    """Whether `wait(seconds)` succeeded within `timeout_s`; calls `notify` after NOTICE_AFTER_S."""
    if wait(min(NOTICE_AFTER_S, timeout_s)):
        return True
    if timeout_s <= NOTICE_AFTER_S:
        return False
    notify()
    return wait(timeout_s - NOTICE_AFTER_S)


def run_with_timeout(timeout_s: float, call: Callable[[], object]) -> None:
    """Make a call that may hang; after `timeout_s` the call is abandoned in a daemon thread."""
    with contextlib.suppress(TimeoutError):
        _in_daemon_thread(call).exception(timeout_s)


def join_with_timeout(join: Callable[[], object], address: str, timeout_s: float) -> None:
    """Join a cluster in a daemon thread, because `join` hangs for minutes if the cluster does.

    Raises RunError after `timeout_s`, and what `join` raises.
    """
    try:
        _in_daemon_thread(join).result(timeout_s)
    except TimeoutError as error:
        raise RunError(
            f"ray.address = {address!r} accepts connections, but the run could not join the cluster within "
            f"runtime.start_timeout_s = {timeout_s:g} s; check `ray status`, restart the cluster, or raise "
            "runtime.start_timeout_s"
        ) from error


def _in_daemon_thread(call: Callable[[], T]) -> Future[T]:
    """Make a call that may never return."""
    called: Future[T] = Future()

    def run() -> None:
        try:
            called.set_result(call())
        except BaseException as error:
            called.set_exception(error)

    threading.Thread(target=run, name="ray-call", daemon=True).start()
    return called


@contextlib.contextmanager
def preserve_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM, which Ray replaces; the driver has its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def token_source() -> str:
    """Where Ray reads its auth token: a file, or an environment variable."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "the environment variable RAY_AUTH_TOKEN"
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or str(_default_token_file())


def _default_token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"


def make_private_token() -> None:
    """Make Ray's default auth token with mode 0600; Ray itself would make it readable by all users.

    Raises RunError.
    """
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    file = _default_token_file()
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        if file.exists():
            if file.stat().st_mode & 0o077:
                file.chmod(0o600)
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private_file(new, new_auth_token())
        with contextlib.suppress(FileExistsError):  # another run starts at the same time
            file.hardlink_to(new)
        new.unlink()
    except OSError as error:
        raise RunError(
            f"{file}: cannot make Ray's auth token private: {error.strerror}; make the file yours, or name "
            "another one in RAY_AUTH_TOKEN_PATH"
        ) from error


def set_ray_environment() -> None:
    """Set the environment variables that Ray reads when it is imported: workers' logs are not printed, no
    cluster is joined implicitly.

    Otherwise a thread that calls Ray after the run has left its cluster would join any other one here.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
