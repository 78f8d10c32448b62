"""One rollout engine as the orchestrator knows it.

Its `Post` and its `Room` are what the state's indexes say of it; `State.touch` keeps them in step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
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
        if self.loading is not None and self.loading > newest:
            newest = self.loading
        if self.wanted is not None and self.wanted > newest:
            newest = self.wanted
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
    """What the indexes say of an engine's versions and pace, which change seldom."""

    held: frozenset[int]
    idle: frozenset[int]  # held and not decoded
    loading: int | None
    wanted: int | None
    lag: int

    @property
    def coming(self) -> Set[int]:
        return {v for v in (self.loading, self.wanted) if v is not None}


class Room(NamedTuple):
    """What they say of its free rows, which change with most facts."""

    ranks: dict[int, Key]  # version -> rank among its takers
    top: int
    fresh_rows: int  # for groups of version `top`


NOWHERE = Post(frozenset(), frozenset(), None, None, 0)
NO_ROOM = Room({}, -1, 0)


def post_of(engine: Engine) -> Post:
    held = frozenset() if engine.is_leaving else frozenset(engine.held)
    return Post(held, held.difference(engine.running), engine.loading, engine.wanted, engine.lag)


def room_of(engine: Engine) -> Room:
    """Requests that wait already may also go to an engine that clears their version, but there last.

    Slower engines get them after faster ones. Engines that decode older versions beside it get them after the
    others, for the fewer rows an engine decodes the faster are those that are nearer their deadline.
    """
    free = engine.free_rows
    if free <= 0 or not engine.is_working:
        return NO_ROOM
    top, clearing, lag = engine.top, engine.clearing, engine.lag
    oldest = min(engine.running, default=top)
    ranks: dict[int, Key] = {v: (int(v == clearing), lag, int(oldest < v), -free) for v in engine.held}
    return Room(ranks, top, free if engine.is_open(top) else 0)
