"""Everything the orchestrator knows, in plain printable records.

Whoever changes an engine calls `touch`, which keeps the indexes right.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from dora.core.aging import Aging
from dora.core.costs import Costs
from dora.core.divergence import Divergence
from dora.core.engines import Engine, post_of, room_of
from dora.core.group import Group
from dora.core.held_out import Evaluation
from dora.core.indexes import Indexes, take_one
from dora.core.records import GroupId, Limits, RequestId


@dataclass(slots=True)
class Request:
    """An unfinished sibling; `engine` is None while it waits for a row."""

    id: RequestId
    version: int
    engine: int | None = None
    num_tokens: int = 0  # as last reported
    stuck_s: float = 0.0  # when a move of it failed last; 0: none has


class Move(NamedTuple):
    """A migration under way; its request may have come to its end meanwhile."""

    source: int
    destination: int
    version: int


@dataclass(slots=True)
class State(Indexes):
    """The whole state of a run."""

    limits: Limits
    now_s: float = 0.0  # of the last fact
    # dataset
    prompts: deque[tuple[int, GroupId]] = field(default_factory=deque)  # fetched, not admitted
    num_fetching: int = 0
    next_index: int = 0  # position the next fetched prompt must have
    # rollout
    groups: dict[GroupId, Group] = field(default_factory=dict)  # admitted, not yet at their end
    requests: dict[RequestId, Request] = field(default_factory=dict)  # unfinished
    waiting: dict[int, OrderedDict[RequestId, None]] = field(default_factory=dict)  # version -> no engine yet
    engines: dict[int, Engine] = field(default_factory=dict)
    colocated: dict[int, None] = field(default_factory=dict)  # engines on the trainer's device
    leaving: dict[int, None] = field(default_factory=dict)  # engines that were asked to leave
    moves: dict[RequestId, Move] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    is_rebalance_due: bool = False
    rebalanced_s: float = 0.0
    # the bound
    open: Counter[int] = field(default_factory=Counter)  # deadline -> admitted, not committed or ended
    unfinished: Counter[int] = field(default_factory=Counter)  # version -> unfinished requests (pins it)
    current: int | None = None  # version of the last admission
    num_admitted_current: int = 0  # groups at it, without those filtered or failed
    aging: Aging = field(default_factory=Aging)  # how far S is lowered for what is admitted now
    divergence: Divergence = field(default_factory=Divergence)  # of versions from the one in training
    # batches
    ready: list[tuple[int, int, GroupId]] = field(default_factory=list)  # scored: (deadline, index, id)
    next_step: int = 0  # n, the next step whose batch is incomplete
    committed: list[GroupId] = field(default_factory=list)  # to step n; c = len(committed)
    batches: dict[int, tuple[GroupId, ...]] = field(default_factory=dict)  # complete, not yet trained
    training: int | None = None
    is_trainer_lost: bool = False  # and not replaced yet
    redo: dict[int, tuple[GroupId, ...]] = field(default_factory=dict)  # steps the new one has to come to
    # versions
    newest: int | None = None  # newest published
    publishing: int | None = None
    is_newest_asked: bool = False  # what engines hold may not be admitted at any more
    asked_for: tuple[int, int] | None = None  # (newest held, newest) when shares were last asked to follow
    store: dict[int, str] = field(default_factory=dict)  # published and not retired -> digest
    line: dict[int, None] = field(default_factory=dict)  # engines that wait for their turn to load
    redo_until: int = 0  # nothing is admitted before this version is published (again)
    evaluation: Evaluation | None = None  # under way
    evaluated: int = 0  # newest version that was due for one
    # waiting of the trainer
    stall_group: GroupId | None = None
    stall_since_s: float = 0.0
    stall_s: float = 0.0  # closed waits, summed
    is_stall_reported: bool = False
    is_rushing: bool = False  # engines were told to decode what the trainer waits for
    # ledger
    num_admitted: int = 0
    num_trained: int = 0
    num_filtered: int = 0
    num_failed: int = 0
    num_regenerated_tokens: int = 0
    num_aborted_tokens: int = 0
    stopped: bool = False

    def seat(self, request: RequestId, engine: Engine, version: int) -> None:
        """The request runs on the engine from now on."""
        record = self.requests[request]
        record.engine = engine.id
        engine.requests[request] = version
        engine.running[version] += 1
        engine.kv_tokens[version] += record.num_tokens

    def unseat(self, request: RequestId, engine: Engine) -> int:
        """The request runs there no more; returns its version. Its row may still be in use."""
        version = engine.requests.pop(request)
        engine.kv_tokens[version] -= self.requests[request].num_tokens
        take_one(engine.running, version)
        return version

    def touch(self, engine: Engine) -> None:
        """Keep the indexes right after `engine` has changed."""
        if (post := post_of(engine)) != self.posts.get(engine.id):  # which changes seldom
            for version in self.enter_post(engine.id, post):
                self.touch_idle(version)  # no other holder is the last copy, or the fastest
        self.touch_rows(engine)

    def touch_rows(self, engine: Engine) -> None:
        """As `touch`, where only its rows have changed, not which versions it decodes."""
        number = engine.id
        self.touched[number] = self.changed[number] = None
        self.enter_room(number, room_of(engine))

    def add(self, engine: Engine) -> None:
        self.engines[engine.id] = engine
        self.num_rows += engine.rows
        if engine.is_colocated:
            self.colocated[engine.id] = None
        self.touch(engine)

    def restore(self, engines: dict[int, Engine]) -> None:
        """Take over engines, and count the indexes anew; `groups` must be there."""
        for engine in engines.values():
            self.add(engine)
            if engine.is_leaving:
                self.leaving[engine.id] = None
        for group in sorted(self.groups.values(), key=lambda g: g.index):
            if not group.scored:
                self.unscored.setdefault(group.term, {})[group.id] = None
        self.changed.clear()  # the last fact of their former life has been answered

    def remove(self, engine: Engine) -> None:
        del self.engines[engine.id]
        self.num_rows -= engine.rows
        self.forget(engine.id)
        for index in (self.colocated, self.leaving, self.line, self.touched, self.changed):
            index.pop(engine.id, None)

    def touch_idle(self, version: int) -> None:
        """Engines may drop `version`, or want it no more, though they have not changed."""
        self.touched.update(self.idle.get(version, {}))
        if version != self.newest:  # the newest is always wanted
            self.touched.update(self.coming.get(version, {}))

    def pin(self, version: int, num_requests: int) -> None:
        self.unfinished[version] += num_requests

    def unpin(self, version: int) -> None:
        """One request of `version` less."""
        take_one(self.unfinished, version)
        if version not in self.unfinished:
            self.touch_idle(version)

    def close(self, group: Group) -> None:
        """The group is not open any more: it is committed or has ended."""
        take_one(self.open, group.deadline)
        self.admissible.clear()
        self.forget_unscored(group)

    def forget_unscored(self, group: Group) -> None:
        """The group has been scored, or has ended without."""
        groups = self.unscored.get(group.term, {})
        groups.pop(group.id, None)
        if not groups:
            self.unscored.pop(group.term, None)

    def may_receive(self, engine: Engine, version: int) -> bool:
        """Whether running requests of `version` may move there, rows permitting.

        Not to an engine short of KV, nor to one that is only lent by the trainer beside others.
        """
        is_roomy = engine.kv_share < self.limits.kv_watermark
        is_lent = engine.is_colocated and len(self.colocated) < len(self.engines)
        return is_roomy and engine.is_open(version) and not is_lent

    @property
    def is_device_free(self) -> bool:
        """Whether no engine decodes on the trainer's device."""
        engines = (self.engines[engine] for engine in self.colocated)
        return all(engine.is_paused or engine.is_dismissed for engine in engines)

    @property
    def is_redoing(self) -> bool:
        """Whether steps that were trained before are to be trained again."""
        return self.newest is None or self.newest < self.redo_until

    @property
    def is_trained(self) -> bool:
        """Whether the last step is trained: at most an evaluation is still under way."""
        return self.newest == self.limits.num_steps

    def is_only_evaluated(self, version: int) -> bool:
        """Whether all unfinished requests of `version` are held-out ones."""
        run = self.evaluation
        return run is not None and run.version == version and self.unfinished[version] == run.num_running

    def is_pinned(self, version: int) -> bool:
        """A version is pinned while it has unfinished requests, and only then."""
        return self.unfinished[version] > 0

    def wait(self, request: RequestId, version: int) -> None:
        """The request waits for a row, after all others of its version."""
        self.waiting.setdefault(version, OrderedDict())[request] = None

    def wait_first(self, request: RequestId, version: int) -> None:
        """The request waits for a row, before all others of its version."""
        waiting = self.waiting.setdefault(version, OrderedDict())
        waiting[request] = None
        waiting.move_to_end(request, last=False)

    def wait_no_more(self, request: RequestId, version: int) -> None:
        waiting = self.waiting[version]
        del waiting[request]
        if not waiting:
            self.forget_waiting(version)

    def forget_waiting(self, version: int) -> None:
        """Nobody waits for `version` any more, so engines may drop it, the newest only for another."""
        del self.waiting[version]
        if version != self.newest or self.coming.keys() - {version}:
            self.touch_idle(version)

    def num_waiting(self, version: int) -> int:
        return len(self.waiting.get(version, ()))
