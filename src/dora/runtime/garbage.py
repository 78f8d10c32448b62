"""Python, kept from stopping the driver.

What the orchestrator knows forms no cycles, and with a million requests a full collection would
look through it for seconds, again and again. And a thread that has an order for a worker would wait
for its turn while the main thread works on.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

TURN_S = 0.0005  # until another thread has its turn; Python's own is ten times that


@contextlib.contextmanager
def no_pauses() -> Iterator[None]:
    """Inside, nothing is collected but what `collect_young` finds, and threads take turns soon."""
    turn_s = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(turn_s)
        gc.enable()
        gc.unfreeze()


def collect_young() -> None:
    """Free the cycles that were made since the last call, not looking at anything older."""
    gc.collect(1)
