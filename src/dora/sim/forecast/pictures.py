"""Pictures of a run, simulated or real, as SVG that needs nothing beside itself.

A timeline hears what a journal keeps, facts and orders with their times, so it draws either. Engines are
lanes, their rows coloured by version; arrows are moves, and the last lane is the trainer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from dora.core.actions import Action, Generate, Train
from dora.core.events import (
    EngineLost,
    Event,
    Loaded,
    Migrated,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Trained,
)
from dora.core.records import RequestId

COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e")
WIDTH, LANE, GAP, LEFT, TOP = 960, 18, 5, 70, 44  # pixels
IDLE, INK = "#eef0f3", "#333"
NUM_BUCKETS = 480  # of time, two pixels each
MAX_ENGINES, MAX_ARROWS = 64, 300
NUM_TICKS = 6  # about so many on an axis


@dataclass
class Timeline:
    """Rows of each engine by version, moves and steps, while they happen; seconds are from the first on."""

    changes: dict[int, list[tuple[float, int, int]]] = field(default_factory=dict)  # s, version, rows more
    moves: list[tuple[float, int, int, int]] = field(default_factory=list)  # s, from, to, version
    steps: list[tuple[float, float, int]] = field(default_factory=list)  # from s, to s, step
    end_s: float = 0.0
    _where: dict[RequestId, tuple[int, int]] = field(default_factory=dict)  # engine, version
    _began_s: float = 0.0
    _zero_s: float | None = None  # before it a real run starts and is evaluated

    def hear(self, now: float, record: Event | Action) -> None:
        """The next fact or order, in order of time."""
        if self._zero_s is None and isinstance(record, Generate):
            self._zero_s = now
        now -= now if self._zero_s is None else self._zero_s
        self.end_s = now
        match record:
            case Generate():
                for request in record.requests:
                    self._seat(now, request, record.engine, record.version)
            case RequestFinished() | RequestFailed():
                self._unseat(now, record.request)
            case RequestsAborted():
                for request in record.requests:
                    self._unseat(now, request)
            case Migrated():
                version = self._unseat(now, record.request)
                if version is not None:
                    self.moves.append((now, record.source, record.destination, version))
                    self._seat(now, record.request, record.destination, version)
            case EngineLost():
                for request in [r for r, (engine, _) in self._where.items() if engine == record.engine]:
                    self._unseat(now, request)
            case Loaded():
                self.changes.setdefault(record.engine, [])
            case Train():
                self._began_s = now
            case Trained():
                self.steps.append((self._began_s, now, record.step))
            case _:
                pass

    def _seat(self, now: float, request: RequestId, engine: int, version: int) -> None:
        self._unseat(now, request)
        self._where[request] = (engine, version)
        self.changes.setdefault(engine, []).append((now, version, 1))

    def _unseat(self, now: float, request: RequestId) -> int | None:
        if request not in self._where:
            return None
        engine, version = self._where.pop(request)
        self.changes[engine].append((now, version, -1))
        return version


def timeline_svg(run: Timeline, title: str) -> str:
    """Lanes of at most `MAX_ENGINES` engines, and the trainer's."""
    engines = sorted(run.changes)[:MAX_ENGINES]
    lane_of = {engine: TOP + place * (LANE + GAP) for place, engine in enumerate(engines)}
    end_s = run.end_s or 1.0

    def x(seconds: float) -> float:
        return LEFT + seconds / end_s * WIDTH

    bottom = TOP + len(engines) * (LANE + GAP)
    parts = [_text(LEFT, TOP - 10, _legend(len(engines), len(run.changes)), "start", "#666")]
    for seconds in ticks(end_s):
        parts.append(f'<path d="M{x(seconds):.1f} {TOP}V{bottom + LANE}" stroke="#ddd"/>')
        parts.append(_text(x(seconds), bottom + LANE + 16, f"{seconds:,g} s"))
    for name, y in [*((f"engine {e}", y) for e, y in lane_of.items()), ("trainer", bottom)]:
        parts.append(_text(LEFT - 6, y + LANE - 5, name, "end"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{LANE}" fill="{IDLE}"/>')
    for engine, y in lane_of.items():
        parts += _lane(run.changes[engine], end_s, y)
    for begin_s, step_end_s, step in run.steps:
        width = x(step_end_s) - x(begin_s)
        parts.append(_box(x(begin_s), bottom, width, LANE, step, f"step {step + 1}"))
        if width > 7 * len(str(step + 1)):
            parts.append(_text(x(begin_s) + width / 2, bottom + LANE - 5, str(step + 1), "middle", "#fff"))
    parts += _arrows(run, lane_of, x_of=end_s)
    return _svg(parts, bottom + LANE + 26, title)


def _legend(num_drawn: int, num_engines: int) -> str:
    some = "" if num_drawn == num_engines else f" ({num_drawn} of {num_engines} engines)"
    return (
        f"height: rows that run{some}; colour: their version, that of the step which is trained "
        f"from it; repeats after {len(COLOURS)}; arrows: moves of requests with their KV"
    )


def ticks(most: float) -> list[float]:
    """Round numbers from zero to `most`, about `NUM_TICKS`."""
    least = most / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)
    return [step * k for k in range(int(most / step * 1.001) + 1)]


def _lane(changes: Sequence[tuple[float, int, int]], end_s: float, y: float) -> Iterator[str]:
    """Boxes as high as the share of rows that a version has, in buckets of time; equal neighbours are one."""
    most, running, peak = 0, Counter[int](), 0
    for _, version, more in changes:
        running[version] += more
        peak += more
        most = max(most, peak)
    if not most:
        return
    buckets: list[Counter[int]] = []
    running, place = Counter(), 0
    for bucket in range(NUM_BUCKETS):
        while place < len(changes) and changes[place][0] <= (bucket + 0.5) / NUM_BUCKETS * end_s:
            running[changes[place][1]] += changes[place][2]
            place += 1
        buckets.append(+running)
    begin, step = 0, WIDTH / NUM_BUCKETS
    for bucket in range(1, NUM_BUCKETS + 1):
        if bucket < NUM_BUCKETS and buckets[bucket] == buckets[begin]:
            continue
        base = y + LANE
        for version, rows in sorted(buckets[begin].items()):
            height = LANE * rows / most
            base -= height
            tip = f"version {version}: {rows} rows"
            yield _box(LEFT + begin * step, base, (bucket - begin) * step, height, version, tip)
        begin = bucket


def _arrows(run: Timeline, lane_of: Mapping[int, float], x_of: float) -> Iterator[str]:
    """Moves between lanes that are drawn, those at about one time as one; of many, evenly some."""
    drawn = Counter(
        (int(seconds / x_of * WIDTH / 4), source, destination, version)
        for seconds, source, destination, version in run.moves
        if source in lane_of and destination in lane_of
    )
    for move in [*drawn][:: 1 + len(drawn) // MAX_ARROWS]:
        place, source, destination, version = move
        x, begin, end = LEFT + 4 * place, lane_of[source] + LANE / 2, lane_of[destination] + LANE / 2
        bend = x + 6 + abs(end - begin) / 8
        tip = f"version {version}: {drawn[move]} from engine {source} to {destination}"
        yield (
            f'<path d="M{x} {begin}C{bend:.1f} {begin} {bend:.1f} {end} {x + 3} {end}" stroke="{INK}" '
            f'fill="none" stroke-width="{min(3.0, 0.8 + drawn[move] / 20):.1f}" stroke-opacity=".75" '
            f'marker-end="url(#tip)"><title>{tip}</title></path>'
        )


def speed_svg(points: Iterable[tuple[str, int, float]]) -> str:
    """Policy, S and trained tokens a second of some runs."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, staleness, tokens_per_s in points:
        curves.setdefault(name, []).append((staleness, tokens_per_s))
    return curves_svg(curves, "S", "trained tokens a second", "speed against S")


def curves_svg(curves: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str, title: str) -> str:
    """A line for each name through its points, from zero up."""
    points = [point for line in curves.values() for point in line]
    most_x, most_y = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    height, width = 320.0, WIDTH - 120

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / most_x * width, TOP + height * (1 - y / (1.05 * most_y))

    left, base = place(0, 0)
    parts = []
    for value in ticks(most_y):
        _, y = place(0, value)
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="{"#ddd" if value else "#888"}"/>')
        parts.append(_text(left - 6, y + 4, f"{value:,g}", "end"))
    for x in sorted({x for x, _ in points}):
        parts.append(_text(place(x, 0)[0], base + 16, f"{x:g}"))
    parts += [_text(LEFT + width / 2, base + 34, across), _text(left, TOP - 8, up, "start", "#666")]
    taken: list[tuple[float, float]] = []
    for number, (name, line) in enumerate(sorted(curves.items(), key=lambda one: -max(one[1])[1])):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(x, y) for x, y in sorted(line)]
        way = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path d="M{way}" stroke="{colour}" fill="none" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed]
        x, y = placed[-1]
        while any(abs(y - other) < 12 and abs(x - at) < 90 for at, other in taken):  # names below each other
            y += 1
        taken.append((x, y))
        parts.append(_text(x + 8, y + 4, name, "start", colour))
    return _svg(parts, base + 44, title)


def _box(x: float, y: float, width: float, height: float, version: int, tip: str) -> str:
    colour = COLOURS[version % len(COLOURS)]
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height:.1f}"'
    return f'<rect {size} fill="{colour}"><title>{escape(tip)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    width = LEFT + WIDTH + 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="11"><title>{escape(title)}</title>'
        '<defs><marker id="tip" markerUnits="userSpaceOnUse" markerWidth="7" markerHeight="7" '
        'viewBox="0 0 4 4" refX="4" refY="2" orient="auto">'
        f'<path d="M0 0L4 2L0 4z" fill="{INK}"/></marker></defs>'
        f'<rect width="100%" height="100%" fill="#fff"/>{_text(LEFT, 18, title, "start")}'
    )
    return "\n".join([head, *parts, "</svg>", ""])
