"""The timeline says where every request was at any time, whatever the order of the lines."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from tests.journal.recorded_runs import record_run
from tests.journal.story import ABORTED, FIRST, REJECTED, SECOND

from dora.core.events import RequestFinished
from dora.core.types import RequestId
from dora.journal.reader import read_journal
from dora.journal.timeline import (
    EngineSpan,
    GroupSpan,
    RequestSpan,
    Span,
    Timeline,
    TrainerSpan,
    fold,
    of_kind,
)
from dora.sim.random_config import draw_world_config


@pytest.fixture(scope="module")
def story(story_run: Path) -> list[Span]:
    return fold(read_journal(story_run).lines)


def stays(spans: list[Span], request: RequestId) -> list[tuple[int, str]]:
    """Each engine that a request was on, and what ended it there."""
    own = [span for span in of_kind(spans, RequestSpan) if span.request == request]
    return [(span.engine.engine, span.end) for span in own]


def test_a_request_has_a_span_on_each_of_its_engines(story: list[Span]) -> None:
    assert stays(story, FIRST) == [(1, "migrated to engine 0"), (0, "migrated to engine 2"), (2, "stop")]
    assert stays(story, SECOND) == [(1, "engine lost: killed"), (2, "stop")]
    assert stays(story, REJECTED) == [(0, "rejected: too long")]
    assert stays(story, ABORTED) == [(0, "aborted")]


def test_engines_groups_and_steps_have_their_ends(story: list[Span]) -> None:
    assert [(span.engine, span.end) for span in of_kind(story, EngineSpan)] == [
        (0, "removed"),
        (1, "lost"),
        (2, ""),
    ]
    assert sorted(span.outcome for span in of_kind(story, GroupSpan)) == ["failed", "trained"]
    steps = [span.end for span in of_kind(story, TrainerSpan) if span.phase == "train"]
    assert steps == ["failed: out of memory", ""]


@pytest.mark.parametrize("seed", range(8))
def test_a_request_is_in_one_place_at_a_time(tmp_path: Path, seed: int) -> None:
    journal = read_journal(record_run(tmp_path / "run", draw_world_config(seed), seed))
    now_s = journal.lines[-1].t_s
    places = defaultdict(list)
    for span in of_kind(fold(journal.lines), RequestSpan):
        places[span.request].append(span)
        assert span.engine.start_s <= span.start_s <= span.until(now_s) <= span.engine.until(now_s)
    for own in places.values():
        assert all(before.until(now_s) <= after.start_s for before, after in pairwise(own))
    finished = [line.record for line in journal.lines if isinstance(line.record, RequestFinished)]
    ends = {(own[-1].request, own[-1].engine.engine) for own in places.values() if own[-1].finished}
    assert ends == {(event.request, event.engine) for event in finished}


@pytest.mark.parametrize("seed", range(8))
def test_lines_in_any_order_are_folded(tmp_path: Path, seed: int) -> None:
    lines = [*read_journal(record_run(tmp_path / "run", draw_world_config(seed), seed)).lines]
    Random(seed).shuffle(lines)
    assert len(fold(lines)) > 0


def test_ended_spans_are_not_kept(tmp_path: Path) -> None:
    timeline = Timeline()
    for line in read_journal(record_run(tmp_path / "run", draw_world_config(7), 7)).lines:
        ended = timeline.observe(line.t_s, line.record)
        assert not {*ended} & {*timeline.open_spans()}
    assert not timeline.requests
    assert not timeline.groups
