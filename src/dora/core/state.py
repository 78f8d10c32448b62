"""The orchestrator's state: groups, requests, engines, versions and batches, as plain records.

Code that changes an engine calls `State.mark_dirty`, which keeps the indexes current.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dora.core.costs import MeasuredCosts
from dora.core.index import NO_ROWS, Cohort, Indexes, RowEntry, SortKey, VersionEntry, decrement
from dora.core.staleness import AdaptiveStaleness, Divergence
from dora.core.types import BatchMember, GroupId, Limits, RequestId


@dataclass(slots=True)
class GroupRecord:
    """A group from its admission until it is trained, filtered or failed; version and deadline are fixed."""

    id: GroupId
    index: int  # position in the dataset's order
    version: int
    deadline: int
    unfinished: set[RequestId]
    is_scored: bool = False
    finished_tokens: int = 0  # of all finished siblings
    longest_tokens: int = 0  # of the longest finished sibling

    @property
    def cohort(self) -> Cohort:
        return Cohort(self.deadline, self.version)


@dataclass(slots=True)
class RequestRecord:
    """An unfinished request; `engine` is None while it waits for a row."""

    id: RequestId
    version: int
    engine: int | None = None
    num_tokens: int = 0  # as last reported
    num_kept: int = 0  # tokens kept when it lost its engine, until the next one reports tokens
    migration_failed_s: float = 0.0  # time of its last failed migration; 0: none
    num_retries: int = 0  # after failures of its environment


class MigrationRecord(NamedTuple):
    """A migration in flight; its request may have finished meanwhile."""

    source: int
    destination: int
    version: int


@dataclass(slots=True)
class EvaluationRecord:
    """The evaluation of one version, from its publication until every prompt is scored or has failed.

    Its requests have no group: they are in no batch, have no deadline and are never trained.
    """

    version: int
    num_requests: int
    num_started: int = 0  # requests, in the order of their prompts
    num_unfinished: int = 0  # started requests that wait or run
    unfinished_prompts: dict[GroupId, int] = field(default_factory=dict)  # -> unfinished responses
    failed_prompts: set[GroupId] = field(default_factory=set)  # of these, those with a failed response
    scoring_prompts: set[GroupId] = field(default_factory=set)  # awaiting their score
    num_prompts_done: int = 0

    @property
    def num_not_started(self) -> int:
        return self.num_requests - self.num_started


@dataclass(slots=True)
class EngineRecord:
    """One rollout engine.

    A row is a place in its decode batch; every entry of `requests`, `incoming` and `aborting` uses one.
    Requests beyond the rows wait in the engine's own queue.
    """

    id: int
    num_rows: int
    num_slots: int  # versions it can hold
    num_queued: int = 0  # requests that it may have beyond its rows
    is_colocated: bool = False  # on the trainer's device
    loaded: set[int] = field(default_factory=set)  # versions ready to decode
    loading: int | None = None
    load_started_s: float = 0.0
    next_load: int | None = None  # version to load as soon as a slot is free
    skipped_version: int | None = None  # newest version that it skips, unless the bound requires a load
    evicting: int | None = None  # gets no new requests: its slot is needed for `next_load`
    is_draining: bool = False
    is_removing: bool = False  # RemoveEngine was sent
    is_pausing: bool = False
    is_paused: bool = False
    decode_only: tuple[RequestId, ...] = ()  # of the last DecodeOnly
    requests: dict[RequestId, int] = field(default_factory=dict)  # running -> version
    incoming: dict[RequestId, int] = field(default_factory=dict)  # migrating to here -> version
    aborting: dict[RequestId, int] = field(default_factory=dict)  # abort not confirmed -> version
    rows_by_version: Counter[int] = field(default_factory=Counter)  # rows in use
    kv_tokens: Counter[int] = field(default_factory=Counter)  # version -> tokens of running requests
    row_tokens_per_s: float = 0.0  # 0: not measured yet
    kv_usage: float = 0.0  # fraction of its KV blocks in use
    lag: int = 0  # log2 of how much slower it is than the fastest engine, rounded down

    @property
    def free_rows(self) -> int:
        """Below 0: so many requests are queued."""
        return self.num_rows - len(self.requests) - len(self.incoming) - len(self.aborting)

    @property
    def free_places(self) -> int:
        """How many new requests it can get: free rows and places in its queue."""
        return self.free_rows + self.num_queued

    @property
    def is_empty(self) -> bool:
        return not (self.requests or self.incoming or self.aborting)

    @property
    def is_active(self) -> bool:
        """Whether it accepts requests: neither draining nor paused for the trainer."""
        return not (self.is_draining or self.is_pausing or self.is_paused)

    @property
    def newest_version(self) -> int:
        """The newest version that is loaded, loading or next to load; -1 without any."""
        newest = max(self.loaded, default=-1)
        if self.loading is not None and self.loading > newest:
            newest = self.loading
        if self.next_load is not None and self.next_load > newest:
            newest = self.next_load
        return newest

    def is_accepting(self, version: int) -> bool:
        """Whether it may get new requests of `version`, if rows are free."""
        return self.is_active and version in self.loaded and version != self.evicting

    def kv_usage_of(self, version: int) -> float:
        """The fraction of its KV that one version's requests use."""
        num_tokens = self.kv_tokens.total()
        return self.kv_usage * self.kv_tokens[version] / num_tokens if num_tokens else 0.0


