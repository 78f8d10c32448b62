"""What moving costs and what it saves, in tokens: the hysteresis behind every move.

Measured in the run itself: bytes of KV per token, how fast they are copied, how long a moved
request stands still, how long a load takes. Until something is measured it counts as free, so
that the first moves are tried and measured.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEW = 0.2  # weight of the newest measurement
VERSION_OVERHEAD = 0.12  # of a decode step, by each further version on an engine (benchmarks/versions.py)


@dataclass(slots=True)
class Costs:
    """Measurements of this run, smoothed but for the KV's size; 0: not measured yet."""

    moved_tokens: int = 0  # of answers, in all moves
    moved_bytes: int = 0  # of their KV and of their prompts'
    copy_bytes_per_s: float = 0.0
    stop_s: float = 0.0
    load_s: float = 0.0
    answer_tokens: float = 0.0

    def heard_move(self, num_tokens: int, num_bytes: int, copy_s: float, stop_s: float) -> None:
        """A request of `num_tokens` has moved."""
        if num_bytes:  # else its KV was computed again
            self.moved_tokens += num_tokens
            self.moved_bytes += num_bytes
        if copy_s > 0:
            self.copy_bytes_per_s = _smooth(self.copy_bytes_per_s, num_bytes / copy_s)
        self.stop_s = _smooth(self.stop_s, stop_s)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that moved per token of answer: the prompt's part is spread over them."""
        return self.moved_bytes / self.moved_tokens if self.moved_tokens else 0.0

    def heard_load(self, seconds: float) -> None:
        self.load_s = _smooth(self.load_s, seconds)

    def heard_answer(self, num_tokens: int) -> None:
        self.answer_tokens = _smooth(self.answer_tokens, num_tokens)

    def of_move(self, num_requests: int, num_tokens: int, row_tokens_per_s: float) -> float:
        """Tokens that the moved requests could have decoded while they are copied and stand still."""
        copy_s = 0.0
        if self.copy_bytes_per_s:
            copy_s = num_tokens * self.kv_bytes_per_token / self.copy_bytes_per_s
        return row_tokens_per_s * (copy_s + num_requests * self.stop_s)

    def of_load(self, rows: int, row_tokens_per_s: float) -> float:
        """Tokens that the rows of an engine could have decoded while it loads a version."""
        return row_tokens_per_s * rows * self.load_s


def _smooth(old: float, new: float) -> float:
    return old + _NEW * (new - old) if old else new
