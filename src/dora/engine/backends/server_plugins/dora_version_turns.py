"""Which of several versions an inference server computes next."""

from __future__ import annotations

from collections.abc import Mapping

# A step with other requests than the last one costs more: vLLM exchanges the rows of its batch.
TURN_STEPS = 8


class VersionTurns:
    """Versions take turns: a version waits for at most one turn of each other one."""

    def __init__(self, turn_steps: int = TURN_STEPS) -> None:
        """The version with most requests has turns of this many steps, others shorter ones in proportion."""
        self._turn_steps = turn_steps
        self._num_turns = self._num_left = 0
        self._current = ""
        self._last_turns: dict[str, int] = {}

    def next(self, num_requests: Mapping[str, int]) -> str:
        """The version of the next step, of those with something to do; "" if there are none."""
        self._last_turns = {version: self._last_turns.get(version, 0) for version in num_requests}
        if self._current in num_requests and self._num_left > 0:
            self._num_left -= 1
            return self._current
        if not num_requests:
            return ""
        self._num_turns += 1
        self._current = min(sorted(num_requests), key=self._last_turns.__getitem__)
        self._last_turns[self._current] = self._num_turns
        share = num_requests[self._current] / max(num_requests.values())
        self._num_left = max(1, round(self._turn_steps * share)) - 1
        return self._current

    def end(self) -> None:
        """End the turn: none of its requests can run."""
        self._num_left = 0
