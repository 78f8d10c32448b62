"""Costs of migrations and loads in tokens: the hysteresis of migrations and of repartitions.

Measured in the run itself. An unmeasured cost counts as 0, so that the first migrations are tried and
measured.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTHING = 0.2  # weight of the newest measurement
VERSION_OVERHEAD = 0.12  # of a decode step, per further version on an engine (benchmarks/versions.py)


@dataclass(slots=True)
class MeasuredCosts:
    """Exponential moving averages, except the KV size, which is exact; 0: not measured yet."""

    migrated_tokens: int = 0  # response tokens of all migrations
    migrated_bytes: int = 0  # KV of these and of their prompts
    copy_bytes_per_s: float = 0.0
    stop_s: float = 0.0  # a request's pause during its migration
    load_s: float = 0.0
    mean_response_tokens: float = 0.0

    def observe_migration(self, num_tokens: int, num_bytes: int, copy_s: float, stop_s: float) -> None:
        """Record one migration of a request with `num_tokens` response tokens."""
        if num_bytes:  # else the KV was computed again
            self.migrated_tokens += num_tokens
            self.migrated_bytes += num_bytes
        if copy_s > 0:
            self.copy_bytes_per_s = _smooth(self.copy_bytes_per_s, num_bytes / copy_s)
        self.stop_s = _smooth(self.stop_s, stop_s)

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes per response token; the prompt's part is spread over the response."""
        return self.migrated_bytes / self.migrated_tokens if self.migrated_tokens else 0.0

    def observe_load(self, seconds: float) -> None:
        self.load_s = _smooth(self.load_s, seconds)

    def observe_response(self, num_tokens: int) -> None:
        self.mean_response_tokens = _smooth(self.mean_response_tokens, num_tokens)

    def migration_cost(self, num_requests: int, num_tokens: int, row_tokens_per_s: float) -> float:
        """Tokens that the migrated requests do not decode while they are copied and paused."""
        copy_s = 0.0
        if self.copy_bytes_per_s:
            copy_s = num_tokens * self.kv_bytes_per_token / self.copy_bytes_per_s
        return row_tokens_per_s * (copy_s + num_requests * self.stop_s)

    def load_cost(self, num_rows: int, row_tokens_per_s: float) -> float:
        """Tokens that an engine's rows do not decode while it loads a version."""
        return row_tokens_per_s * num_rows * self.load_s


def _smooth(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old) if old else new
