"""How long answers are: those generated, those trained, those left out.

What is left out because all its rewards are equal is seldom as long as the rest. A run that trains on
other lengths than it generates drifts without saying so; here it says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dora.core.actions import Action, Fail, Filter
from dora.core.events import Event, RequestFinished
from dora.core.records import GroupId

DRIFT_LIMIT = 0.1  # of the mean length, past which a run warns


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed. Raises IndexError for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Lengths:
    """Response tokens of the finished answers of a run, from its facts and orders."""

    def __init__(self) -> None:
        self.generated = Counter[int]()  # length -> answers
        self.trained = Counter[int]()
        self.filtered = Counter[int]()
        self._groups: dict[GroupId, list[RequestFinished]] = {}

    def hear(
        self, event: Event | None, orders: Sequence[Action], is_alive: Callable[[GroupId], bool]
    ) -> None:
        """Take in one fact and the orders it caused; of a group that has failed some answers come later."""
        if isinstance(event, RequestFinished) and not event.request.is_held_out:
            if is_alive(event.request.group):
                self._groups.setdefault(event.request.group, []).append(event)
            self.generated[event.num_tokens] += 1
        for order in orders:
            if isinstance(order, Filter):
                self.filtered.update(answer.num_tokens for answer in self._groups.pop(order.group))
            elif isinstance(order, Fail):
                self._groups.pop(order.group, None)

    def train(self, groups: Sequence[GroupId]) -> dict[str, float]:
        """A step has consumed these groups; its metrics, in tokens. clip_ratio: the share that was cut."""
        answers = [answer for group in groups for answer in self._groups.pop(group)]
        lengths = [answer.num_tokens for answer in answers]
        self.trained.update(lengths)
        return {
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/min": min(lengths),
            "response_length/max": max(lengths),
            "response_length/clip_ratio": sum(a.finish_reason == "length" for a in answers) / len(answers),
        }

    def drift(self) -> float | None:
        """Mean length trained over mean length generated, less 1; None where nothing was trained."""
        return _mean(self.trained) / _mean(self.generated) - 1 if self.trained.total() else None

    def to_json(self) -> dict[str, Any]:
        """What the summary says of lengths, in tokens."""
        drift = self.drift()
        return {
            "response_length_generated": _shape(self.generated),
            "response_length_trained": _shape(self.trained),
            "response_length_drift": None if drift is None else round(drift, 4),
            "filtered_samples_by_length": _by_length(self.filtered),
        }


def _mean(lengths: Counter[int]) -> float:
    return sum(length * num for length, num in lengths.items()) / lengths.total()


def _shape(lengths: Counter[int]) -> dict[str, float] | None:
    if not lengths:
        return None
    values = [*lengths.elements()]
    return {
        "mean": round(_mean(lengths), 2),
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }


def _by_length(lengths: Counter[int]) -> dict[str, int]:
    """Answers by length in powers of two: {"33-64": 7}."""
    buckets = Counter[int]()
    for length, num in lengths.items():
        buckets[max(0, length - 1).bit_length()] += num
    return {
        f"{2 ** (power - 1) + 1 if power else 0}-{2**power}": num for power, num in sorted(buckets.items())
    }
