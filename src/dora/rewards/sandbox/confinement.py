"""What a process gives up before it runs a program that nobody has read: files, network, other processes.

Two layers of the Linux kernel do it. Neither needs a privilege, neither can be taken off again, and root is
bound by them like anybody else. Landlock says which files can be opened; a seccomp filter says which system
calls there are. Limits of resources (setrlimit) come beside them.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import resource
import signal
import struct
from collections.abc import Iterable

NUM_FILES = 64  # open at once
# All system calls of a cell beside openat: their numbers on x86_64 and aarch64 (None: it has none). Nothing
# here makes a process, a thread, a socket or a file, speaks to another process, or runs another program.
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
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of Landlock, everywhere
_ALL_ACCESS = (1 << 13) - 1  # every right of the first version of Landlock
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_RULE_PATH_BENEATH = 1
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of classic BPF
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


class ConfinementError(Exception):
    """This machine cannot confine a process."""


class Confinement:
    """What a cell may still do: compute, use the files that it has open, and read below `readable`."""

    def __init__(self, readable: Iterable[str]) -> None:
        """Prepared once for all cells. Raises ConfinementError."""
        machine = os.uname().machine
        if machine not in _MACHINES:
            raise ConfinementError(f"there is no list of system calls for {machine}")
        self._filter = _filter(*_MACHINES[machine])
        self.ruleset = _ruleset(readable)

    def enter(self) -> None:
        """Give up everything else, for ever; closes `ruleset`. Raises ConfinementError."""
        _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
        _landlock(_RESTRICT_SELF, self.ruleset, 0)
        os.close(self.ruleset)
        code = ctypes.create_string_buffer(self._filter, len(self._filter))
        program = ctypes.create_string_buffer(struct.pack("HP", len(code) // 8, ctypes.addressof(code)))
        _prctl("seccomp", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def limit(seconds: float, memory_bytes: int) -> None:
    """Bound what this process takes; it is killed when its parent ends."""
    limits = {
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,  # in case that nobody looks at the clock any more
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: NUM_FILES,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    _prctl("pdeathsig", _PR_SET_PDEATHSIG, signal.SIGKILL)


def _filter(column: int, audit_number: int, openat: int) -> bytes:
    """BPF: what is not listed does not exist (ENOSYS), and what opens a file may only read it (EACCES)."""
    numbers = [calls[column] for calls in SYSTEM_CALLS.values()]
    allowed = [number for number in numbers if number is not None]
    code = [
        (_LOAD, 0, 0, 4),  # the architecture: numbers of another one mean something else
        (_IF_EQUAL, 1, 0, audit_number),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number
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


def _ruleset(readable: Iterable[str]) -> int:
    """A file descriptor: Landlock's rules, by which folders that are there can be read and nothing else."""
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
        raise ConfinementError(f"Landlock: {os.strerror(ctypes.get_errno())}")
    return found


def _prctl(what: str, *arguments: int) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(*arguments, *[0] * (5 - len(arguments))) != 0:
        raise ConfinementError(f"{what}: {os.strerror(ctypes.get_errno())}")
