"""Which of several versions an inference server computes next."""

from __future__ import annotations

from collections.abc import Set


class VersionTurns:
    """Versions take turns: a version waits for at most one step of each other one."""

    def __init__(self) -> None:
        self._num_turns = 0
        self._last_turns: dict[str, int] = {}

    def next(self, versions: Set[str]) -> str:
        """Of the `versions` with something to do, the one that has waited longest; "" if there are none."""
        self._last_turns = {version: self._last_turns.get(version, 0) for version in versions}
        if not versions:
            return ""
        self._num_turns += 1
        chosen = min(sorted(versions), key=self._last_turns.__getitem__)
        self._last_turns[chosen] = self._num_turns
        return chosen
