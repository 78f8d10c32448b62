"""SVG drawings: a timeline of events and actions, a line chart, and no external resources."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dora.cli.main import app
from dora.core.actions import Action, Generate, Migrate, Train
from dora.core.events import EngineJoined, Event, Loaded, Migrated, RequestFinished, Trained
from dora.core.types import Chunk, RequestId
from dora.journal.reader import JournalLine
from dora.journal.timeline import Span, fold
from dora.planner.svg import COLOURS, throughput_svg, timeline_svg

FIRST, SECOND = RequestId(0, 0, 0), RequestId(0, 0, 1)


def make_spans() -> list[Span]:
    """Engine 0 runs two requests of version 3; one migrates to engine 1; both end; a step is trained."""
    records: list[tuple[float, Event | Action]] = [
        (0.5, EngineJoined(0, 4, 1)),
        (0.7, EngineJoined(1, 4, 1)),
        (1.0, Generate(0, 3, (FIRST, SECOND))),
        (5.0, Migrate(SECOND, 0, 1, 3, "level")),
        (6.0, Migrated(SECOND, 0, 1, 50, 1000, 0.1, 0.01)),
        (9.0, RequestFinished(0, FIRST, 3, 80, (Chunk(3, "v3", 80),), "stop")),
        (9.0, RequestFinished(1, SECOND, 3, 80, (Chunk(3, "v3", 80),), "stop")),
        (9.0, Train(3, ())),
        (11.0, Trained(3)),
    ]
    return fold(JournalLine(seq, t_s, record) for seq, (t_s, record) in enumerate(records))


def boxes(svg: str) -> list[tuple[float, float, str]]:
    """Left edge, width and title of each coloured box."""
    root = ElementTree.fromstring(svg)
    found = [one for one in root.iter() if one.tag.endswith("rect") and one.get("fill") in COLOURS]
    return [(float(one.get("x", 0)), float(one.get("width", 0)), one[0].text or "") for one in found]


def test_lanes_show_how_many_rows_of_which_version_ran_when() -> None:
    drawn = boxes(timeline_svg(make_spans(), "a run"))
    assert [(round(x - 70), round(width), tip) for x, width, tip in drawn] == [
        (0, 480, "version 3: 2 rows"),
        (480, 288, "version 3: 1 rows"),
        (480, 288, "version 3: 1 rows"),
        (768, 192, "step 4"),
    ]


def test_a_request_that_continues_with_a_newer_version_changes_its_colour() -> None:
    records: list[Event | Action] = [
        EngineJoined(0, 4, 2),
        Generate(0, 3, (FIRST,)),
        Loaded(0, 4, "v4"),
        RequestFinished(0, FIRST, 4, 80, (Chunk(3, "v3", 40), Chunk(4, "v4", 40)), "stop"),
    ]
    spans = fold((JournalLine(seq, seq, record) for seq, record in enumerate(records)), breaks_c1=True)
    tips = [tip for _, _, tip in boxes(timeline_svg(spans, "a run"))]
    assert tips == ["version 3: 1 rows", "version 4: 1 rows"]


def test_a_migration_is_an_arrow_between_its_engines() -> None:
    assert re.findall(r"<title>(version [^<]+)</title></path>", timeline_svg(make_spans(), "a run")) == [
        "version 3: 1 from engine 0 to 1"
    ]


def test_a_line_chart_has_every_point_and_a_line_for_each_name() -> None:
    svg = throughput_svg([("dora", 2, 30.0), ("dora", 0, 10.0), ("sync & <split>", 0, 5.0)])
    ElementTree.fromstring(svg)
    assert svg.count("<circle") == 3
    assert "sync &amp; &lt;split&gt;" in svg


@pytest.mark.parametrize("svg", [timeline_svg(make_spans(), "a"), throughput_svg([("a", 1, 1.0)])])
def test_a_drawing_refers_to_no_external_resource(svg: str) -> None:
    assert re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?(?!#)", svg) == []
    assert svg.count("http") == svg.count("http://www.w3.org/2000/svg")


def test_the_command_draws_a_simulated_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lanes, plot = tmp_path / "lanes.svg", tmp_path / "plot.svg"
    command = (
        "simulate run --model qwen2.5-7b --devices 8 --batch-size 2 --group-size 2 --steps 9 --tp 1 "
        "--policies dora"
    )
    app(f"{command} -S 1,2 --timeline {lanes} --plot {plot}".split(), standalone_mode=False)
    capsys.readouterr()
    assert len({tip.split(":")[0] for _, _, tip in boxes(lanes.read_text()) if "version" in tip}) > 3
    assert plot.read_text().count("<circle") == 2
