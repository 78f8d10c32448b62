"""The two ends of a move as a model: they obey the protocol, in any order, and die at any moment."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from random import Random

from dora.core.types import RequestId
from dora.runtime.process import messages as m

REQUEST = RequestId(0, 1, 2)


class End:
    """One engine of a move: orders come in, words go out, both are under way for a while."""

    def __init__(self, folder: Path, rng: Random) -> None:
        self.orders: deque[object] = deque()
        self.words: deque[object] = deque()
        self._folder, self._rng = folder, rng
        self._move = -1
        self._is_open = False

    def act(self) -> None:
        """Hear one order, or do one thing on one's own account."""
        if self.orders and self._rng.random() < 0.5:
            self.hear(self.orders.popleft())
        elif self._is_open:
            self.poll()

    def hear(self, order: object) -> None:
        raise NotImplementedError

    def poll(self) -> None:
        raise NotImplementedError

    def path(self, name: str) -> Path:
        return self._folder / f"migration-{self._move}.{name}"

    def _say(self, word: object) -> None:
        self._is_open = False
        self.words.append(word)

    def _rename(self, name: str) -> bool:
        try:
            os.rename(self.path("exported"), self.path(name))
        except FileNotFoundError:
            return False
        return True


class Destination(End):
    """Reserves, takes what is offered, or gives up."""

    has_taken = False

    def hear(self, order: object) -> None:
        match order:
            case m.ReserveMigration(move):
                self._move, self._is_open = move, True
                if self._rng.random() < 0.1:
                    self._say(m.ImportFailed(move, "no free row"))
                else:
                    self.words.append(m.MigrationReserved(move, 0, ""))
            case m.CancelMigration() if self._is_open:
                self._say(m.ImportFailed(self._move, "cancelled"))
            case _:
                pass

    def poll(self) -> None:
        if self._rng.random() < 0.05:
            self._say(m.ImportFailed(self._move, "lease over"))
        elif self._rename("imported"):
            self.has_taken = True
            self._say(m.ImportFinished(self._move, REQUEST, 7, 512, 0.001, 0.002))


class Source(End):
    """Offers the request, and takes it back unless it was taken."""

    _has_offered = False

    def hear(self, order: object) -> None:
        match order:
            case m.StartExport(move):
                self._move, self._is_open = move, True
                if self._rng.random() < 0.1:
                    self._say(m.ExportFailed(move, "it has finished"))
            case m.CancelMigration() if self._is_open:
                self._take_back("cancelled")
            case _:
                pass

    def poll(self) -> None:
        if not self._has_offered:
            self.path("progress").touch()
            if self._rng.random() < 0.3:
                self._has_offered = True
                self.path("draft").touch()
                os.rename(self.path("draft"), self.path("exported"))
        elif self.path("imported").exists():
            self._say(m.ExportFinished(self._move))
        elif self._rng.random() < 0.1:
            self._take_back("lease over")

    def _take_back(self, reason: str) -> None:
        if not self._has_offered or self._rename("withdrawn"):
            self._say(m.ExportFailed(self._move, reason))
