"""What each engine did, request by request: the timeline of the report.

A track is one engine in one life of the run. A span is the stay of one request on one engine, with the
version it decoded there; where an engine had free rows there is no span.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dora.core.actions import Action, Generate, Load
from dora.core.events import (
    EngineJoined,
    EngineLeft,
    EngineLost,
    Event,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
)
from dora.core.records import RequestId

MAX_TRACKS = 64  # engines drawn; a page with more is no picture any more
MAX_SPANS = 40_000  # drawn one by one; of a run with more only sums are
MAX_BINS = 60_000  # of all engines together
MAX_MOVES = 2_000


class Span(NamedTuple):
    """The stay of a request on an engine, or the part of it that one version decoded (s)."""

    from_s: float
    to_s: float
    version: int
    request: RequestId


@dataclass
class Track:
    """One engine, from when it joined to its end."""

    engine: int
    life: int  # of the run, from 0
    rows: int
    is_colocated: bool
    replaces: int | None
    from_s: float
    to_s: float | None = None
    end: str | None = None  # "lost" or "left"
    reason: str = ""
    spans: list[Span] = field(default_factory=list)
    loads: list[tuple[float, float, int, float, str]] = field(default_factory=list)  # ..., stop_s, failure
    running: dict[RequestId, tuple[float, int]] = field(default_factory=dict)  # -> since, version
    loading: tuple[float, int] | None = None  # since, version

    def begin(self, now: float, request: RequestId, version: int) -> None:
        self.running[request] = (now, version)

    def stop(self, now: float, request: RequestId) -> int | None:
        """The request is here no more; the version it was on."""
        if (begun := self.running.pop(request, None)) is None:
            return None
        self.spans.append(Span(begun[0], now, begun[1], request))
        return begun[1]

    def renew(self, now: float, version: int) -> None:
        """Where C1 is given up, answers for training go on with the newer version that was loaded."""
        for request, (_, begun) in [*self.running.items()]:
            if begun < version and not request.is_held_out:
                self.stop(now, request)
                self.begin(now, request, version)

    def close(self, now: float, end: str | None, reason: str = "") -> None:
        for request in [*self.running]:
            self.stop(now, request)
        self.to_s, self.end, self.reason, self.loading = now, end, reason, None


@dataclass
class Engines:
    """All tracks of a run, from its facts and orders."""

    breaks_c1: bool = False
    tracks: list[Track] = field(default_factory=list)
    moves: list[dict[str, Any]] = field(default_factory=list)
    failed_moves: list[dict[str, Any]] = field(default_factory=list)
    life: int = 0
    _here: dict[int, int] = field(default_factory=dict)  # engine -> index of its track

    def hear(self, now: float, record: Event | Action) -> None:
        match record:
            case EngineJoined(engine, rows, _, is_colocated, replaces):
                self._here[engine] = len(self.tracks)
                self.tracks.append(Track(engine, self.life, rows, is_colocated, replaces, now))
            case EngineLost(engine, reason):
                self._close(now, engine, "lost", reason)
            case EngineLeft(engine):
                self._close(now, engine, "left", "")
            case Resumed():
                for engine in [*self._here]:
                    self._close(now, engine, None, "the run was resumed")
                self.life += 1
            case Generate(engine, version, requests):
                for request in requests:
                    self._track(engine).begin(now, request, version)
            case RequestFinished(engine, request) | RequestFailed(engine, request):
                self._track(engine).stop(now, request)
            case RequestsAborted(engine, requests):
                for request in requests:
                    self._track(engine).stop(now, request)
            case _:
                self._hear_of_moves(now, record)

    def _hear_of_moves(self, now: float, record: Event | Action) -> None:
        """The same of requests and of weights that go from here to there."""
        match record:
            case Migrated(request, source, destination):
                version = self._track(source).stop(now, request)
                if version is None:
                    return
                self._track(destination).begin(now, request, version)
                self.moves.append(_move(now, record, self._here, version))
            case MigrationFailed(request, source, destination, reason):
                ends = {"from": self._here.get(source), "to": self._here.get(destination)}
                self.failed_moves.append({"t": round(now, 3), **ends, "request": str(request), "why": reason})
            case Load(engine, version):
                self._track(engine).loading = (now, version)
            case Loaded(engine, version, _, stop_s):
                self._end_load(now, engine, version, stop_s, "")
            case LoadFailed(engine, version, reason):
                self._end_load(now, engine, version, 0.0, reason)
            case _:
                pass

    def _track(self, engine: int) -> Track:
        return self.tracks[self._here[engine]]

    def _close(self, now: float, engine: int, end: str | None, reason: str) -> None:
        self.tracks[self._here.pop(engine)].close(now, end, reason)

    def _end_load(self, now: float, engine: int, version: int, stop_s: float, failure: str) -> None:
        track = self._track(engine)
        since_s = track.loading[0] if track.loading else now
        track.loads.append((since_s, now, version, stop_s, failure))
        track.loading = None
        if self.breaks_c1 and not failure:
            track.renew(now, version)

    def to_json(self, now: float) -> dict[str, Any]:
        """What the page draws; whoever still runs is drawn until `now`."""
        shown = self.tracks[:MAX_TRACKS]
        spans = [_spans_until(track, now) for track in shown]
        is_summed = sum(map(len, spans)) > MAX_SPANS
        began_s = min((track.from_s for track in shown), default=0.0)
        num_bins = max(60, min(1_200, MAX_BINS // max(1, len(shown))))
        bin_s = max(1e-3, (now - began_s) / num_bins)
        return {
            "tracks": [
                {
                    "engine": track.engine, "life": track.life, "rows": track.rows,
                    "colocated": track.is_colocated, "replaces": track.replaces,
                    "from": _ms(track.from_s), "to": _ms(now if track.to_s is None else track.to_s),
                    "end": track.end, "why": track.reason,
                    "loads": [[_ms(a), _ms(b), version, round(1e3 * stop_s, 1), failure]
                              for a, b, version, stop_s, failure in track.loads],
                    **({"bins": _bins(own, began_s, bin_s)} if is_summed else {"spans": _columns(own)}),
                }
                for track, own in zip(shown, spans, strict=True)
            ],
            "num_tracks": len(self.tracks),
            "num_spans": sum(map(len, spans)),
            "bin_ms": round(1e3 * bin_s, 3) if is_summed else None,
            "from": _ms(began_s), "to": _ms(now),
            "moves": self.moves[-MAX_MOVES:], "num_moves": len(self.moves),
            "failed_moves": self.failed_moves[-MAX_MOVES:], "num_failed_moves": len(self.failed_moves),
        }  # fmt: skip


def _move(now: float, fact: Migrated, here: dict[int, int], version: int) -> dict[str, Any]:
    return {
        "t": round(now, 3), "from": here.get(fact.source), "to": here.get(fact.destination),
        "version": version, "request": str(fact.request), "tokens": fact.num_tokens,
        "bytes": fact.num_bytes, "stop_ms": round(1e3 * fact.stop_s, 2),
    }  # fmt: skip


def _spans_until(track: Track, now: float) -> list[Span]:
    """Those that have ended, and those of requests that are still there, in the order they began."""
    running = [Span(since_s, now, version, request) for request, (since_s, version) in track.running.items()]
    return sorted([*track.spans, *running])


def _columns(spans: Sequence[Span]) -> dict[str, list[Any]]:
    """Columns are smaller than objects: start and duration (ms), version, request."""
    return {
        "t": [_ms(span.from_s) for span in spans],
        "d": [_ms(span.to_s) - _ms(span.from_s) for span in spans],
        "v": [span.version for span in spans],
        "r": [str(span.request) for span in spans],
    }


def _bins(spans: Sequence[Span], began_s: float, bin_s: float) -> list[tuple[int, int, float]]:
    """(bin, version, mean number of busy rows), where it is not 0."""
    busy: defaultdict[tuple[int, int], float] = defaultdict(float)
    for span in spans:
        at_s = span.from_s
        while at_s < span.to_s:
            number = int((at_s - began_s) / bin_s + 1e-9)
            until_s = min(span.to_s, began_s + (number + 1) * bin_s)
            busy[number, span.version] += max(0.0, until_s - at_s)
            at_s = max(until_s, at_s + 1e-9)
    return [(number, version, round(busy_s / bin_s, 2)) for (number, version), busy_s in sorted(busy.items())]


def _ms(seconds: float) -> int:
    return round(1e3 * seconds)
