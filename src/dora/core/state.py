"""Everything the orchestrator knows, in plain printable records.

Counts are kept beside the sets they count, so that no rule scans all groups or requests;
`invariants.check` recounts them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from dora.core.records import GroupId, Limits, RequestId


@dataclass(slots=True)
class Group:
    """A group from its admission until it is trained, filtered or failed."""

    id: GroupId
    index: int  # position in the dataset's order
    version: int
    deadline: int
    unfinished: set[RequestId]
    scored: bool = False


@dataclass(slots=True)
class Request:
    """An unfinished sibling; `engine` is None while it waits for a row."""

    id: RequestId
    version: int
    engine: int | None = None
    num_tokens: int = 0  # as last reported


@dataclass(slots=True)
class Engine:
    """One rollout instance."""

    id: int
    rows: int
    slots: int
    held: set[int] = field(default_factory=set)  # versions ready to decode
    loading: int | None = None
    draining_for: int | None = None  # admits nothing until a slot is free for this version
    requests: dict[RequestId, int] = field(default_factory=dict)  # running -> version
    aborting: dict[RequestId, int] = field(default_factory=dict)  # they keep their row until confirmed
    running: Counter[int] = field(default_factory=Counter)  # version -> rows it occupies

    @property
    def free_rows(self) -> int:
        return self.rows - len(self.requests) - len(self.aborting)


@dataclass(slots=True)
class State:
    """The whole state of a run."""

    limits: Limits
    # dataset
    prompts: deque[tuple[int, GroupId]] = field(default_factory=deque)  # fetched, not admitted
    num_fetching: int = 0
    next_index: int = 0  # position the next fetched prompt must have
    # rollout
    groups: dict[GroupId, Group] = field(default_factory=dict)  # admitted, not yet at their end
    requests: dict[RequestId, Request] = field(default_factory=dict)  # unfinished
    waiting: dict[int, deque[RequestId]] = field(default_factory=dict)  # version -> not on an engine
    engines: dict[int, Engine] = field(default_factory=dict)
    # the bound
    open: Counter[int] = field(default_factory=Counter)  # deadline -> admitted, not committed or ended
    unfinished: Counter[int] = field(default_factory=Counter)  # version -> unfinished requests (pins it)
    # batches
    ready: list[tuple[int, int, GroupId]] = field(default_factory=list)  # scored: (deadline, index, id)
    next_step: int = 0  # n, the next step whose batch is incomplete
    committed: list[GroupId] = field(default_factory=list)  # to step n; c = len(committed)
    batches: dict[int, tuple[GroupId, ...]] = field(default_factory=dict)  # complete, not yet trained
    training: int | None = None
    # versions
    newest: int | None = None  # newest published
    publishing: int | None = None
    store: dict[int, str] = field(default_factory=dict)  # published and not retired -> digest
    # waiting of the trainer
    stall_group: GroupId | None = None
    stall_since_s: float = 0.0
    stall_s: float = 0.0  # closed waits, summed
    is_stall_reported: bool = False
    # ledger
    num_admitted: int = 0
    num_trained: int = 0
    num_filtered: int = 0
    num_failed: int = 0
    num_regenerated_tokens: int = 0
    num_aborted_tokens: int = 0
    stopped: bool = False

    def holders(self, version: int) -> list[Engine]:
        return [e for e in self.engines.values() if version in e.held]

    def close(self, deadline: int) -> None:
        """One group less is open at `deadline`."""
        take_one(self.open, deadline)

    def is_pinned(self, version: int) -> bool:
        """A version is pinned while it has unfinished requests, and only then."""
        return self.unfinished[version] > 0


def take_one(counts: Counter[int], key: int) -> None:
    """Count one less, and forget a key that has none left: a run has as many versions as steps."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def bound_holds(opened: Counter[int], next_step: int, num_committed: int, limits: Limits) -> bool:
    """The bound of docs/bound.md: every open group can still be trained by its deadline.

    For every d: #{open groups with deadline <= d} <= max(0, P * (d - n + 1) - c).
    Only deadlines that occur need checking, for the left side grows nowhere else.
    """
    count = 0
    for deadline in sorted(opened):
        count += opened[deadline]
        if count > max(0, limits.batch_size * (deadline - next_step + 1) - num_committed):
            return False
    return True
