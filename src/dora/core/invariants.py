"""Invariants of the state, recomputed from scratch after every event in tests and in the simulator."""

from __future__ import annotations

from collections import Counter
from math import inf

from dora.core.bound import bound_holds, num_admissible
from dora.core.state import State


def check(state: State) -> list[str]:
    """Descriptions of the broken invariants; empty if all hold."""
    return [
        *_check_bound(state),
        *_check_owners(state),
        *_check_migrations(state),
        *_check_versions(state),
        *_check_evaluation(state),
        *_check_groups(state),
        *_check_indexes(state),
    ]


def _check_bound(state: State) -> list[str]:
    broken = []
    if not bound_holds(state.num_open, state.next_step, len(state.committed), state.limits):
        broken.append(f"C3: too few places from step {state.next_step} on for {dict(state.num_open)}")
    if late := [g.id for g in state.groups.values() if g.deadline > state.limits.deadline(g.version)]:
        broken.append(f"C3: the deadlines of groups {late} exceed max_staleness")
    if not 0 <= state.adaptive_staleness.reduction <= state.limits.max_staleness:
        broken.append(f"C3: max_staleness is lowered by {state.adaptive_staleness.reduction}")
    if len(state.committed) >= state.limits.batch_size:
        broken.append(f"the batch of step {state.next_step} is complete and still open")
    return broken


def _check_owners(state: State) -> list[str]:
    """Every request is on one engine or in one queue, and the rows of each engine add up."""
    broken = []
    owned: Counter[object] = Counter()
    for engine in state.engines.values():
        owned.update(engine.requests.keys())
        if engine.free_places < 0:
            broken.append(f"engine {engine.id} has {-engine.free_places} more requests than places")
        rows = Counter(
            v for rows in (engine.requests, engine.incoming, engine.aborting) for v in rows.values()
        )
        if dict(rows) != dict(engine.rows_by_version):  # a key without rows would count as decoded
            broken.append(f"engine {engine.id}: rows_by_version is {engine.rows_by_version}, not {rows}")
        broken += [
            f"request {r} of version {v} runs on engine {engine.id}, which holds {sorted(engine.loaded)}"
            for r, v in engine.requests.items()
            if v not in engine.loaded
            or state.requests[r].engine != engine.id
            or state.requests[r].version != v
        ]
    for version, queue in state.waiting.items():
        owned.update(list(queue))
        broken += [
            f"request {r} waits for version {version}, not for its own"
            for r in queue
            if state.requests[r].version != version
        ]
    if owned.keys() != state.requests.keys() or any(n != 1 for n in owned.values()):
        broken.append("a request has no owner, or two")
    return broken


def _check_migrations(state: State) -> list[str]:
    """A migration has a source that owns the request and a reserved row at its destination."""
    broken = []
    for request, migration in state.migrations.items():
        destination = state.engines.get(migration.destination)
        if destination is None or destination.incoming.get(request) != migration.version:
            broken.append(f"request {request} has no row reserved on engine {migration.destination}")
        if migration.source not in state.engines:
            broken.append(f"request {request} migrates from engine {migration.source}, which does not exist")
        if request in state.requests and state.requests[request].engine != migration.source:
            broken.append(
                f"request {request} migrates from engine {migration.source}, but does not run there"
            )
    for engine in state.engines.values():
        broken += [
            f"engine {engine.id} reserves a row for request {request}, which does not migrate"
            for request in engine.incoming
            if request not in state.migrations
        ]
        broken += [
            f"engine {engine.id} holds {sorted(engine.loaded)}; a request of version {version} migrates there"
            for version in engine.incoming.values()
            if version not in engine.loaded
        ]
        num_tokens = Counter[int]()
        for request, version in engine.requests.items():
            num_tokens[version] += state.requests[request].num_tokens
        if +num_tokens != +engine.kv_tokens:
            broken.append(f"engine {engine.id}: kv_tokens is {engine.kv_tokens}, not {num_tokens}")
    return broken


