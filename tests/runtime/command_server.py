"""Runs commands of `dora` in forks of one process that has imported it: torch alone takes seconds to import.

The processes of the commands are those that a user's shell would start, with their own session, environment,
working directory and output. Only the imports, of a driver and of its workers, are shared.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import util
from pathlib import Path
from typing import Any

_MAX_REQUEST_BYTES = 2**20
_MAX_FD = 2**16
_spawnv_passfds = util.spawnv_passfds
_SERVE = "from tests.runtime.command_server import serve; serve({fd})"
_IMPORTS = {  # imported before the first command with such an argument: each takes seconds
    b"num_ranks": "dora.trainer.distributed",
    b"transformers": "transformers.models.auto.modeling_auto",
}


class ForkedCommand:
    """A running command: the parts of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], stdout: int | None = None) -> None:
        """`stdout` is a file descriptor; by default `communicate` returns what the command writes."""
        self.returncode: int | None = None
        self._out, out = _reading_pipe()
        self._err, err = _reading_pipe()
        self._status, status = socket.socketpair()
        weakref.finalize(self, self._status.close)  # a failed test does not wait for its command
        request = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": os.getcwd()}).encode()
        fds = [out if stdout is None else stdout, err, status.detach()]
        socket.send_fds(_start_server().requests, [request + b"\n"], fds)
        for fd in (out, *fds[1:]):
            os.close(fd)
        self.pid = int.from_bytes(self._receive(4), "little")

    def poll(self) -> int | None:
        """The exit code, or None while the command runs."""
        return self._wait(0.0)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; returns stdout and stderr. Raises TimeoutExpired."""
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(f"dora, pid {self.pid}", timeout)
        return self._out.result(timeout).decode(), self._err.result(timeout).decode()

    def _wait(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            self.returncode = int.from_bytes(self._receive(4), "little", signed=True)
            self._status.close()
        return self.returncode

    def _receive(self, num_bytes: int) -> bytes:
        received = self._status.recv(num_bytes, socket.MSG_WAITALL)
        assert len(received) == num_bytes, "the command server has ended; its stderr has the reason"
        return received


def _reading_pipe() -> tuple[Future[bytes], int]:
    """The bytes that will have come through a pipe at its end, and where to write them."""
    reader, writer = os.pipe()
    content = Future[bytes]()

    def read() -> None:
        with open(reader, "rb") as file:
            content.set_result(file.read())

    threading.Thread(target=read, daemon=True).start()
    return content, writer


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[bytes]
    requests: socket.socket


@functools.cache
def _start_server() -> _Server:
    """Start a server, which ends with this process."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST_BYTES)  # a request is sent in one call
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE.format(fd=theirs.fileno())],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return _Server(process, ours)


def serve(fd: int) -> None:
    """Fork a process for each command; exits when the other end is closed."""
    import dora.audit
    import dora.cli.main
    import dora.engine.engine
    import dora.engine.kernels.numba_kernels
    import dora.runtime.run

    gc.freeze()  # the collector does not touch these objects, so forks keep sharing their pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    with socket.socket(fileno=fd) as requests:
        while True:
            request, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 3)
            if not request:
                os._exit(0)
            while not request.endswith(b"\n"):
                request += requests.recv(_MAX_REQUEST_BYTES)
            for word, module in _IMPORTS.items():
                if word in request:
                    importlib.import_module(module)
            if os.fork() == 0:
                break
            for received in fds:
                os.close(received)
    # The keeper forks the command, and waits for it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out, err, status = fds
    command = os.fork()
    if command:
        os.close(out)
        os.close(err)
        os.write(status, command.to_bytes(4, "little"))
        code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
        os.write(status, code.to_bytes(4, "little", signed=True))
        os._exit(0)
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    for received in fds:
        os.close(received)
    wanted = json.loads(request)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    time.tzset()
    util.spawnv_passfds = _spawn  # type: ignore[assignment]
    sys.argv = ["dora", *wanted["arguments"]]
    result: object = 1
    try:
        dora.cli.main.main()
    except SystemExit as ended:
        result = ended.code
    except BaseException:
        traceback.print_exc()
    # As the interpreter ends, but without tearing down its modules, which takes half a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result if isinstance(result, int) else int(result is not None))


def _spawn(path: bytes, arguments: Sequence[Any], fds: Sequence[int]) -> int:
    """As `util.spawnv_passfds` of multiprocessing, but a fork server is forked, with its imports."""
    program = os.fsdecode(arguments[-1])
    if "multiprocessing.forkserver" not in program:
        return _spawnv_passfds(path, arguments, fds)
    if pid := os.fork():
        return pid
    kept = sorted(fds)
    for start, stop in pairwise((2, *kept, _MAX_FD)):
        os.closerange(start + 1, stop)
    try:
        exec(program, {})
    except SystemExit:
        atexit._run_exitfuncs()
        os._exit(0)
    os._exit(1)
