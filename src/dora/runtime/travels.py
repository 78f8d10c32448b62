"""What moving requests cost: how many moved and why, how long they stood still, what was computed twice.

Counted from facts and orders alone, as the journal has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dora.core.actions import Action, Generate, Migrate
from dora.core.events import (
    EngineLost,
    Event,
    Migrated,
    MigrationFailed,
    Progressed,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
)
from dora.core.records import GroupId, RequestId
from dora.runtime.lengths import percentile


@dataclass
class Travels:
    """Sums over a run. `prompt_length` says how many tokens the prompt of a group has."""

    prompt_length: Callable[[GroupId], int]
    migrations: Counter[str] = field(default_factory=Counter)  # reason of the order -> how many
    failed: Counter[str] = field(default_factory=Counter)  # why it failed -> how many
    kv_bytes: int = 0
    stops_s: list[float] = field(default_factory=list)
    reprefill_tokens: int = 0  # of prompts and answers begun again though no engine was lost, or moved bare
    _reasons: dict[RequestId, str] = field(default_factory=dict)  # of moves under way
    _owners: dict[RequestId, int] = field(default_factory=dict)
    _lengths: dict[RequestId, int] = field(default_factory=dict)  # of answers, as last told

    def hear(self, event: Event | None, orders: Sequence[Action]) -> None:
        """Take in one fact and the orders it caused."""
        match event:
            case Migrated():
                self._moved(event)
            case MigrationFailed(request, _, _, reason):
                self.failed[reason] += 1
                self._reasons.pop(request, None)
            case Progressed(_, lengths):
                self._lengths.update(lengths)
            case RequestFinished(_, request) | RequestFailed(_, request):
                self._forget(request)
            case RequestsAborted(_, requests):
                for request in requests:
                    self._forget(request)
            case Resumed():
                for kept in (self._owners, self._lengths, self._reasons):
                    kept.clear()
            case EngineLost(engine):
                for request in [r for r, owner in self._owners.items() if owner == engine]:
                    self._forget(request)
            case _:
                pass
        for order in orders:
            if isinstance(order, Migrate):
                self._reasons[order.request] = order.reason
            elif isinstance(order, Generate):
                self._generate(order)

    def stop_percentile(self, share: float) -> float | None:
        """Seconds without a token that `share` of the moved requests do not exceed; None without any."""
        return percentile(self.stops_s, share) if self.stops_s else None

    def _moved(self, fact: Migrated) -> None:
        self.migrations[self._reasons.pop(fact.request, "unknown")] += 1
        self.kv_bytes += fact.num_bytes
        self.reprefill_tokens += fact.num_prefilled
        if fact.num_bytes or fact.num_prefilled:  # else the destination died before it could tell
            self.stops_s.append(fact.stop_s)
        self._owners[fact.request] = fact.destination

    def _generate(self, order: Generate) -> None:
        for request in order.requests:
            if request in self._owners:
                self.reprefill_tokens += self.prompt_length(request.group) + self._lengths.get(request, 0)
            self._owners[request] = order.engine

    def _forget(self, request: RequestId) -> None:
        self._owners.pop(request, None)
        self._lengths.pop(request, None)