def _check_versions(state: State) -> list[str]:
    """Every pinned version is in the store, and no engine exceeds its slots."""
    broken = []
    for version, count in state.num_unfinished.items():
        if count and _must_be_stored(state, version):
            broken.append(f"version {version} is pinned by {count} requests and not in the store")
    for engine in state.engines.values():
        if len(engine.loaded) + (engine.loading is not None) > engine.num_slots:
            broken.append(f"engine {engine.id} uses more than its {engine.num_slots} slots: {engine.loaded}")
    return broken


def _must_be_stored(state: State, version: int) -> bool:
    """Whether a needed version is missing from the store, rather than still to be published again."""
    newest = state.newest_published
    is_due = not state.is_redoing_steps or (newest is not None and version <= newest)
    return is_due and version not in state.stored_versions


def _check_evaluation(state: State) -> list[str]:
    """Held-out requests belong to the running evaluation, and its version is stored."""
    unfinished = Counter(request.group for request in state.requests if request.is_held_out)
    if state.evaluation is None:
        return ["held-out requests exist without an evaluation"] if unfinished else []
    broken, evaluation = [], state.evaluation
    num_unfinished = unfinished.total()
    is_counted = evaluation.num_not_started >= 0 and evaluation.num_unfinished == num_unfinished
    if state.limits.evaluation is None or not is_counted:
        broken.append(
            f"the evaluation has {evaluation.num_unfinished} unfinished requests, not {num_unfinished}"
        )
    if any(group.epoch != -1 - evaluation.version for group in unfinished):
        broken.append(f"held-out requests of another version than {evaluation.version} exist")
    if _must_be_stored(state, evaluation.version):
        broken.append(f"version {evaluation.version} is evaluated and not in the store")
    return broken


def _check_groups(state: State) -> list[str]:
    """Every admitted group is in exactly one place, and the totals add up."""
    broken = []
    ready = {g for _, _, g in state.ready_groups}
    batched = {g for batch in state.batches.values() for g in batch} | set(state.committed)
    open_groups = [g for g in state.groups.values() if g.id not in batched]
    if Counter(g.deadline for g in open_groups) != state.num_open:
        broken.append(f"open groups are miscounted: {dict(state.num_open)}")
    if dict(Counter(r.version for r in state.requests.values())) != dict(state.num_unfinished):
        broken.append(f"unfinished requests are miscounted: {dict(state.num_unfinished)}")
    if {g.id for g in open_groups if g.is_scored} != ready:
        broken.append("a scored group is neither ready nor committed")
    ended = state.num_trained + state.num_filtered + state.num_failed
    if state.num_admitted != len(state.groups) + ended:
        broken.append(f"C2: {state.num_admitted} groups admitted, {len(state.groups)} + {ended} found")
    return broken


def _check_indexes(state: State) -> list[str]:
    """The indexes equal those rebuilt from the rest of the state."""
    rebuilt = State(state.limits)
    rebuilt.groups = state.groups
    rebuilt.rebuild_indexes(state.engines)
    broken = []
    for name in ("holders", "idle_holders", "pending_holders", "available_engines", "unscored"):
        kept = {key: {*members} for key, members in getattr(state, name).items()}
        expected = {key: {*members} for key, members in getattr(rebuilt, name).items()}
        if kept != expected:
            broken.append(f"{name} is {kept}, should be {expected}")
    for name in (
        "admission_rows",
        "colocated",
        "draining",
        "loading_engines",
        "slow_engines",
        "version_entries",
        "row_entries",
    ):
        if dict(getattr(state, name)) != dict(getattr(rebuilt, name)):
            broken.append(f"{name} is {getattr(state, name)}, should be {getattr(rebuilt, name)}")
    if state.num_rows != rebuilt.num_rows:
        broken.append(f"num_rows is {state.num_rows}, should be {rebuilt.num_rows}")
    admissible = {version: num_admissible(state, version) for version in state.admissible_cache}
    if admissible != state.admissible_cache:
        broken.append(f"admissible_cache is {state.admissible_cache}, should be {admissible}")
    slowest = min((state.engines[e].row_tokens_per_s for e in rebuilt.slow_engines), default=inf)
    if state.slowest_rate not in (None, slowest):
        broken.append(f"slowest_rate is {state.slowest_rate}, should be {slowest}")
    return broken
