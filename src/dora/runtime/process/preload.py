"""What workers need, imported in the process that they are forked from, and nowhere else.

That process outlives the driver by as long as it takes to end, and whoever reads the driver's output
waits for both.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os

import dora.data.tokenizer
import dora.engine.kv_transfer.engine
import dora.trainer.advantage
import dora.trainer.checkpoint
import dora.trainer.trainer

with contextlib.suppress(ImportError, RuntimeError):  # where it cannot run, engines say so
    import dora.engine.kernels.numba_kernels  # noqa: F401  # compiled once, not in each engine

gc.freeze()  # what is imported stays, and pages that nobody looks through stay shared
atexit.register(os._exit, 0)  # at once; to take apart what is imported takes longer than a second
