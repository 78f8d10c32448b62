"""The process that forks one sandbox per run, and the restrictions that a sandbox applies to itself.

The fork server is an interpreter with part of the standard library loaded. A request is two pipes and the
limits of one run. The sandbox reads its program and input from the first pipe and prints into the second;
neither passes through the server, so a sandbox, which starts as a copy of the server, finds no data of other
runs in its memory. A run ends with its program or at its time limit; then the server kills what is left.

Restrictions are two features of the Linux kernel: Landlock limits which files can be opened, a seccomp filter
limits the system calls. Neither needs a privilege, neither can be removed again, and both bind root. Resource
limits (setrlimit) come in addition.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import errno
import importlib
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import types
from collections.abc import Iterable
from itertools import pairwise
from typing import NoReturn, TextIO

REQUEST = struct.Struct("<dQ")  # time limit (s), memory limit (bytes)
LENGTH = struct.Struct("<Q")  # of the program, in front of it
EXITED, FAILED, TIMED_OUT, REFUSED = b"e", b"f", b"l", b"r"  # replies; the reason follows REFUSED
RESTRICTED, UNRESTRICTED = "restricted", "unrestricted"
MAX_REPLY_BYTES = 4096
# Modules that most programs import. Not random: all sandboxes would draw the same numbers.
PRELOADED = (
    *("bisect", "collections", "copy", "functools", "heapq", "io", "itertools", "json", "math", "operator"),
    *("re", "string", "typing"),
)
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", f"{sys.base_prefix}/lib")  # of extension modules


def main() -> None:
    """Serve requests from the socket at file descriptor 0. Arguments: the package's folder, and the mode."""
    package, mode = sys.argv[1:]
    sys.path.remove(package)
    sys.argv[:] = ["program"]
    os.environ.clear()
    for name in PRELOADED:
        importlib.import_module(name)
    with socket.socket(fileno=os.dup(0)) as requests:
        ForkServer(requests, mode == RESTRICTED).serve()


class ForkServer:
    """Forks a sandbox for each request, one at a time."""

    def __init__(self, requests: socket.socket, is_restricted: bool) -> None:
        """If restrictions are required and not available, every request is refused."""
        self._socket = requests
        self._null = os.open(os.devnull, os.O_RDWR)
        self._restrictions: Restrictions | None = None
        self._refusal = ""
        if is_restricted:
            try:
                self._restrictions = Restrictions([*sys.path, *LIBRARIES])
            except RestrictionError as error:
                self._refusal = str(error)

    def serve(self) -> None:
        """Serve until the other end of the socket is closed."""
        while True:
            message, pipes, _, _ = socket.recv_fds(self._socket, REQUEST.size, 2)
            if not message:
                return
            self._socket.send(self._run(pipes, *REQUEST.unpack(message))[:MAX_REPLY_BYTES])

    def _run(self, pipes: list[int], seconds: float, memory_bytes: int) -> bytes:
        """Fork a sandbox and wait for its end; the reply."""
        if self._refusal:
            for pipe in pipes:
                os.close(pipe)
            return REFUSED + self._refusal.encode()
        error_reader, error_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_sandbox(pipes, error_writer, seconds, memory_bytes)
        for pipe in (*pipes, error_writer):
            os.close(pipe)
        with open(error_reader, "rb") as file:  # ends once the sandbox is restricted
            setup_error = file.read()
        has_exited = _wait(pid, self._socket, seconds)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # its children, which only an unrestricted program can start
        _, status = os.waitpid(pid, 0)
        if setup_error:
            return REFUSED + setup_error
        return TIMED_OUT if not has_exited else EXITED if status == 0 else FAILED

    def _become_sandbox(
        self, pipes: list[int], error_writer: int, seconds: float, memory_bytes: int
    ) -> NoReturn:
        code = 1
        try:
            try:
                self._set_up(pipes, error_writer, seconds, memory_bytes)
            except Exception as error:
                os.write(error_writer, str(error).encode() or b"unknown")
                os._exit(code)
            os.close(error_writer)
            code = _run_program()
        finally:
            os._exit(code)

    def _set_up(self, pipes: list[int], error_writer: int, seconds: float, memory_bytes: int) -> None:
        """Keep the pipes as stdin and stdout, close every other file, limit and restrict this process."""
        os.setsid()
        for descriptor, pipe in enumerate((*pipes, self._null)):
            os.dup2(pipe, descriptor)
        old = sys.stdout  # it has recorded that /dev/null has positions; a pipe has none
        made = os.fdopen(1, "w", encoding=old.encoding, errors=old.errors, closefd=False)
        sys.stdout = sys.__stdout__ = made  # type: ignore[misc]
        kept = {error_writer} if self._restrictions is None else {error_writer, self._restrictions.ruleset}
        for low, high in pairwise((2, *sorted(kept), MAX_OPEN_FILES)):
            os.closerange(low + 1, high)
        set_resource_limits(seconds, memory_bytes)
        if self._restrictions is not None:
            self._restrictions.apply()