def version_entry(engine: EngineRecord) -> VersionEntry:
    """The engine's entry in the indexes by version."""
    loaded = frozenset() if engine.is_draining else frozenset(engine.loaded)
    idle = loaded.difference(engine.rows_by_version)
    return VersionEntry(loaded, idle, engine.loading, engine.next_load, engine.lag)


def row_entry(engine: EngineRecord) -> RowEntry:
    """The engine's entry in the indexes by free places.

    Order among the engines available for a version: engines that evict it last; faster before slower; engines
    that decode older versions after the others, since fewer rows speed up requests near their deadline; then
    the most free places first.
    """
    free = engine.free_places
    if free <= 0 or not engine.is_active:
        return NO_ROWS
    newest, evicting, lag = engine.newest_version, engine.evicting, engine.lag
    oldest = min(engine.rows_by_version, default=newest)
    priorities: dict[int, SortKey] = {
        v: (int(v == evicting), lag, int(oldest < v), -free) for v in engine.loaded
    }
    return RowEntry(priorities, newest, free if engine.is_accepting(newest) else 0)


@dataclass(slots=True)
class State(Indexes):
    """The whole state of a run. Versions, steps and engines are integers; times are in seconds."""

    limits: Limits
    now_s: float = 0.0  # of the last event
    # dataset
    prompts: deque[tuple[int, GroupId]] = field(default_factory=deque)  # fetched, not admitted: (index, id)
    num_fetching: int = 0
    next_index: int = 0  # position of the next prompt to arrive
    skipped_until: dict[int, int] = field(default_factory=dict)  # row -> last epoch in which it is skipped
    # rollout
    groups: dict[GroupId, GroupRecord] = field(default_factory=dict)  # admitted, not trained or ended
    requests: dict[RequestId, RequestRecord] = field(default_factory=dict)  # unfinished
    waiting: dict[int, OrderedDict[RequestId, None]] = field(default_factory=dict)  # version -> without a row
    engines: dict[int, EngineRecord] = field(default_factory=dict)
    colocated: dict[int, None] = field(default_factory=dict)  # engines on the trainer's device
    draining: dict[int, None] = field(default_factory=dict)  # engines
    migrations: dict[RequestId, MigrationRecord] = field(default_factory=dict)  # in flight
    costs: MeasuredCosts = field(default_factory=MeasuredCosts)
    is_rebalance_due: bool = False
    last_rebalance_s: float = 0.0
    # staleness bound
    num_open: Counter[int] = field(default_factory=Counter)  # deadline -> groups not committed or ended
    num_unfinished: Counter[int] = field(default_factory=Counter)  # version -> requests (these pin it)
    admission_version: int | None = None  # of the last admission
    num_admitted_at_version: int = 0  # groups at it, without filtered and failed ones
    adaptive_staleness: AdaptiveStaleness = field(default_factory=AdaptiveStaleness)
    divergence: Divergence = field(default_factory=Divergence)
    # batches
    ready_groups: list[tuple[int, int, GroupId]] = field(default_factory=list)  # (deadline, index, id)
    next_step: int = 0  # n, the next step whose batch is incomplete
    committed: list[GroupId] = field(default_factory=list)  # to step n; c = len(committed)
    batches: dict[int, tuple[GroupId, ...]] = field(default_factory=dict)  # complete, not trained; by step
    training_step: int | None = None
    is_trainer_lost: bool = False
    redo_batches: dict[int, tuple[GroupId, ...]] = field(default_factory=dict)  # steps a new trainer repeats
    # versions
    newest_published: int | None = None
    publishing_version: int | None = None
    stored_versions: dict[int, str] = field(default_factory=dict)  # in the weight store -> digest
    is_newest_needed: bool = False  # nothing can be admitted at the loaded versions
    rebalanced_for: tuple[int, int] | None = None  # ... at the last rebalance: (newest loaded, published)
    load_queue: dict[int, None] = field(default_factory=dict)  # engines that wait for their turn to load
    redo_until_version: int = 0  # no admission before this version is published (again)
    evaluation: EvaluationRecord | None = None  # running
    last_evaluated: int = -1  # newest version whose evaluation was started or skipped
    # stalls: the idle trainer waits for a group at its deadline
    stall_group: GroupId | None = None
    stall_since_s: float = 0.0
    stall_s: float = 0.0  # sum of past stalls
    is_stall_reported: bool = False
    is_decoding_stragglers_only: bool = False
    # totals
    num_admitted: int = 0
    num_skipped: int = 0  # prompts
    num_trained: int = 0
    num_filtered: int = 0
    num_failed: int = 0
    num_retries: int = 0  # of requests
    num_regenerated_tokens: int = 0
    num_kept_tokens: int = 0  # of requests of lost engines
    num_aborted_tokens: int = 0
    is_stopped: bool = False

    # requests

    def assign(self, request: RequestId, engine: EngineRecord, version: int) -> None:
        """Run the request on the engine."""
        record = self.requests[request]
        record.engine = engine.id
        engine.requests[request] = version
        engine.rows_by_version[version] += 1
        engine.kv_tokens[version] += record.num_tokens

    def release(self, request: RequestId, engine: EngineRecord) -> int:
        """Take a running request off the engine; returns its version."""
        version = engine.requests.pop(request)
        engine.kv_tokens[version] -= self.requests[request].num_tokens
        decrement(engine.rows_by_version, version)
        return version

    def enqueue(self, request: RequestId, version: int) -> None:
        """Let the request wait for a row, after all others of its version."""
        self.waiting.setdefault(version, OrderedDict())[request] = None

    def enqueue_first(self, request: RequestId, version: int) -> None:
        """Let the request wait for a row, before all others of its version."""
        queue = self.waiting.setdefault(version, OrderedDict())
        queue[request] = None
        queue.move_to_end(request, last=False)

    def dequeue(self, request: RequestId, version: int) -> None:
        queue = self.waiting[version]
        del queue[request]
        if not queue:
            self.remove_queue(version)

    def remove_queue(self, version: int) -> None:
        """Remove an empty queue: engines may now drop `version`, the newest only for another one."""
        del self.waiting[version]
        if version != self.newest_published or self.pending_holders.keys() - {version}:
            self.mark_idle_holders(version)

    def num_waiting(self, version: int) -> int:
        return len(self.waiting.get(version, ()))

    # engines

    def add_engine(self, engine: EngineRecord) -> None:
        self.engines[engine.id] = engine
        self.num_rows += engine.num_rows
        if engine.is_colocated:
            self.colocated[engine.id] = None
        self.mark_dirty(engine)

    def remove_engine(self, engine: EngineRecord) -> None:
        del self.engines[engine.id]
        self.num_rows -= engine.num_rows
        self.unindex(engine.id)
        for engines in (
            self.colocated, self.draining, self.load_queue, self.load_candidates, self.dirty_engines,
        ):  # fmt: skip
            engines.pop(engine.id, None)

    def restart_requests(self, engine: EngineRecord, kept_tokens: Mapping[RequestId, int]) -> None:
        """Let the requests of a lost engine start again on their version, before all that wait for it."""
        for request_id in reversed(engine.requests):
            self.restart_request(self.requests[request_id], kept_tokens.get(request_id, 0))

    def restart_request(self, request: RequestRecord, num_kept: int = 0) -> None:
        """Let a request that no engine runs any more start again on its version, before all that wait."""
        self.count_kept(request, num_kept)
        request.engine, request.num_tokens = None, 0
        self.enqueue_first(request.id, request.version)

    def count_kept(self, request: RequestRecord, num_kept: int) -> None:
        """A request keeps so many tokens, and generates again what was reported or counted beyond them."""
        self.num_kept_tokens += num_kept - request.num_kept
        self.num_regenerated_tokens += max(0, max(request.num_tokens, request.num_kept) - num_kept)
        request.num_kept = num_kept

    def mark_dirty(self, engine: EngineRecord) -> None:
        """Reindex an engine that has changed, so that the rules examine it."""
        if (entry := version_entry(engine)) != self.version_entries.get(engine.id):
            for version in self.index_versions(engine.id, entry):
                self.mark_idle_holders(version)  # another holder is no longer the last copy, or the fastest
        self.mark_rows_dirty(engine)

    def mark_rows_dirty(self, engine: EngineRecord) -> None:
        """`mark_dirty` for a change of its rows that leaves the set of decoded versions as it was."""
        number = engine.id
        self.load_candidates[number] = self.dirty_engines[number] = None
        self.index_rows(number, row_entry(engine))

    def mark_idle_holders(self, version: int) -> None:
        """Let engines reconsider `version`: those that hold it idle may drop it, others need not load it."""
        self.load_candidates.update(self.idle_holders.get(version, {}))
        if version != self.newest_published:  # the newest is always worth loading
            self.load_candidates.update(self.pending_holders.get(version, {}))

    def can_receive(self, engine: EngineRecord, version: int) -> bool:
        """Whether a running request of `version` may migrate to the engine: it needs a free row.

        Excludes engines short of KV, and colocated engines unless all are: these pause for every step.
        """
        has_room = engine.free_rows > 0 and engine.kv_usage < self.limits.kv_watermark
        is_fallback = engine.is_colocated and len(self.colocated) < len(self.engines)
        return has_room and engine.is_accepting(version) and not is_fallback

    @property
    def is_device_free(self) -> bool:
        """Whether no engine decodes on the trainer's device."""
        engines = (self.engines[engine] for engine in self.colocated)
        return all(engine.is_paused or engine.is_removing for engine in engines)

    # versions

    def pin(self, version: int, num_requests: int) -> None:
        """Count new unfinished requests of `version`."""
        self.num_unfinished[version] += num_requests

    def unpin(self, version: int) -> None:
        """Count one unfinished request of `version` less."""
        decrement(self.num_unfinished, version)
        if version not in self.num_unfinished:
            self.mark_idle_holders(version)

    def is_pinned(self, version: int) -> bool:
        """Whether `version` has unfinished requests."""
        return self.num_unfinished[version] > 0

    def is_evaluation_only(self, version: int) -> bool:
        """Whether all unfinished requests of `version` are held-out ones."""
        evaluation = self.evaluation
        return (
            evaluation is not None
            and evaluation.version == version
            and self.num_unfinished[version] == evaluation.num_unfinished
        )

    @property
    def is_redoing_steps(self) -> bool:
        """Whether steps trained before a crash of the whole run are still to be repeated."""
        return self.newest_published is None or self.newest_published < self.redo_until_version

    @property
    def is_training_done(self) -> bool:
        """Whether the last step is trained; an evaluation may still be running."""
        return self.newest_published == self.limits.num_steps

    @property
    def is_only_evaluating(self) -> bool:
        """Whether the evaluation of version 0 runs, for which training waits, or one after the last step."""
        return self.evaluation is not None and (self.evaluation.version == 0 or self.is_training_done)

    # groups

    def batch_members(self, step: int) -> tuple[BatchMember, ...]:
        """The groups of a complete batch that is not trained, as `Resumed` repeats them."""
        groups = [self.groups[group] for group in self.batches[step]]
        return tuple(BatchMember(g.id, g.index, g.version) for g in groups)

    def close_group(self, group: GroupRecord) -> None:
        """The group is no longer open: it is committed or has ended."""
        decrement(self.num_open, group.deadline)
        self.admissible_cache.clear()
        self.remove_unscored(group)

    def remove_unscored(self, group: GroupRecord) -> None:
        """The group is scored or has ended."""
        groups = self.unscored.get(group.cohort, {})
        groups.pop(group.id, None)
        if not groups:
            self.unscored.pop(group.cohort, None)

    def rebuild_indexes(self, engines: dict[int, EngineRecord]) -> None:
        """Add `engines` and rebuild all indexes; `groups` must be complete."""
        for engine in engines.values():
            self.add_engine(engine)
            if engine.is_draining:
                self.draining[engine.id] = None
        for group in sorted(self.groups.values(), key=lambda g: g.index):
            if not group.is_scored:
                self.unscored.setdefault(group.cohort, {})[group.id] = None
        self.dirty_engines.clear()  # the last event before the snapshot was handled
