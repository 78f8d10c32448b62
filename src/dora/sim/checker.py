"""C1, C2 and C3, watched from outside the core.

The checker keeps its own small ledger from the facts and orders alone and shares no code with
the rules it checks; the first broken guarantee raises Violation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dora.core.actions import Action, Admit, Commit, Drop, Fail, Filter, Generate, Load, Retire, Train
from dora.core.events import EngineJoined, EngineLost, Event, Loaded, Published, RequestFinished
from dora.core.records import GroupId, Limits, RequestId


class Violation(Exception):
    """A guarantee is broken."""


@dataclass(slots=True)
class Ledger:
    """What the checker has seen."""

    limits: Limits
    version_of: dict[GroupId, int] = field(default_factory=dict)
    end_of: dict[GroupId, str] = field(default_factory=dict)
    finished: dict[RequestId, int] = field(default_factory=dict)
    owner: dict[RequestId, int] = field(default_factory=dict)
    held: dict[int, set[int]] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    store: set[int] = field(default_factory=set)
    next_index: int = 0
    max_seen_staleness: int = 0

    def require(self, condition: bool, sentence: str) -> None:
        if not condition:
            raise Violation(sentence)

    def hear(self, event: Event) -> None:
        match event:
            case EngineJoined(engine, rows, _):
                self.held[engine], self.rows[engine] = set(), rows
            case EngineLost(engine):
                del self.held[engine]
                self.owner = {r: e for r, e in self.owner.items() if e != engine}
            case Loaded(engine, version):
                self.held[engine].add(version)
            case Published(version):
                self.store.add(version)
            case RequestFinished(engine, request, version, _, chunks):
                self.owner.pop(request, None)
                self.finished[request] = version
                versions = {c.version for c in chunks}
                self.require(versions == {version}, f"C1: {request} mixes {versions}")
            case _:
                pass

    def obey(self, order: Action) -> None:
        match order:
            case Admit(group, index, version, _):
                self.require(group not in self.version_of, f"C2: {group} admitted twice")
                self.require(index == self.next_index, f"C2: dataset gap before {group}")
                self.require(
                    any(version in h for h in self.held.values()), f"{group} at a version nobody holds"
                )
                self.version_of[group], self.next_index = version, index + 1
            case Generate(engine, version, requests):
                self._generate(engine, version, requests)
            case Filter(group, _) | Fail(group, _):
                self._end(group, type(order).__name__)
                self.owner = {r: e for r, e in self.owner.items() if r.group != group}
            case Commit(group, step):
                self._end(group, f"step {step}")
            case Train(step, groups):
                self._train(step, groups)
            case Drop(engine, version):
                running = [
                    r for r, e in self.owner.items() if e == engine and self.version_of[r.group] == version
                ]
                self.require(not running, f"engine {engine} drops version {version} under {running}")
                self.held[engine].discard(version)
            case Load(_, version):
                self.require(version in self.store, f"version {version} is loaded but not stored")
            case Retire(version):
                pinned = [r for r in self.owner if self.version_of[r.group] == version]
                self.require(not pinned, f"version {version} is retired under {pinned}")
                self.store.discard(version)
            case _:
                pass

    def _generate(self, engine: int, version: int, requests: tuple[RequestId, ...]) -> None:
        self.require(version in self.held[engine], f"engine {engine} does not hold version {version}")
        for request in requests:
            self.require(request not in self.owner, f"{request} has two owners")
            self.require(request not in self.finished, f"{request} is generated after it finished")
            self.require(self.version_of[request.group] == version, f"C1: {request} changes its version")
            self.owner[request] = engine
        load = sum(1 for e in self.owner.values() if e == engine)
        self.require(load <= self.rows[engine], f"engine {engine} has {load} requests")

    def _end(self, group: GroupId, how: str) -> None:
        self.require(group in self.version_of, f"C2: {group} ends without being admitted")
        self.require(group not in self.end_of, f"C2: {group} ends twice: {self.end_of.get(group)}, {how}")
        self.end_of[group] = how

    def _train(self, step: int, groups: tuple[GroupId, ...]) -> None:
        self.require(len(set(groups)) == self.limits.batch_size, f"C2: batch {step} has {len(groups)} groups")
        for group in groups:
            self.require(self.end_of.get(group) == f"step {step}", f"C2: {group} trained uncommitted")
            siblings = [RequestId(*group, k) for k in range(self.limits.group_size)]
            versions = {self.finished.get(r) for r in siblings}
            self.require(versions == {self.version_of[group]}, f"C1: {group} has versions {versions}")
            staleness = step - self.version_of[group]
            self.require(
                0 <= staleness <= self.limits.max_staleness, f"C3: {group} has staleness {staleness}"
            )
            self.max_seen_staleness = max(self.max_seen_staleness, staleness)

    def close(self) -> None:
        """At the end of a whole run every admitted group has an end."""
        left = self.version_of.keys() - self.end_of.keys()
        self.require(not left, f"C2: {sorted(left)[:3]} were admitted and have no end")
