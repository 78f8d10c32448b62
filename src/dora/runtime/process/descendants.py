"""Processes that a worker has started, as reward functions and environments do: they end with their worker.

A worker leads a process group. Killing it kills the group, and its descendants in other groups. Those whose
parents have exited become children of the fork server (on Linux), which kills them when the run ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import psutil

SERVER_KEEPER = "run_until_eof.py"  # ends an inference server by SIGTERM, once its engine has exited
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parents exit. Without effect except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def lead_group() -> None:
    """Make this process the leader of a new process group, which `kill_group` kills."""
    os.setpgrp()


def kill_group(leader: int) -> None:
    """Kill a process that called `lead_group`, or has exited since, with its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
        os.killpg(leader, signal.SIGKILL)


def kill_with_descendants(process: psutil.Process) -> None:
    """Kill a process and all its descendants but inference servers, as far as that is permitted."""
    with contextlib.suppress(psutil.Error):
        process.suspend()  # it starts no more processes
    kill_descendants(process)
    with contextlib.suppress(psutil.Error):
        process.kill()


def kill_descendants(process: psutil.Process) -> None:
    """Kill all descendants of a process, but no inference servers, which have a keeper.

    Those that this process must not kill, as a program of another user, are left.
    """
    with contextlib.suppress(psutil.Error):
        found = process.children(recursive=True)
        keepers = {each.pid for each in found if _is_keeper(each)}
        for each in found:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(each.pid) not in keepers:  # each keeper leads a session
                    each.kill()


def _is_keeper(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(argument.endswith(SERVER_KEEPER) for argument in process.cmdline()[:3])
    return False