def _wait(pid: int, requests: socket.socket, seconds: float) -> bool:
    """Whether the sandbox exits in time. Returns early if the other end of the socket is closed."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(requests, select.POLLIN)  # no request comes during a run: readable means closed
        return pidfd in (ready for ready, _ in poll.poll(1e3 * seconds))
    finally:
        os.close(pidfd)


def _run_program() -> int:
    """Run the program at the start of standard input; its exit code, as an interpreter's."""
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
    _flush(sys.stdout)  # in an interpreter's order
    vars(module).clear()  # closes files that the program has left open, which writes what they hold
    _flush(sys.__stdout__)
    return code & 0xFF


def _flush(output: TextIO | None) -> None:
    """A program may have closed or detached its output."""
    with contextlib.suppress(AttributeError, ValueError):
        output.flush()  # type: ignore[union-attr]


def _read(num_bytes: int) -> bytes:
    """Exactly `num_bytes` of standard input, unbuffered: the rest belongs to the program."""
    found = b""
    while len(found) < num_bytes:
        chunk = os.read(0, num_bytes - len(found))
        if not chunk:
            raise EOFError("the program ends early")
        found += chunk
    return found


MAX_OPEN_FILES = 64
# The allowed system calls besides openat: their numbers on x86_64 and aarch64 (None: does not exist there).
# None of them makes a process, a thread, a socket or a file, sends to another process, or runs another
# program.
SYSTEM_CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "lseek": (8, 62),
    "pread64": (17, 67),
    "getdents64": (217, 61),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "getcwd": (79, 17),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "restart_syscall": (219, 128),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    "getrandom": (318, 278),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
_MACHINES = {"x86_64": (0, 0xC000003E, 257), "aarch64": (1, 0xC00000B7, 56)}  # column, audit number, openat
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock, on every architecture
_ALL_ACCESS = (1 << 13) - 1  # every right of the first version of Landlock
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_RULE_PATH_BENEATH = 1
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of classic BPF
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


class RestrictionError(Exception):
    """This machine cannot restrict a process."""


class Restrictions:
    """Limits a process to computing, to the files it has open, and to reading files below `readable`."""

    def __init__(self, readable: Iterable[str]) -> None:
        """Prepared once for all sandboxes. Raises RestrictionError."""
        machine = os.uname().machine
        if machine not in _MACHINES:
            raise RestrictionError(f"no list of system calls for {machine}; need {', '.join(_MACHINES)}")
        self._filter = _seccomp_filter(*_MACHINES[machine])
        self.ruleset = _landlock_ruleset(readable)

    def apply(self) -> None:
        """Restrict this process for good; closes `ruleset`. Raises RestrictionError."""
        _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
        _landlock(_RESTRICT_SELF, self.ruleset, 0)
        os.close(self.ruleset)
        code = ctypes.create_string_buffer(self._filter, len(self._filter))
        program = ctypes.create_string_buffer(struct.pack("HP", len(code) // 8, ctypes.addressof(code)))
        _prctl("seccomp", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def set_resource_limits(seconds: float, memory_bytes: int) -> None:
    """Limit the resources of this process, and have the kernel kill it when its parent exits."""
    limits = {
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,  # in case the fork server does not enforce the time
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    _prctl("pdeathsig", _PR_SET_PDEATHSIG, signal.SIGKILL)


def _seccomp_filter(column: int, audit_number: int, openat: int) -> bytes:
    """BPF program: a call that is not listed fails with ENOSYS, openat for writing with EACCES."""
    numbers = [calls[column] for calls in SYSTEM_CALLS.values()]
    allowed = [number for number in numbers if number is not None]
    code = [
        (_LOAD, 0, 0, 4),  # the architecture: another one has other numbers
        (_IF_EQUAL, 1, 0, audit_number),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_IF_EQUAL, 0, 4, openat),
        (_LOAD, 0, 0, 32),  # its third argument, the flags
        (_IF_ANY_BIT, 0, 1, _WRITING),
        (_RETURN, 0, 0, _ERROR | errno.EACCES),
        (_RETURN, 0, 0, _ALLOW),
        *((_IF_EQUAL, len(allowed) - i, 0, number) for i, number in enumerate(allowed)),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _landlock_ruleset(readable: Iterable[str]) -> int:
    """A file descriptor of Landlock rules: files below existing folders can be read, nothing else."""
    handled = ctypes.create_string_buffer(struct.pack("=Q", _ALL_ACCESS), 8)
    ruleset = _landlock(_CREATE_RULESET, ctypes.addressof(handled), 8, 0)
    for path in filter(os.path.isdir, readable):
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", _READ_FILE | _READ_DIR, folder), 12)
        _landlock(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.addressof(rule))
        os.close(folder)
    return ruleset


def _landlock(number: int, *arguments: int) -> int:
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    system_call.argtypes, system_call.restype = [ctypes.c_long] * 5, ctypes.c_long
    found: int = system_call(number, *arguments, *[0] * (4 - len(arguments)))
    if found < 0:
        raise RestrictionError(f"Landlock: {os.strerror(ctypes.get_errno())}")
    return found


def _prctl(feature: str, *arguments: int) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(*arguments, *[0] * (5 - len(arguments))) != 0:
        raise RestrictionError(f"{feature}: {os.strerror(ctypes.get_errno())}")
