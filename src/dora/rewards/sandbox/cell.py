"""Runs programs in cells: what goes in, what comes out, and no way to anything else.

Each run is a new process, forked from a zygote (`sandbox/zygote.py`) that is started once. A cell has its
program and its input, and no file, memory or pipe of whoever compares its output.
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
from dora.rewards.sandbox.zygote import CONFINED, ENDED, FREE, LENGTH, MAX_REPLY_BYTES, REFUSED, REQUEST

GRACE_S = 30.0  # beyond the time of a cell, after which its zygote is taken for dead
_PIECE_BYTES = 1 << 16
_PACKAGE = str(Path(__file__).parents[3])  # where `dora` is
_START = "import sys; sys.path.append(sys.argv[1]); from dora.rewards.sandbox.zygote import main; main()"
_FLAGS = ("-S", "-s", "-P", "-X", "utf8")  # the standard library alone
_REMEDY = (
    "judge on a machine whose Linux has Landlock (5.13 or newer; /sys/kernel/security/lsm lists it), in a "
    "container that lets seccomp and Landlock's system calls pass; or set confined = false among the "
    "options, and programs may do whatever this user may"
)


@dataclass(frozen=True)
class Limits:
    """Of one cell: wall-clock time, address space, and what it may print."""

    seconds: float
    memory_bytes: int = 512 << 20
    output_bytes: int = 4 << 20


@dataclass(frozen=True)
class Ran:
    """What a program printed, and whether it ended in time, with exit code 0, within its limits."""

    output: bytes
    is_good: bool


class Cells:
    """Runs one program at a time, for one thread."""

    def __init__(self, is_confined: bool = True) -> None:
        """Try an empty program. Raises RewardError where cells must be confined, and cannot be."""
        if sys.platform != "linux":
            raise RewardError("programs of answers are run on Linux only; judge them there")
        self._mode = CONFINED if is_confined else FREE
        self._zygote: _Zygote | None = None
        self.run("", b"", Limits(GRACE_S))

    def run(self, program: str, given: bytes, limits: Limits) -> Ran:
        """Run a Python program that reads `given`. Raises RewardError if no cell can be had for it.

        What a program prints beyond its limit is not taken: it waits until its time is over.
        """
        if self._zygote is None:
            self._zygote = _Zygote(self._mode)
        text = program.encode(errors="replace")
        try:
            reply, output = self._zygote.fork(LENGTH.pack(len(text)) + text + given, limits)
        except (OSError, EOFError) as error:
            zygote, self._zygote = self._zygote, None  # the next run begins with another
            raise RewardError(
                f"the process that forks cells is gone: {error}; {zygote.last_words}"
            ) from error
        if reply.startswith(REFUSED):
            reason = reply.removeprefix(REFUSED).decode(errors="replace")
            raise RewardError(f"programs of answers cannot be confined here ({reason}): {_REMEDY}")
        return Ran(output[: limits.output_bytes], reply == ENDED and len(output) <= limits.output_bytes)


class _Zygote:
    """A zygote from its other end."""

    def __init__(self, mode: str) -> None:
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {"PYTHONHASHSEED": "0"}  # equal programs print equal sets
        if (libraries := os.environ.get("LD_LIBRARY_PATH")) is not None:  # without which some do not start
            environment["LD_LIBRARY_PATH"] = libraries
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *_FLAGS, "-c", _START, _PACKAGE, mode],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._door, self._process)

    def fork(self, given: bytes, limits: Limits) -> tuple[bytes, bytes]:
        """Its reply, and what the cell printed. Raises OSError or EOFError if it is gone."""
        its_input, to_cell = os.pipe()
        from_cell, its_output = os.pipe()
        with FileIO(to_cell, "w") as ours, FileIO(from_cell) as theirs:
            try:
                message = REQUEST.pack(limits.seconds, limits.memory_bytes)
                socket.send_fds(self._door, [message], [its_input, its_output])
            finally:
                os.close(its_input)
                os.close(its_output)
            return _exchange(self._door, ours, theirs, given, limits)

    @property
    def last_words(self) -> str:
        """The last line that it has written, once it is ended."""
        assert self._process.stderr is not None
        self._process.kill()
        lines = self._process.stderr.read().decode(errors="replace").splitlines()
        self._end()
        return lines[-1] if lines else "it says nothing"


def _end(door: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a zygote, and its cell with it."""
    door.close()
    process.kill()
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _exchange(
    door: socket.socket, to_cell: FileIO, from_cell: FileIO, given: bytes, limits: Limits
) -> tuple[bytes, bytes]:
    """Give and take until the zygote has said how the cell ended; its reply, and what was printed.

    Of what is printed it takes little more than the limit.
    """
    left, output = memoryview(given), bytearray()
    until_s = time.monotonic() + limits.seconds + GRACE_S
    for pipe in (to_cell, from_cell):
        os.set_blocking(pipe.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(door, selectors.EVENT_READ)
        selector.register(to_cell, selectors.EVENT_WRITE)
        selector.register(from_cell, selectors.EVENT_READ)
        reply = b""
        while not reply:
            ready = [key.fileobj for key, _ in selector.select(until_s - time.monotonic())]
            if not ready and time.monotonic() >= until_s:
                raise TimeoutError(f"no word of it for {limits.seconds + GRACE_S:g} s")
            if to_cell in ready:
                left = left[_write(to_cell, left) :]
                if not left:
                    selector.unregister(to_cell)
                    to_cell.close()
            if from_cell in ready and not _read(from_cell, output, limits.output_bytes):
                selector.unregister(from_cell)
            if door in ready and not (reply := door.recv(MAX_REPLY_BYTES)):
                raise EOFError("it has hung up")
    while _read(from_cell, output, limits.output_bytes):
        pass
    return reply, bytes(output)


def _write(pipe: FileIO, left: memoryview) -> int:
    """How much of it is off our hands: all of it, if nobody reads any more."""
    try:
        return pipe.write(left[:_PIECE_BYTES]) or 0
    except BrokenPipeError:
        return len(left)


def _read(pipe: FileIO, output: bytearray, most: int) -> bool:
    """Take what is there; whether there may be more that is wanted."""
    piece = pipe.read(_PIECE_BYTES)
    output += piece or b""
    return bool(piece) and len(output) <= most
