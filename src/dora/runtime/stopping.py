"""Ctrl-C and SIGTERM become the exception `Stopped`, at a place where nothing is half done.

A handler only remembers that it was called; the main loop asks between two facts, when every
order is carried out and recorded. What is being taken down is taken down undisturbed.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """Somebody asked the run to end early; the text is the signal's name."""


class Stopper:
    """Holds the handlers of both signals while entered."""

    def __init__(self) -> None:
        self._asked = ""
        self._is_armed = True

    def __enter__(self) -> Stopper:
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises Stopped if somebody has asked for it."""
        if self._asked and self._is_armed:
            raise Stopped(self._asked)

    def disarm(self) -> None:
        """From here on signals are ignored."""
        self._is_armed = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = signal.Signals(number).name
