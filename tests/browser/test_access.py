"""Accessibility of the report: keyboard, screen reader, phone, light and dark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tests.browser.contrast import script
from tests.journal.recorded_runs import record_run, world_config

from dora.report import page as report
from dora.report.data import run_data

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE, NARROW = {"width": 390, "height": 844}, {"width": 320, "height": 640}
NUM_CHARTS = 5  # at least
MIN_CONTRAST = 4.5  # WCAG 2.2, level AA, for text of usual size
NAMES = (
    "reward/mean",
    "response_length/mean",
    "timing_s/wait_for_batch",
    "timing_s/train",
    "staleness/mean",
    "num_response_tokens",
)
SCORES = ("reward_mean", "pass@1", "pass@1_low", "pass@1_high")

# The smallest contrasts of lines in charts, light and dark. On the dark ground curves have at least 3, as
# WCAG asks of graphics. On white the orange of the palette has 2.25: dashes tell curves apart, too.
LINES = {
    "curve": (2.2, 3.0),
    "faint": (1.4, 2.5),  # each step, behind the running mean
    "baseline": (1.3, 1.9),
    "gridline": (1.15, 1.4),
}

# Text with too low a contrast: [text, colour, ratio]
FAINT = script(
    """
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    const text = texts.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || element.closest(".visually-hidden")) continue;
    const property = element.closest("svg") ? "fill" : "color", ratio = contrast(element, property);
    const colour = getComputedStyle(element)[property];
    if (ratio < minimum) found.push([text.slice(0, 40), colour, ratio.toFixed(2)]);
  }
  return found;
""",
    "minimum",
)
# The contrast of each line in a chart or its legend: [kind, ratio]
DRAWN = script("""
  const lines = [...document.querySelectorAll(".plot svg :is(path, line), .legend svg line")];
  return lines.filter((e) => e.checkVisibility() && getComputedStyle(e).stroke !== "none")
    .map((e) => [e.getAttribute("class") || "curve", contrast(e, "stroke")]);
""")
# Marks the focused element as reached; returns its HTML if the focus is not visible.
ARRIVE = """
() => {
  const element = document.activeElement, style = getComputedStyle(element);
  if (element === document.body) return "the end";
  element.dataset.reached = "true";
  const isOutlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  return isOutlined || style.boxShadow !== "none" ? "" : element.outerHTML.slice(0, 80);
}
"""
FOCUSABLE = "a[href], button, input, select, summary, [tabindex='0']"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two runs with every kind of chart."""
    folder = tmp_path_factory.mktemp("report")
    runs = [record_run(folder / f"run-{seed}", world_config(), seed) for seed in (0, 1)]
    for run in runs:
        steps = [{"step": step, "t_s": 2.0 * step} | {n: 1.0 + step % 3 for n in NAMES} for step in range(8)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        evaluation = {"version": 0} | dict.fromkeys(SCORES, 0.5)
        (run / "summary.json").write_text(json.dumps({"evaluations": [evaluation]}))
    out = folder / "report.html"
    out.write_text(report.render_page([run_data(run) for run in runs]), encoding="utf-8")
    return out


@pytest.fixture
def opened(page: Page, file: Path) -> Page:
    show(page, file)
    return page


@pytest.fixture(scope="module")
def still(browser: Browser, file: Path) -> Iterator[Page]:
    """A page for tests that do not change it."""
    page = browser.new_page()
    show(page, file)
    yield page
    page.close()


def show(page: Page, file: Path) -> None:
    """Open the file and wait until all charts are drawn."""
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready=true]")
    page.wait_for_function(f"document.querySelectorAll('svg[role=img]').length > {NUM_CHARTS}")


@pytest.fixture(params=["light", "dark"])
def coloured(request: pytest.FixtureRequest, browser: Browser, file: Path) -> Iterator[Page]:
    scheme: Literal["light", "dark"] = request.param
    page = browser.new_page(color_scheme=scheme)
    show(page, file)
    yield page
    page.close()


def described(page: Page, selector: str, script: str) -> list[Any]:
    """The results of a script for each element that a selector finds."""
    found: list[Any] = page.eval_on_selector_all(selector, f"all => all.map({script})")
    return found


