"""SVG drawings: a timeline of events and actions, a line chart, and no external resources."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dora.cli.main import app
from dora.core.actions import Generate, Train
from dora.core.events import Migrated, RequestFinished, Trained
from dora.core.types import Chunk, RequestId
from dora.planner.svg import COLOURS, TimelineDrawing, line_chart_svg, timeline_svg

FIRST, SECOND = RequestId(0, 0, 0), RequestId(0, 0, 1)


def make_timeline() -> TimelineDrawing:
    """Engine 0 runs two requests of version 3; one migrates to engine 1; both end; a step is trained."""
    timeline = TimelineDrawing()
    timeline.add(0.0, Generate(0, 3, (FIRST, SECOND)))
    timeline.add(5.0, Migrated(SECOND, 0, 1, 50, 1000, 0.1, 0.01))
    for engine, request in ((0, FIRST), (1, SECOND)):
        timeline.add(8.0, RequestFinished(engine, request, 3, 80, (Chunk(3, "v3", 80),), "stop"))
    timeline.add(8.0, Train(3, ()))
    timeline.add(10.0, Trained(3))
    return timeline


def boxes(svg: str) -> list[tuple[float, float, str]]:
    """Left edge, width and title of each coloured box."""
    root = ElementTree.fromstring(svg)
    found = [one for one in root.iter() if one.tag.endswith("rect") and one.get("fill") in COLOURS]
    return [(float(one.get("x", 0)), float(one.get("width", 0)), one[0].text or "") for one in found]


def test_lanes_show_how_many_rows_of_which_version_ran_when() -> None:
    drawn = boxes(timeline_svg(make_timeline(), "a run"))
    assert [(round(x - 70), round(width), tip) for x, width, tip in drawn] == [
        (0, 480, "version 3: 2 rows"),
        (480, 288, "version 3: 1 rows"),
        (480, 288, "version 3: 1 rows"),
        (768, 192, "step 4"),
    ]


def test_a_migration_is_an_arrow_between_its_engines() -> None:
    assert re.findall(r"<title>(version [^<]+)</title></path>", timeline_svg(make_timeline(), "a run")) == [
        "version 3: 1 from engine 0 to 1"
    ]


def test_a_line_chart_has_every_point_and_a_line_for_each_name() -> None:
    svg = line_chart_svg({"dora": [(2, 30), (0, 10)], "sync & <split>": [(0, 5)]}, "S", "tokens/s", "plot")
    ElementTree.fromstring(svg)
    assert svg.count("<circle") == 3
    assert "sync &amp; &lt;split&gt;" in svg


@pytest.mark.parametrize(
    "svg", [timeline_svg(make_timeline(), "a"), line_chart_svg({"a": [(1, 1)]}, "x", "y", "b")]
)
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
