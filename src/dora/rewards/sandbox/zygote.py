"""The process that cells are forked from: an interpreter with part of the standard library loaded, no more.

A request is two pipes and the limits of one cell. The cell takes its program from the first pipe, and prints
into the second; neither passes through here, so that a cell, which begins as a copy of this process, finds
nothing of others in its memory. A cell is over when its program is, or its time; whatever is left is killed.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import os
import select
import signal
import socket
import struct
import sys
import types
from itertools import pairwise
from typing import NoReturn

from dora.rewards.sandbox.confinement import NUM_FILES, Confinement, ConfinementError, limit

REQUEST = struct.Struct("<dQ")  # seconds and bytes of memory
LENGTH = struct.Struct("<Q")  # of the program, before it
ENDED, FAILED, LATE, REFUSED = b"e", b"f", b"l", b"r"  # a reply; after the last one comes the reason
CONFINED, FREE = "confined", "free"
MAX_REPLY_BYTES = 4096
# What most programs import, so that no cell has to. Not random: all cells would draw the same numbers.
PRELOADED = (
    *("bisect", "collections", "copy", "functools", "heapq", "io", "itertools", "json", "math", "operator"),
    *("re", "string", "typing"),
)
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", f"{sys.base_prefix}/lib")  # of extension modules


class Zygote:
    """Forks a cell for each request that comes through `door`."""

    def __init__(self, door: socket.socket, is_confined: bool) -> None:
        """Where cells cannot be confined, and must be, every request is refused."""
        self._door = door
        self._null = os.open(os.devnull, os.O_RDWR)
        self._confinement: Confinement | None = None
        self._why_not = ""
        if is_confined:
            try:
                self._confinement = Confinement([*sys.path, *LIBRARIES])
            except ConfinementError as error:
                self._why_not = str(error)

    def serve(self) -> None:
        """Until the other end of the door is closed."""
        while True:
            message, pipes, _, _ = socket.recv_fds(self._door, REQUEST.size, 2)
            if not message:
                return
            self._door.send(self._fork(pipes, *REQUEST.unpack(message))[:MAX_REPLY_BYTES])

    def _fork(self, pipes: list[int], seconds: float, memory_bytes: int) -> bytes:
        """The life of a cell; how it ended."""
        if self._why_not:
            for pipe in pipes:
                os.close(pipe)
            return REFUSED + self._why_not.encode()
        report, reported = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_cell(pipes, reported, seconds, memory_bytes)
        for pipe in (*pipes, reported):
            os.close(pipe)
        with open(report, "rb") as file:  # it ends when the cell is confined
            why_not = file.read()
        has_ended = _wait(pid, self._door, seconds)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it started, which only a cell that is free can do
        _, status = os.waitpid(pid, 0)
        if why_not:
            return REFUSED + why_not
        return LATE if not has_ended else ENDED if status == 0 else FAILED

    def _become_cell(self, pipes: list[int], reported: int, seconds: float, memory_bytes: int) -> NoReturn:
        code = 1
        try:
            try:
                os.setsid()
                for own, pipe in enumerate((*pipes, self._null)):
                    os.dup2(pipe, own)
                kept = {reported} if self._confinement is None else {reported, self._confinement.ruleset}
                for low, high in pairwise((2, *sorted(kept), NUM_FILES)):
                    os.closerange(low + 1, high)
                limit(seconds, memory_bytes)
                if self._confinement is not None:
                    self._confinement.enter()
            except Exception as error:
                os.write(reported, str(error).encode() or b"unknown")
                os._exit(code)
            os.close(reported)
            code = _run_program()
        finally:
            os._exit(code)


def _wait(pid: int, door: socket.socket, seconds: float) -> bool:
    """Whether the cell ends in time, while somebody waits for it at the other end of the door."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(door, select.POLLIN)  # nothing is said while a cell lives: the other end is gone
        return pidfd in (ready for ready, _ in poll.poll(1e3 * seconds))
    finally:
        os.close(pidfd)


def _run_program() -> int:
    """Exit code of the program that comes first through standard input, as an interpreter's would be."""
    (num_bytes,) = LENGTH.unpack(_read(LENGTH.size))
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)
    code = 0
    try:
        exec(compile(_read(num_bytes), "<program>", "exec", dont_inherit=True), vars(module))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code & 0xFF


def _read(num_bytes: int) -> bytes:
    """Exactly so many of standard input, and none of what comes after them."""
    found = b""
    while len(found) < num_bytes:
        piece = os.read(0, num_bytes - len(found))
        if not piece:
            raise EOFError("the program ends early")
        found += piece
    return found


def main() -> None:
    """Serve the socket at file 0. Arguments: the folder of the package, and how cells are."""
    package, mode = sys.argv[1:]
    sys.path.remove(package)
    sys.argv[:] = ["program"]
    os.environ.clear()
    for name in PRELOADED:
        importlib.import_module(name)
    with socket.socket(fileno=os.dup(0)) as door:
        Zygote(door, mode == CONFINED).serve()
