"""Draws simulated and real runs as self-contained SVG: a timeline of engines and trainer, line charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate, chain

from dora.core.events import Trained
from dora.journal.timeline import EngineSpan, MigrationSpan, RequestSpan, Span, TrainerSpan, of_kind

COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e")
WIDTH, LANE, GAP, LEFT, TOP = 960, 18, 5, 70, 44  # pixels
CHART_HEIGHT = 320.0
IDLE_FILL, INK = "#eef0f3", "#333"
NUM_BUCKETS = 480  # of time, two pixels each
MAX_ENGINES, MAX_ARROWS = 64, 300
NUM_TICKS = 6  # of an axis, approximately


def timeline_svg(spans: Sequence[Span], title: str) -> str:
    """A lane for each of at most MAX_ENGINES engines, rows coloured by version, and one for the trainer.

    Seconds count from the first request.
    """
    requests = of_kind(spans, RequestSpan)
    zero_s = requests[0].start_s if requests else 0.0
    end_s = max((span.until(span.start_s) for span in spans), default=0.0) - zero_s or 1.0
    row_changes = _row_changes(spans, zero_s, end_s)
    engines = sorted(row_changes)[:MAX_ENGINES]
    lane_of = {engine: TOP + index * (LANE + GAP) for index, engine in enumerate(engines)}

    def x(seconds: float) -> float:
        return LEFT + seconds / end_s * WIDTH

    bottom = TOP + len(engines) * (LANE + GAP)
    parts = [_text(LEFT, TOP - 10, _legend(len(engines), len(row_changes)), "start", "#666")]
    for seconds in ticks(end_s):
        parts.append(f'<path d="M{x(seconds):.1f} {TOP}V{bottom + LANE}" stroke="#ddd"/>')
        parts.append(_text(x(seconds), bottom + LANE + 16, f"{seconds:,g} s"))
    for name, y in [*((f"engine {e}", y) for e, y in lane_of.items()), ("trainer", bottom)]:
        parts.append(_text(LEFT - 6, y + LANE - 5, name, "end"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{LANE}" fill="{IDLE_FILL}"/>')
    for engine, y in lane_of.items():
        parts += _lane(row_changes[engine], end_s, y)
    for span in of_kind(spans, TrainerSpan):
        if isinstance(span.result, Trained):
            left, number = x(span.start_s - zero_s), str(span.number + 1)
            width = x(span.until(span.start_s) - zero_s) - left
            parts.append(_box(left, bottom, width, LANE, span.number, f"step {number}"))
            if width > 7 * len(number):
                parts.append(_text(left + width / 2, bottom + LANE - 5, number, "middle", "#fff"))
    parts += _arrows(of_kind(spans, MigrationSpan), lane_of, zero_s, end_s)
    return _svg(parts, bottom + LANE + 26, title)


def _legend(num_drawn: int, num_engines: int) -> str:
    some = "" if num_drawn == num_engines else f" ({num_drawn} of {num_engines} engines)"
    return (
        f"height: running rows{some}; colour: their version, and the training step that starts from it; "
        f"{len(COLOURS)} colours, which repeat; arrows: migrations of requests with their KV"
    )


def ticks(largest: float) -> list[float]:
    """Round numbers from zero to `largest`, about NUM_TICKS of them."""
    least = largest / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)
    return [step * k for k in range(int(largest / step * 1.001) + 1)]


def _row_changes(
    spans: Iterable[Span], zero_s: float, end_s: float
) -> dict[int, list[tuple[float, int, int]]]:
    """Engine -> (seconds, version, change of its rows), in order."""
    changes: dict[int, list[tuple[float, int, int]]] = {}
    for span in spans:
        if isinstance(span, EngineSpan):
            changes.setdefault(span.engine, [])
        elif isinstance(span, RequestSpan):
            of_engine = changes.setdefault(span.engine.engine, [])
            for start, end, version in span.segments(zero_s + end_s):
                of_engine += [(start - zero_s, version, 1), (end - zero_s, version, -1)]
    return {engine: sorted(of_engine) for engine, of_engine in changes.items()}


def _lane(changes: Sequence[tuple[float, int, int]], end_s: float, y: float) -> Iterator[str]:
    """Boxes as high as the fraction of rows, one colour per version; equal buckets of time are merged."""
    most = max(accumulate(change for _, _, change in changes), default=0)
    if not most:
        return
    buckets = _buckets(changes, end_s)
    start, width = 0, WIDTH / NUM_BUCKETS
    for bucket in range(1, NUM_BUCKETS + 1):
        if bucket < NUM_BUCKETS and buckets[bucket] == buckets[start]:
            continue
        base = y + LANE
        for version, num_rows in sorted(buckets[start].items()):
            height = LANE * num_rows / most
            base -= height
            tip = f"version {version}: {num_rows} rows"
            yield _box(LEFT + start * width, base, (bucket - start) * width, height, version, tip)
        start = bucket


def _buckets(changes: Sequence[tuple[float, int, int]], end_s: float) -> list[Counter[int]]:
    """Rows by version in the middle of each bucket of time."""
    buckets: list[Counter[int]] = []
    rows, index = Counter[int](), 0
    for bucket in range(NUM_BUCKETS):
        while index < len(changes) and changes[index][0] <= (bucket + 0.5) / NUM_BUCKETS * end_s:
            rows[changes[index][1]] += changes[index][2]
            index += 1
        buckets.append(+rows)
    return buckets


def _arrows(
    migrations: Iterable[MigrationSpan], lane_of: Mapping[int, float], zero_s: float, end_s: float
) -> Iterator[str]:
    """Migrations between drawn lanes; simultaneous ones share an arrow, and of many arrows some are drawn."""
    drawn: Counter[tuple[int, int, int, int]] = Counter()
    for span in migrations:
        move = span.action
        if span.migrated is not None and move.source in lane_of and move.destination in lane_of:
            column = int((span.until(zero_s) - zero_s) / end_s * WIDTH / 4)
            drawn[column, move.source, move.destination, move.version] += 1
    for arrow in [*drawn][:: 1 + len(drawn) // MAX_ARROWS]:
        column, source, destination, version = arrow
        x, start, end = LEFT + 4 * column, lane_of[source] + LANE / 2, lane_of[destination] + LANE / 2
        bend = x + 6 + abs(end - start) / 8
        tip = f"version {version}: {drawn[arrow]} from engine {source} to {destination}"
        yield (
            f'<path d="M{x} {start}C{bend:.1f} {start} {bend:.1f} {end} {x + 3} {end}" stroke="{INK}" '
            f'fill="none" stroke-width="{min(3.0, 0.8 + drawn[arrow] / 20):.1f}" stroke-opacity=".75" '
            f'marker-end="url(#tip)"><title>{tip}</title></path>'
        )


def throughput_svg(points: Iterable[tuple[str, int, float]]) -> str:
    """A line for each policy through its points (policy, S, trained tokens per second); both axes start at
    zero.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, staleness, tokens_per_s in points:
        curves.setdefault(name, []).append((staleness, tokens_per_s))
    all_x, all_y = zip(*chain.from_iterable(curves.values()), strict=True)
    max_x, max_y = max(all_x) or 1.0, max(all_y) or 1.0
    width = WIDTH - 120

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / max_x * width, TOP + CHART_HEIGHT * (1 - y / (1.05 * max_y))

    left, base = place(0, 0)
    parts = []
    for value in ticks(max_y):
        _, y = place(0, value)
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="{"#ddd" if value else "#888"}"/>')
        parts.append(_text(left - 6, y + 4, f"{value:,g}", "end"))
    for x in sorted({*all_x}):
        parts.append(_text(place(x, 0)[0], base + 16, f"{x:g}"))
    parts.append(_text(LEFT + width / 2, base + 34, "S"))
    parts.append(_text(left, TOP - 8, "trained tokens per second", "start", "#666"))
    labels: list[tuple[float, float]] = []
    for number, (name, line) in enumerate(sorted(curves.items(), key=lambda curve: -max(curve[1])[1])):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(x, y) for x, y in sorted(line)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path d="M{path}" stroke="{colour}" fill="none" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed]
        x, y = placed[-1]
        while any(abs(y - other_y) < 12 and abs(x - other_x) < 90 for other_x, other_y in labels):
            y += 1  # labels do not overlap
        labels.append((x, y))
        parts.append(_text(x + 8, y + 4, name, "start", colour))
    return _svg(parts, base + 44, "throughput against S")


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
