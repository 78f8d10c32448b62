"""Ctrl-C and SIGTERM become the exception `Stopped`, and only where it can be handled.

What is being built is first built to its end, and what is being taken down is taken down
undisturbed: a signal that comes before `arm` is kept, one after `disarm` is ignored.
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
        self._is_armed = False

    def __enter__(self) -> Stopper:
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """From here on a signal raises Stopped; so does one that has come already."""
        if self._asked:
            raise Stopped(self._asked)
        self._is_armed = True

    def disarm(self) -> None:
        """From here on signals are ignored."""
        self._is_armed = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = signal.Signals(number).name
        if self._is_armed:
            self._is_armed = False
            raise Stopped(self._asked)
