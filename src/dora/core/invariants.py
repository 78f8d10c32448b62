"""What must hold after every event.

`check` recounts everything the rules keep counts of; it is for tests and the simulator.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from dora.core.bound import bound_holds, num_admissible
from dora.core.state import State


def check(state: State) -> list[str]:
    """The broken invariants, as sentences; empty where all hold."""
    return [
        *_bound(state),
        *_owners(state),
        *_moves(state),
        *_versions(state),
        *_evaluation(state),
        *_counts(state),
        *_indexes(state),
    ]


def _bound(state: State) -> list[str]:
    broken = []
    if not bound_holds(state.open, state.next_step, len(state.committed), state.limits):
        broken.append(f"C3: no place left for some of {dict(state.open)} from step {state.next_step} on")
    if late := [g.id for g in state.groups.values() if g.deadline > state.limits.deadline(g.version)]:
        broken.append(f"C3: {late} may be trained when they are older than max_staleness")
    if not 0 <= state.aging.lowered <= state.limits.max_staleness:
        broken.append(f"C3: max_staleness is lowered by {state.aging.lowered}")
    if len(state.committed) >= state.limits.batch_size:
        broken.append(f"batch {state.next_step} is complete and still open")
    return broken


def _owners(state: State) -> list[str]:
    """One owner per request; rows conserved on each engine."""
    broken = []
    owned: Counter[object] = Counter()
    for engine in state.engines.values():
        owned.update(engine.requests.keys())
        if engine.free_rows < 0:
            broken.append(f"engine {engine.id} has {-engine.free_rows} requests more than rows")
        busy = Counter(
            v for rows in (engine.requests, engine.arriving, engine.aborting) for v in rows.values()
        )
        if dict(busy) != dict(engine.running):  # a key without rows would count as decoded
            broken.append(f"engine {engine.id} counts {engine.running}, runs {busy}")
        broken += [
            f"request {r} of version {v} runs on engine {engine.id}, which holds {sorted(engine.held)}"
            for r, v in engine.requests.items()
            if v not in engine.held or state.requests[r].engine != engine.id or state.requests[r].version != v
        ]
    for version, waiting in state.waiting.items():
        owned.update(list(waiting))
        broken += [
            f"request {r} waits at a wrong version" for r in waiting if state.requests[r].version != version
        ]
    if owned.keys() != state.requests.keys() or any(n != 1 for n in owned.values()):
        broken.append("a request has no owner, or two")
    return broken


def _moves(state: State) -> list[str]:
    """A move has a source that owns the request and a reserved row at its destination."""
    broken = []
    for request, move in state.moves.items():
        destination = state.engines.get(move.destination)
        if destination is None or destination.arriving.get(request) != move.version:
            broken.append(f"request {request} has no row reserved at engine {move.destination}")
        if move.source not in state.engines:
            broken.append(f"request {request} moves from engine {move.source}, which is not there")
        if request in state.requests and state.requests[request].engine != move.source:
            broken.append(f"request {request} moves from engine {move.source} and is not there")
    for engine in state.engines.values():
        broken += [
            f"engine {engine.id} expects request {request}, which does not move"
            for request in engine.arriving
            if request not in state.moves
        ]
        broken += [
            f"version {version} arrives at engine {engine.id}, which holds {sorted(engine.held)}"
            for version in engine.arriving.values()
            if version not in engine.held
        ]
        tokens = Counter[int]()
        for request, version in engine.requests.items():
            tokens[version] += state.requests[request].num_tokens
        if +tokens != +engine.kv_tokens:
            broken.append(f"engine {engine.id} counts {engine.kv_tokens} tokens, has {tokens}")
    return broken


def _versions(state: State) -> list[str]:
    """No pinned version without a copy in the store; no engine over its slots."""
    broken = []
    for version, count in state.unfinished.items():
        is_due = not state.is_redoing or (state.newest is not None and version <= state.newest)
        if count and is_due and version not in state.store:
            broken.append(f"version {version} is pinned by {count} requests and not in the store")
    for engine in state.engines.values():
        if len(engine.held) + (engine.loading is not None) > engine.slots:
            broken.append(f"engine {engine.id} uses more than its {engine.slots} slots: {engine.held}")
    return broken


def _evaluation(state: State) -> list[str]:
    """The held-out requests are those that were begun, and their version is there."""
    running = Counter(request.group for request in state.requests if request.is_held_out)
    if state.evaluation is None:
        return ["held-out requests run without an evaluation"] if running else []
    broken, run, rule = [], state.evaluation, state.limits.evaluation
    if rule is None or run.num_left < 0 or run.num_running != running.total():
        broken.append(f"{run.num_running} held-out requests are said to run, {running.total()} do")
    if any(group.epoch != -1 - run.version for group in running):
        broken.append(f"held-out requests of another version than {run.version} run")
    is_due = not state.is_redoing or (state.newest is not None and run.version <= state.newest)
    if is_due and run.version not in state.store:
        broken.append(f"version {run.version} is evaluated and not in the store")
    return broken


def _counts(state: State) -> list[str]:
    """Every admitted group is in exactly one place, and the counts say so."""
    broken = []
    ready = {g for _, _, g in state.ready}
    batched = {g for batch in state.batches.values() for g in batch} | set(state.committed)
    open_groups = [g for g in state.groups.values() if g.id not in batched]
    if Counter(g.deadline for g in open_groups) != state.open:
        broken.append(f"open groups are miscounted: {dict(state.open)}")
    if dict(Counter(r.version for r in state.requests.values())) != dict(state.unfinished):
        broken.append(f"unfinished requests are miscounted: {dict(state.unfinished)}")
    if {g.id for g in open_groups if g.scored} != ready:
        broken.append("a scored group is neither ready nor committed")
    ended = state.num_trained + state.num_filtered + state.num_failed
    if state.num_admitted != len(state.groups) + ended:
        broken.append(
            f"C2: {state.num_admitted} groups admitted, {len(state.groups)} + {ended} accounted for"
        )
    return broken


def _indexes(state: State) -> list[str]:
    """What is kept beside the state is what a fresh count gives."""
    fresh = State(state.limits)
    fresh.groups = state.groups
    fresh.restore(state.engines)
    broken = []
    for name in ("holders", "idle", "coming"):
        kept = {v: {*engines} for v, engines in getattr(state, name).items()}
        if kept != {v: {*engines} for v, engines in getattr(fresh, name).items()}:
            broken.append(f"{name} is {kept}, should be {getattr(fresh, name)}")
    counted = {version: num_admissible(state, version) for version in state.admissible}
    if counted != state.admissible:
        broken.append(f"the bound is said to admit {state.admissible}, and admits {counted}")
    least = min((state.engines[e].row_tokens_per_s for e in fresh.laggards), default=inf)
    if state.least_pace not in (None, least):
        broken.append(f"the slowest engine is said to make {state.least_pace} tokens a second, not {least}")
    if state.num_rows != fresh.num_rows:
        broken.append(f"num_rows is {state.num_rows}, should be {fresh.num_rows}")
    for name in ("fresh_rows", "colocated", "leaving", "loaders", "laggards", "posts", "rooms"):
        if dict(getattr(state, name)) != dict(getattr(fresh, name)):
            broken.append(f"{name} is {getattr(state, name)}, should be {getattr(fresh, name)}")
    if {v: sorted(r) for v, r in state.takers.items()} != {v: sorted(r) for v, r in fresh.takers.items()}:
        broken.append("takers are miscounted")
    waited = {d: {*groups} for d, groups in state.unscored.items()}
    if waited != {d: {*groups} for d, groups in fresh.unscored.items()}:
        broken.append(f"unscored groups are {waited}")
    return broken
