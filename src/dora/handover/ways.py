"""How an engine reaches those that it hands requests to, and takes them from.

Engines of one machine meet in files and map one another's pools. Who runs them on several gives them
other ways, with the same two questions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dora.handover.files import Handover
from dora.handover.pool import Mapped, Peer, open_pool


class Ways:
    """Those of one machine."""

    def __init__(self) -> None:
        self._mapped: dict[Path, Mapped] = {}

    def meet(self, folder: Path, move: int) -> Handover:
        """Where the two sides of a move find what the other one says."""
        return Handover(folder, move)

    def peer(self, pool: Any, num_bytes: int) -> Peer:
        """Another engine's pool of blocks of `num_bytes`; those whose files are gone are let go.

        Raises OSError or ValueError if it is not there or empty.
        """
        if pool not in self._mapped:
            self._mapped = {path: known for path, known in self._mapped.items() if path.exists()}
            self._mapped[pool] = Mapped(open_pool(pool, num_bytes))
        return self._mapped[pool]