def test_the_page_has_a_language_a_title_and_one_first_heading(still: Page) -> None:
    assert still.locator("html").get_attribute("lang") == "en"
    assert "DORA" in still.title()
    levels = described(still, "h1, h2, h3, h4", "e => Number(e.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_chart_and_control_has_a_name(still: Page) -> None:
    lines = still.locator("body").aria_snapshot().splitlines()
    found = [match for line in lines if (match := re.fullmatch(r"\s*- '?([a-z]+)(?: (\".*))?'?:?", line))]
    roles = [match[1] for match in found]
    assert roles.count("img") > NUM_CHARTS
    named = {"button", "combobox", "searchbox", "checkbox", "img", "region", "link"}
    assert [match[0] for match in found if match[1] in named and not match[2]] == []


def test_every_chart_has_its_numbers_in_a_table(opened: Page) -> None:
    charts = opened.locator("figure:has(svg[role=img])")
    opened.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    opened.wait_for_function("document.querySelectorAll('figure table').length > 5")
    for number in range(charts.count()):
        assert charts.nth(number).locator("table").count() > 0, charts.nth(number).inner_text()
    tables = described(opened, "table", "t => t.querySelectorAll('th[scope], thead th').length")
    assert 0 not in tables


def test_every_control_can_be_reached_by_tab_with_a_visible_focus(opened: Page) -> None:
    elements = described(opened, FOCUSABLE, "e => e.checkVisibility() && !e.disabled").count(True)
    seen = [""]
    while seen[-1] != "the end" and len(seen) < 2 * elements:
        opened.keyboard.press("Tab")
        seen.append(opened.evaluate(ARRIVE))
    assert [text for text in seen if text] == ["the end"]
    missed = "e => e.checkVisibility() && !e.disabled && !e.dataset.reached && e.outerHTML.slice(0, 80)"
    assert [element for element in described(opened, FOCUSABLE, missed) if element] == []


def test_the_first_tab_skips_the_navigation(opened: Page) -> None:
    opened.keyboard.press("Tab")
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.activeElement.id") == "main"


def test_the_timeline_can_be_moved_by_keys(opened: Page) -> None:
    opened.locator("#timeline-0").focus()
    spans = []
    for key in ("+", "ArrowRight", "Home"):
        opened.keyboard.press(key)
        spans.append(opened.locator("#announcer").inner_text())
    assert len({*spans}) == 3
    assert all(" to " in span for span in spans)


def test_text_has_enough_contrast(coloured: Page) -> None:
    coloured.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    assert coloured.evaluate(FAINT, MIN_CONTRAST) == []


def test_lines_of_charts_can_be_seen(coloured: Page) -> None:
    is_dark = coloured.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    drawn = [(kind, ratio) for kind, ratio in coloured.evaluate(DRAWN) if kind in LINES]
    assert {kind for kind, _ in drawn} == LINES.keys()
    assert [(kind, ratio) for kind, ratio in drawn if ratio < LINES[kind][is_dark]] == []


@pytest.mark.parametrize("size", [PHONE, NARROW], ids=["phone", "narrow"])
def test_a_phone_scrolls_in_one_direction_only(still: Page, size: dict[str, int]) -> None:
    still.set_viewport_size(size)  # type: ignore[arg-type]
    assert still.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_table_is_whole_on_a_phone_or_scrolls_in_its_own_box(opened: Page) -> None:
    opened.set_viewport_size(PHONE)  # type: ignore[arg-type]
    opened.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    opened.wait_for_function("document.querySelectorAll('figure table').length > 5")
    measured = "b => [b.ariaLabel, b.scrollWidth - b.clientWidth, b.getBoundingClientRect().right]"
    boxes = described(opened, ".scroll", f"({measured})")
    assert max(right for *_, right in boxes) < PHONE["width"]
    hidden = {name for name, num_hidden, _ in boxes if num_hidden > 0}
    assert "Engines of run-0" in hidden
    assert hidden.isdisjoint({"Accuracy on held-out prompts", "Lengths, run-0", "Staleness and its bound"})
    last = opened.get_by_role("region", name="Engines of run-0").locator("td").last
    last.scroll_into_view_if_needed()
    assert last.evaluate("e => e.getBoundingClientRect().right") < PHONE["width"]
