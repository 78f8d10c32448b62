"""Python's cyclic collector, kept from stopping the driver.

What the orchestrator knows forms no cycles, and with a million requests a full collection would
look through it for seconds, again and again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_pauses() -> Iterator[None]:
    """Inside, nothing is collected but what `collect_young` finds."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_young() -> None:
    """Free the cycles that were made since the last call, not looking at anything older."""
    gc.collect(1)
