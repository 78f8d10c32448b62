"""Looks at the files of runs again and again, while somebody wants to know, and says when there is news.

It takes a small share of one core however long the runs are: the more a look costs, the fewer there are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dora.errors import InputError
from dora.observe.report.page import page, payload
from dora.observe.report.reading import RunReader

LOOK_S = 1.0  # between two looks, at least
MAX_SHARE = 0.1  # of a core, for reading
SUMMARY = "summary.json"  # a run that has ended has it; one that goes on again has not


class News(NamedTuple):
    """What there is to know; `number` grows with each change."""

    number: int
    has_ended: bool  # every run has


class Watch:
    """One for all browsers. Methods may be called from any thread."""

    def __init__(
        self, folders: Sequence[Path], complain: Callable[[str], None], look_s: float = LOOK_S
    ) -> None:
        """Read the runs. Raises InputError for what is no run; `complain` hears of what goes wrong later."""
        self._folders, self._complain, self._look_s = folders, complain, look_s
        self._readers = [RunReader(folder) for folder in folders]
        self._reading = threading.Lock()  # of the readers and of what was made of them
        self._made: tuple[int, list[dict[str, Any]]] | None = None
        self._changed = threading.Condition()  # guards the rest
        self._news = News(0, False)
        self._num_watchers = 0
        self._is_over = False
        self._spent_s = 0.0  # of CPU, since the last look
        self._trouble = ""
        self._refresh()
        self._spent_s = 0.0  # the first look is not held against those that follow

    def page(self) -> str:
        """The page as it is now."""
        self.look()
        return page(self._runs(), live=True)

    def payload(self) -> str:
        """What the page asks for when it has heard of news."""
        return payload(self._runs())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Somebody wants to know while this is open."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def wait(self, number: int, timeout_s: float) -> News | None:
        """The news after `number`, or None if there are none for so long, or the watch is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._news.number > number or self._is_over, timeout_s)
            return self._news if self._news.number > number and not self._is_over else None

    @property
    def is_over(self) -> bool:
        """Nobody looks any more."""
        return self._is_over

    def follow(self) -> None:
        """Look again and again until `close`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._num_watchers > 0 or self._is_over)
            if self._is_over:
                return
            self.look()
            with self._changed:
                rest_s, self._spent_s = max(self._look_s, self._spent_s / MAX_SHARE), 0.0
                self._changed.wait_for(lambda: self._is_over, rest_s)

    def close(self) -> None:
        """End all waiting."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def look(self) -> None:
        """Look once. Files that cannot be read for now leave what was known."""
        try:
            self._refresh()
            trouble = ""
        except (InputError, OSError) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            self._complain(trouble)
        self._trouble = trouble

    def _refresh(self) -> None:
        with self._reading, self._timed():
            is_new = any([reader.refresh() for reader in self._readers])  # a list: each is to look
            has_ended = all((folder / SUMMARY).is_file() for folder in self._folders)
        with self._changed:
            if is_new or has_ended != self._news.has_ended:
                self._news = News(self._news.number + 1, has_ended)
                self._changed.notify_all()

    def _runs(self) -> list[dict[str, Any]]:
        """Made once for each change, however many browsers ask."""
        with self._reading:
            number = self._news.number
            if self._made is None or self._made[0] != number:
                with self._timed():
                    self._made = (number, [reader.data() for reader in self._readers])
            return self._made[1]

    def _count(self, change: int) -> None:
        with self._changed:
            self._num_watchers += change
            self._changed.notify_all()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            with self._changed:
                self._spent_s += time.thread_time() - began_s
