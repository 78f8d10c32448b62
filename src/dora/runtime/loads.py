"""What bringing versions to engines cost: how many loads, how many were left out, who stood still for them.

Counted from facts and orders alone, as the journal has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dora.core.actions import Action, Load, Skip
from dora.core.events import Event, Loaded, Resumed


@dataclass
class Loads:
    """Sums over a run; times in seconds."""

    num: int = 0
    num_left_out: int = 0  # and not loaded later, because the bound asked
    load_s: float = 0.0  # from order to fact
    stop_s: float = 0.0  # of that, an engine's requests stood still
    _since_s: dict[int, float] = field(default_factory=dict)  # engine -> when its load was ordered
    _left_out: dict[int, int] = field(default_factory=dict)  # engine -> version

    def hear(self, now: float, event: Event | None, orders: Sequence[Action]) -> None:
        """Take in one fact and the orders it caused."""
        if isinstance(event, Loaded):
            self.num += 1
            self.load_s += now - self._since_s.pop(event.engine, now)
            self.stop_s += event.stop_s
        elif isinstance(event, Resumed):
            self._since_s.clear()
            self._left_out.clear()
        for order in orders:
            if isinstance(order, Load):
                self._since_s[order.engine] = now
                self.num_left_out -= self._left_out.pop(order.engine, None) == order.version
            elif isinstance(order, Skip):
                self._left_out[order.engine] = order.version
                self.num_left_out += 1

    def to_json(self) -> dict[str, Any]:
        """What the summary says of it."""
        return {
            "weight_loads": self.num,
            "weight_loads_left_out": self.num_left_out,
            "weight_load_s": round(self.load_s, 4),
            "weight_load_stop_s": round(self.stop_s, 4),
        }
