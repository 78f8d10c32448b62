"""How groups ended and how long their answers were, from facts and orders.

Lengths are counted by end, so that it shows if what is trained is not as long as what is generated.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from dora.core.actions import Action, Admit, Fail, Filter, ReportStall, Train
from dora.core.events import Event, RequestFinished, Resumed, Trained
from dora.core.records import GroupId

ENDS = ("trained", "filtered", "failed", "pending")


@dataclass
class Groups:
    """Every group admitted, with its end and the lengths of its finished answers."""

    versions: dict[GroupId, int] = field(default_factory=dict)  # at which it was admitted
    ends: dict[GroupId, tuple[str, str]] = field(default_factory=dict)  # of those left out: how, why
    steps: dict[GroupId, int] = field(default_factory=dict)  # of those that were trained
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    stalled: dict[GroupId, float] = field(default_factory=dict)  # reported as waited for -> since
    finish_reasons: Counter[str] = field(default_factory=Counter)
    _batches: dict[int, tuple[GroupId, ...]] = field(default_factory=dict)
    _lengths: dict[GroupId, list[int]] = field(default_factory=dict)

    def hear(self, record: Event | Action) -> None:
        match record:
            case Admit(group, _, version):
                self.versions[group] = version
            case RequestFinished(_, request, _, num_tokens, _, reason) if not request.is_held_out:
                self._lengths.setdefault(request.group, []).append(num_tokens)
                self.finish_reasons[reason] += 1
            case Filter(group, reason) | Fail(group, reason):
                how = "filtered" if isinstance(record, Filter) else "failed"
                self.ends[group] = (how, reason)
                self.reasons[how, reason] += 1
            case Train(step, groups):
                self._batches[step] = groups
            case Trained(step):
                self.steps |= dict.fromkeys(self._batches[step], step)
            case Resumed(from_step):
                self.steps = {group: step for group, step in self.steps.items() if step < from_step}
            case ReportStall(_, group):
                self.stalled[group] = record.since_s
            case _:
                pass

    def end_of(self, group: GroupId) -> str:
        return "trained" if group in self.steps else self.ends.get(group, ("pending", ""))[0]

    def to_json(self, group_size: int) -> dict[str, Any]:
        """Groups by end, samples by staleness, answers by length and end."""
        staleness = Counter(step - self.versions[group] for group, step in self.steps.items())
        ends = Counter(map(self.end_of, self.versions))
        return {
            "num": len(self.versions),
            "ends": {end: ends[end] for end in ENDS},
            "reasons": [[how, why, num] for (how, why), num in self.reasons.most_common()],
            "finish_reasons": dict(self.finish_reasons.most_common()),
            "staleness": {str(s): num * group_size for s, num in sorted(staleness.items())},
            "lengths": self._by_length(),
        }

    def _by_length(self) -> dict[str, Any]:
        """Finished answers by length (tokens), in buckets that double every second time; `to` is included."""
        lengths: dict[str, list[int]] = {end: [] for end in ENDS}
        for group, own in self._lengths.items():
            lengths[self.end_of(group)] += own
        longest = max((max(own) for own in lengths.values() if own), default=0)
        uppers = _uppers(longest)
        counts = {end: [0] * len(uppers) for end in ENDS}
        for end, own in lengths.items():
            for length, num in Counter(own).items():
                counts[end][bisect.bisect_left(uppers, length)] += num
        every = sorted(length for own in lengths.values() for length in own)
        return {
            "to": uppers,
            "counts": counts,
            "generated": _shape(every),
            "trained": _shape(sorted(lengths["trained"])),
        }


def _uppers(longest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 11, 16, ... up to the first that is not below `longest`."""
    uppers = [0]
    while uppers[-1] < longest:
        uppers.append(next(n for k in count() if (n := round(2 ** (k / 2))) > uppers[-1]))
    return uppers


def _shape(lengths: list[int]) -> dict[str, float] | None:
    """Of sorted lengths."""
    if not lengths:
        return None
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    points = {
        name: lengths[min(len(lengths) - 1, int(share * len(lengths)))] for name, share in shares.items()
    }
    return {"num": len(lengths), "mean": round(sum(lengths) / len(lengths), 2), **points, "max": lengths[-1]}
