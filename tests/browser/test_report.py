"""The report in a real browser: what a reader does with it has the effect it should have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.observe.recording import record_run, world_config
from tests.observe.story import write_story

from dora.observe.report import page as report
from dora.observe.report.reading import run_data

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

NUM_GROUPS = 15  # that the browser of answers shows at first
IS_PAINTED = """
(canvas) => {
  const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < all.length; i += 4) seen.add(all.slice(i, i + 4).join());
  return seen.size;
}
"""


def wait_for_count(locator: Locator, number: int) -> None:
    """What is written once something is open may come a moment later."""
    from playwright.sync_api import expect

    expect(locator).to_have_count(number)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps with losses, moves, filtered and failed groups, and a reward that rises."""
    run = record_run(tmp_path_factory.mktemp("report") / "run", world_config(), seed=0)
    lines = [{"step": step, "t_s": 2.0 * step, "reward/mean": step / 8} for step in range(8)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    out = run.parent / "report.html"
    out.write_text(report.page([run_data(run)]), encoding="utf-8")
    return out


@pytest.fixture
def opened(page: Page, file: Path) -> Page:
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready=true]")
    return page


def test_nothing_is_asked_of_any_network(page: Page, file: Path) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready=true]")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_the_timeline_is_painted_in_the_colours_of_the_versions(opened: Page) -> None:
    canvas = opened.locator("#timeline-0")
    canvas.scroll_into_view_if_needed()
    opened.wait_for_function(f"({IS_PAINTED})(document.querySelector('#timeline-0')) > 5")
    opened.select_option("#colour-0", "age")
    assert "newest version" in opened.locator("#engines .legend").first.inner_text()
    assert canvas.evaluate(IS_PAINTED) > 3


def test_what_lies_under_the_pointer_is_told(opened: Page) -> None:
    canvas = opened.locator("#timeline-0")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 60, "y": 65})
    assert "engine 0" in opened.locator("#tip").inner_text()


def test_curves_are_drawn_over_what_the_reader_chooses(opened: Page) -> None:
    chart = opened.locator("#learning figure", has_text="Reward in training")
    for axis, name in (("time", "s since the run began"), ("samples", "trained samples"), ("steps", "step")):
        opened.get_by_role("button", name=axis, exact=True).click()
        chart.locator("svg[role=img] text", has_text=re.compile(f"^{name}$")).wait_for()


def test_a_chart_is_read_out_point_by_point(opened: Page) -> None:
    opened.locator("#learning figure", has_text="Reward in training").locator("svg[role=img]").focus()
    said = []
    for _ in range(2):
        opened.keyboard.press("ArrowRight")
        said.append(opened.locator("#say").text_content())
    assert said == ["step 1\nReward in training: 0", "step 2\nReward in training: 0.125"]


def test_the_numbers_behind_a_chart_can_be_opened(opened: Page) -> None:
    chart = opened.locator("#learning figure", has_text="Reward in training")
    chart.locator("summary").click()
    wait_for_count(chart.locator("tbody tr"), 8)  # written once it is open


def test_answers_are_written_into_the_page_only_when_they_are_looked_at(opened: Page) -> None:
    groups = opened.locator("#samples details.group")
    assert groups.count() == NUM_GROUPS
    assert groups.first.locator("pre").count() == 0
    groups.first.locator("summary").first.click()
    wait_for_count(groups.first.locator(".answer"), 2)
    opened.locator("#samples").get_by_role("button", name="Show 15 more").focus()
    opened.keyboard.press("Enter")
    assert groups.count() > NUM_GROUPS


def test_answers_are_found_by_text_and_by_kind(opened: Page, run: Path) -> None:
    told = run_data(run)["samples"]["groups"]
    opened.locator("#search-0").fill(told[3]["group"])
    assert opened.locator("#samples details.group code").first.inner_text() == told[3]["group"]
    opened.locator("#search-0").fill("")
    opened.select_option("#only-0", "failed")
    num_failed = sum("failed" in g["kinds"] for g in told)
    wait_for_count(opened.locator("#samples details.group"), num_failed)


def test_what_a_filter_of_answers_means_is_said(opened: Page) -> None:
    opened.select_option("#only-0", "failed")
    assert (
        opened.locator("#samples p[role=status]")
        .inner_text()
        .endswith("Left out, for an answer was refused or could not be judged.")
    )


def test_the_legend_of_a_smoothed_curve_tells_its_lines_apart(opened: Page) -> None:
    chart = opened.locator("#learning figure", has_text="Reward in training")
    assert chart.locator(".legend li").all_inner_texts() == ["running mean", "each step"]


def test_a_card_of_a_run_is_no_wider_than_the_others(page: Page, run: Path) -> None:
    file = run.parent / "four.html"
    file.write_text(report.page([run_data(run)] * 4), encoding="utf-8")
    page.goto(file.as_uri())
    cards = page.locator("#glance .runs > li")
    widths = [round(box["width"]) for card in cards.all() if (box := card.bounding_box())]
    assert len(widths) == 4
    assert len({*widths}) == 1


def test_the_life_of_an_answer_is_told(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report.page([run_data(write_story(tmp_path / "run"))]), encoding="utf-8")
    page.goto(file.as_uri())
    page.locator("#samples details.group summary").first.click()
    page.locator("#samples .answer summary").first.click()
    assert "moved from engine 1 to engine 0" in page.locator("#samples .answer ol").first.inner_text()


def test_runs_of_one_name_are_told_apart(page: Page, run: Path, tmp_path: Path) -> None:
    other = write_story(tmp_path / "run")
    file = tmp_path / "report.html"
    file.write_text(report.page([run_data(run), run_data(other)]), encoding="utf-8")
    page.goto(file.as_uri())
    names = page.locator("#glance .runs strong").all_inner_texts()
    assert len({*names}) == 2
    assert all(name.endswith("/run") for name in names)
