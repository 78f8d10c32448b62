"""Run a Python program in a sandbox and return what it prints.

Each run is a new process, forked by a fork server (`sandbox/fork_server.py`) that is started once. The
sandbox has the program and its input; it shares no file, memory or pipe with the process that checks the
output.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from dora.errors import RewardError
from dora.rewards.sandbox.fork_server import (
    EXITED,
    LENGTH,
    MAX_REPLY_BYTES,
    REFUSED,
    REQUEST,
    RESTRICTED,
    UNRESTRICTED,
)

REPLY_TIMEOUT_S = 30.0  # beyond the time limit of a run; then the fork server is considered lost
OUTPUT_BYTES = 4 << 20  # that are read of a program's output
_CHUNK_BYTES = 1 << 16
_PACKAGE = str(Path(__file__).parents[3])  # the folder that contains `dora`
_START = "import sys; sys.path.append(sys.argv[1]); from dora.rewards.sandbox.fork_server import main; main()"
_FLAGS = ("-S", "-s", "-P", "-X", "utf8")  # the standard library alone
_REMEDY = (
    "score on a machine whose Linux has Landlock (5.13 or newer; /sys/kernel/security/lsm lists it), in a "
    "container that permits the seccomp and Landlock system calls; or set confined = false in the options, "
    "which gives programs all rights of this user"
)


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run: wall-clock time, address space and output."""

    seconds: float
    memory_bytes: int = 512 << 20
    output_bytes: int = OUTPUT_BYTES


@dataclass(frozen=True)
class SandboxResult:
    """What a program printed, and whether it exited with code 0 within its limits."""

    output: bytes
    is_success: bool


class Sandbox:
    """Runs one program at a time. Not thread-safe."""

    def __init__(self, is_restricted: bool = True) -> None:
        """Runs an empty program. Raises RewardError where restrictions are required and not available."""
        if sys.platform != "linux":
            raise RewardError(f"the sandbox needs Linux, this is {sys.platform}: score programs on Linux")
        self._mode = RESTRICTED if is_restricted else UNRESTRICTED
        self._server: _ForkServerProcess | None = None
        self.run("", b"", SandboxLimits(REPLY_TIMEOUT_S))

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> SandboxResult:
        """Run a Python program. Raises RewardError if no sandbox can be started for it.

        Output beyond the limit is not read: the program blocks until its time is over.
        """
        if self._server is None:
            self._server = _ForkServerProcess(self._mode)
        text = program.encode(errors="replace")
        try:
            reply, output = self._server.run(LENGTH.pack(len(text)) + text + stdin, limits)
        except (OSError, EOFError) as error:
            server, self._server = self._server, None  # the next run starts another one
            raise RewardError(
                f"the fork server of the sandbox is lost: {error}; its last line of stderr: {server.kill()}"
            ) from error
        if reply.startswith(REFUSED):
            reason = reply.removeprefix(REFUSED).decode(errors="replace")
            raise RewardError(f"programs cannot be confined on this machine ({reason}): {_REMEDY}")
        is_success = reply == EXITED and len(output) <= limits.output_bytes
        return SandboxResult(output[: limits.output_bytes], is_success)


class _ForkServerProcess:
    """The parent's handle of a fork server."""

    def __init__(self, mode: str) -> None:
        self._socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {"PYTHONHASHSEED": "0"}  # equal programs print equal sets
        if (libraries := os.environ.get("LD_LIBRARY_PATH")) is not None:  # some interpreters need it to start
            environment["LD_LIBRARY_PATH"] = libraries
        with server_socket:
            self._process = subprocess.Popen(
                [sys.executable, *_FLAGS, "-c", _START, _PACKAGE, mode],
                stdin=server_socket.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        self._close = weakref.finalize(self, _close, self._socket, self._process)

    def run(self, stdin: bytes, limits: SandboxLimits) -> tuple[bytes, bytes]:
        """The server's reply and the sandbox's output. Raises OSError or EOFError if the server is lost."""
        sandbox_input, to_sandbox = os.pipe()
        from_sandbox, sandbox_output = os.pipe()
        with FileIO(to_sandbox, "w") as writer, FileIO(from_sandbox) as reader:
            try:
                message = REQUEST.pack(limits.seconds, limits.memory_bytes)
                socket.send_fds(self._socket, [message], [sandbox_input, sandbox_output])
            finally:
                os.close(sandbox_input)
                os.close(sandbox_output)
            return _exchange(self._socket, writer, reader, stdin, limits)

    def kill(self) -> str:
        """Kill the server; the last line of its stderr."""
        assert self._process.stderr is not None
        self._process.kill()
        lines = self._process.stderr.read().decode(errors="replace").splitlines()
        self._close()
        return lines[-1] if lines else "(empty)"


def _close(server: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Kill a fork server; its sandbox is killed with it."""
    server.close()
    process.kill()
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _exchange(
    server: socket.socket, to_sandbox: FileIO, from_sandbox: FileIO, stdin: bytes, limits: SandboxLimits
) -> tuple[bytes, bytes]:
    """Write the input and read the output until the server replies; reply and output.

    Reads at most one chunk more than the output limit.
    """
    remaining, output = memoryview(stdin), bytearray()
    timeout_s = limits.seconds + REPLY_TIMEOUT_S
    deadline_s = time.monotonic() + timeout_s
    for pipe in (to_sandbox, from_sandbox):
        os.set_blocking(pipe.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(to_sandbox, selectors.EVENT_WRITE)
        selector.register(from_sandbox, selectors.EVENT_READ)
        reply = b""
        while not reply:
            ready = [key.fileobj for key, _ in selector.select(deadline_s - time.monotonic())]
            if not ready and time.monotonic() >= deadline_s:
                raise TimeoutError(f"no reply within {timeout_s:g} s")
            if to_sandbox in ready:
                remaining = remaining[_write(to_sandbox, remaining) :]
                if not remaining:
                    selector.unregister(to_sandbox)
                    to_sandbox.close()
            if from_sandbox in ready and not _read(from_sandbox, output, limits.output_bytes):
                selector.unregister(from_sandbox)
            if server in ready and not (reply := server.recv(MAX_REPLY_BYTES)):
                raise EOFError("it closed its socket")
    while _read(from_sandbox, output, limits.output_bytes):
        pass
    return reply, bytes(output)


def _write(pipe: FileIO, data: memoryview) -> int:
    """Number of bytes written; all of them if the pipe has no reader left."""
    try:
        return pipe.write(data[:_CHUNK_BYTES]) or 0
    except BrokenPipeError:
        return len(data)


def _read(pipe: FileIO, output: bytearray, max_bytes: int) -> bool:
    """Append the available bytes to `output`; whether to read on."""
    chunk = pipe.read(_CHUNK_BYTES)
    output += chunk or b""
    return bool(chunk) and len(output) <= max_bytes
