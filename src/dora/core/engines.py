"""One rollout engine as the orchestrator knows it.

A `Post` is what the state's indexes say of an engine; `State.touch` keeps the two in step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from dora.core.ranking import Key
from dora.core.records import RequestId


@dataclass(slots=True)
class Engine:
    """One rollout instance."""

    id: int
    rows: int
    slots: int
    is_colocated: bool = False
    held: set[int] = field(default_factory=set)  # versions ready to decode
    loading: int | None = None
    load_since_s: float = 0.0
    wanted: int | None = None  # to be loaded as soon as a slot is free
    skipped: int | None = None  # the newest version that it leaves out, unless the bound asks for it
    clearing: int | None = None  # gets nothing new, for its slot is needed for `wanted`
    is_leaving: bool = False
    is_dismissed: bool = False
    is_pausing: bool = False
    is_paused: bool = False
    rushing: tuple[RequestId, ...] = ()  # the only rows it was told to decode
    requests: dict[RequestId, int] = field(default_factory=dict)  # running -> version
    arriving: dict[RequestId, int] = field(default_factory=dict)  # moves to here under way
    aborting: dict[RequestId, int] = field(default_factory=dict)  # they keep their row until confirmed
    running: Counter[int] = field(default_factory=Counter)  # version -> rows it occupies
    kv_tokens: Counter[int] = field(default_factory=Counter)  # version -> tokens of running requests
    row_tokens_per_s: float = 0.0  # 0: not measured yet
    kv_share: float = 0.0
    lag: int = 0  # doublings by which it is slower than the fastest

    @property
    def free_rows(self) -> int:
        return self.rows - len(self.requests) - len(self.arriving) - len(self.aborting)

    @property
    def is_working(self) -> bool:
        """Takes requests: neither on its way out nor standing still for the trainer."""
        return not (self.is_leaving or self.is_pausing or self.is_paused)

    @property
    def top(self) -> int:
        """The newest version it holds or is to hold; -1 without any."""
        newest = max(self.held, default=-1)
        for coming in (self.loading, self.wanted):
            if coming is not None and coming > newest:
                newest = coming
        return newest

    def kv_share_of(self, version: int) -> float:
        """What of its KV is that of one version's requests."""
        tokens = self.kv_tokens.total()
        return self.kv_share * self.kv_tokens[version] / tokens if tokens else 0.0

    def is_open(self, version: int) -> bool:
        """Whether it may get new requests of `version`, rows permitting."""
        return self.is_working and version in self.held and version != self.clearing

    @property
    def is_empty(self) -> bool:
        return not (self.requests or self.arriving or self.aborting)


class Post(NamedTuple):
    """What the indexes say of one engine."""

    held: frozenset[int]
    idle: frozenset[int]  # held and not decoded
    coming: frozenset[int]  # loading or wanted
    open: dict[int, Key]  # version -> rank among its takers
    top: int
    fresh_rows: int


NOWHERE = Post(frozenset(), frozenset(), frozenset(), {}, -1, 0)


def post_of(engine: Engine) -> Post:
    """What the indexes should say of an engine now.

    Requests that wait already may also go to an engine that clears their version, but there last.
    Slower engines get them after faster ones. Engines that decode older versions beside it get them after the
    others, for the fewer rows an engine decodes the faster are those that are nearer their deadline.
    """
    free, top = engine.free_rows, engine.top
    held = frozenset() if engine.is_leaving else frozenset(engine.held)
    idle = frozenset(v for v in held if not engine.running.get(v))
    coming = frozenset(v for v in (engine.loading, engine.wanted) if v is not None)
    is_taker = engine.is_working and free > 0
    takes: dict[int, Key] = {}
    if is_taker:
        oldest = min((v for v, num in engine.running.items() if num), default=top)
        takes = {v: (int(v == engine.clearing), engine.lag, int(oldest < v), -free) for v in engine.held}
    fresh = free if is_taker and engine.is_open(top) else 0
    return Post(held, idle, coming, takes, top, fresh)
