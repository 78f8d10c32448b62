"""Imported once by the fork server (`worker_process.preload_workers`): the modules that workers need."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import warnings

import psutil

import dora.data.tokenizer
import dora.engine.engine
import dora.trainer.advantage
import dora.trainer.checkpoint
import dora.trainer.trainer

with contextlib.suppress(ImportError, RuntimeError):  # if numba does not work here, engines report it
    import dora.engine.kernels.numba_kernels  # noqa: F401  # compiled once, not in each engine

from dora.runtime.process import worker_process  # noqa: F401
from dora.runtime.process.descendants import adopt_orphans, kill_descendants


def _exit(server: int = os.getpid()) -> None:
    """Kill orphans of workers, and exit.

    A program that reads the driver's output also waits for the exit of the fork server, which follows that of
    the driver. With these imports, Python's own shutdown would take longer than a second.
    """
    if os.getpid() == server:  # not a process that a worker has forked
        kill_descendants(psutil.Process())
    os._exit(0)


gc.freeze()  # the collector does not touch these objects, so workers keep sharing their pages
adopt_orphans()
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of an adopted process
atexit.register(_exit)
