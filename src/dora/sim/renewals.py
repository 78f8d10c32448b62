"""Which version each unfinished answer has come to, where answers go on with newer ones: part of the checker.

Derived from the facts alone: an engine that takes a version goes on with it, and what is on no engine begins
with the newest that any engine holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dora.core.events import Loaded, RequestFinished
from dora.core.records import GroupId, Limits, RequestId
from dora.sim.seats import Seats, require


class Renewals:
    """The ledger of versions that change; empty where they do not."""

    def __init__(self, limits: Limits, seats: Seats, pins: Counter[int]) -> None:
        self._is_on, self._seats, self._pins = limits.breaks_c1, seats, pins
        self.versions: dict[RequestId, int] = {}  # of unfinished answers

    def admitted(self, siblings: Iterable[RequestId], version: int, store: Iterable[int]) -> None:
        """A group is admitted: at the newest version held, which its answers begin with."""
        if self._is_on:
            newest = self._newest_held(store)
            require(version == newest, f"a group begins with version {version}, engines have {newest}")
            self.versions.update(dict.fromkeys(siblings, version))

    def end(self, request: RequestId, version: int) -> None:
        """An answer has ended, or its group has; `version` is its group's."""
        self._pins[self.versions.pop(request, version)] -= 1

    def loaded(self, fact: Loaded) -> None:
        """What runs on the engine goes on with this version."""
        if self._is_on:
            engine = self._seats.engines[fact.engine]
            for request, old in engine.seats.items():
                if old < fact.version and request in self.versions:
                    engine.seats[request] = fact.version
                    engine.num_of[old] -= 1
                    engine.num_of[fact.version] += 1
                    self._change(request, fact.version)

    def catch_up(self, store: Iterable[int]) -> None:
        """After each fact: what is on no engine begins with the newest that engines hold."""
        if not self._is_on:
            return
        newest = self._newest_held(store)
        for request, version in self.versions.items():
            if version < newest and request not in self._seats.owner:
                self._change(request, newest)

    def version_of(self, request: RequestId, admitted_at: int) -> int:
        """The version that an answer is to be begun with."""
        return self.versions.get(request, admitted_at)

    def first_version(self, fact: RequestFinished, admitted_at: int) -> int:
        """That of the first segment: of versions that only get newer, from the group's on."""
        versions = [chunk.version for chunk in fact.chunks]
        is_forward = versions == sorted(set(versions)) and versions[-1] <= fact.version
        require(is_forward and versions[0] >= admitted_at, f"{fact.request} has segments {fact.chunks}")
        return versions[0]

    def check_group(self, group: GroupId, versions: set[int | None], admitted_at: int, step: int) -> None:
        """A batch is trained: no segment is older than its group."""
        is_kept = all(v is not None and admitted_at <= v <= step for v in versions)
        require(is_kept, f"{group} of version {admitted_at} has segments of {versions} in step {step}")

    def _newest_held(self, store: Iterable[int]) -> int:
        held = {v for e in self._seats.engines.values() if not e.is_draining for v in e.held}
        return max(held.intersection(store), default=-1)

    def _change(self, request: RequestId, version: int) -> None:
        self._pins[self.versions[request]] -= 1
        self._pins[version] += 1
        self.versions[request] = version
