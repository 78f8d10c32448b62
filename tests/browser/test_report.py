"""The controls of the report in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.journal.recorded_runs import record_run, world_config
from tests.journal.story import write_story

from dora.report import page as report
from dora.report.data import run_data

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

NUM_GROUPS = 15  # that the sample browser shows at first
IS_PAINTED = """
(canvas) => {
  const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < all.length; i += 4) seen.add(all.slice(i, i + 4).join());
  return seen.size;
}
"""


def wait_for_count(locator: Locator, number: int) -> None:
    """Content that is inserted on demand may come a moment later."""
    from playwright.sync_api import expect

    expect(locator).to_have_count(number)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps with lost engines, migrations, filtered and failed groups, and a rising reward."""
    run = record_run(tmp_path_factory.mktemp("report") / "run", world_config(), seed=0)
    lines = [{"step": step, "t_s": 2.0 * step, "reward/mean": step / 8} for step in range(8)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    out = run.parent / "report.html"
    out.write_text(report.render_page([run_data(run)]), encoding="utf-8")
    return out


@pytest.fixture
def opened(page: Page, file: Path) -> Page:
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready=true]")
    return page


def test_the_page_makes_no_network_requests(page: Page, file: Path) -> None:
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready=true]")
    assert [url for url in urls if not url.startswith(("file:", "data:"))] == []


def test_the_timeline_is_painted_in_the_colours_of_the_versions(opened: Page) -> None:
    canvas = opened.locator("#timeline-0")
    canvas.scroll_into_view_if_needed()
    opened.wait_for_function(f"({IS_PAINTED})(document.querySelector('#timeline-0')) > 5")
    opened.select_option("#colour-0", "age")
    assert "newest version" in opened.locator("#engines .legend").first.inner_text()
    assert canvas.evaluate(IS_PAINTED) > 3


def test_the_tooltip_describes_what_is_under_the_pointer(opened: Page) -> None:
    canvas = opened.locator("#timeline-0")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 60, "y": 65})
    assert "engine 0" in opened.locator("#tip").inner_text()


def test_the_horizontal_axis_can_be_chosen(opened: Page) -> None:
    chart = opened.locator("#learning figure", has_text="Reward in training")
    for axis, name in (
        ("time", "s since the run started"),
        ("samples", "trained samples"),
        ("steps", "step"),
    ):
        opened.get_by_role("button", name=axis, exact=True).click()
        chart.locator("svg[role=img] text", has_text=re.compile(f"^{name}$")).wait_for()


def test_a_chart_is_announced_point_by_point(opened: Page) -> None:
    opened.locator("#learning figure", has_text="Reward in training").locator("svg[role=img]").focus()
    announced = []
    for _ in range(2):
        opened.keyboard.press("ArrowRight")
        announced.append(opened.locator("#announcer").text_content())
    assert announced == ["step 1\nReward in training: 0", "step 2\nReward in training: 0.125"]


def test_a_chart_can_be_shown_as_a_table(opened: Page) -> None:
    chart = opened.locator("#learning figure", has_text="Reward in training")
    chart.locator("summary").click()
    wait_for_count(chart.locator("tbody tr"), 8)  # inserted when it is opened


def test_responses_are_inserted_when_their_group_is_opened(opened: Page) -> None:
    groups = opened.locator("#samples details.group")
    assert groups.count() == NUM_GROUPS
    assert groups.first.locator("pre").count() == 0
    groups.first.locator("summary").first.click()
    wait_for_count(groups.first.locator(".response"), 2)
    opened.locator("#samples").get_by_role("button", name="Show 15 more").focus()
    opened.keyboard.press("Enter")
    assert groups.count() > NUM_GROUPS


def test_groups_can_be_filtered_by_text_and_tag(opened: Page, run: Path) -> None:
    found = run_data(run)["samples"]["groups"]
    opened.locator("#search-0").fill(found[3]["group"])
    assert opened.locator("#samples details.group code").first.inner_text() == found[3]["group"]
    opened.locator("#search-0").fill("")
    opened.select_option("#only-0", "failed")
    num_failed = sum("failed" in g["tags"] for g in found)
    wait_for_count(opened.locator("#samples details.group"), num_failed)


def test_the_meaning_of_a_tag_is_shown(opened: Page) -> None:
    opened.select_option("#only-0", "failed")
    assert (
        opened.locator("#samples p[role=status]")
        .inner_text()
        .endswith("Failed: a response was rejected or could not be scored.")
    )


def test_the_legend_of_a_smoothed_curve_names_both_lines(opened: Page) -> None:
    chart = opened.locator("#learning figure", has_text="Reward in training")
    assert chart.locator(".legend li").all_inner_texts() == ["running mean", "each step"]


def test_all_cards_of_runs_have_the_same_width(page: Page, run: Path) -> None:
    file = run.parent / "four.html"
    file.write_text(report.render_page([run_data(run)] * 4), encoding="utf-8")
    page.goto(file.as_uri())
    cards = page.locator("#glance .runs > li")
    widths = [round(box["width"]) for card in cards.all() if (box := card.bounding_box())]
    assert len(widths) == 4
    assert len({*widths}) == 1


def test_the_history_of_a_request_is_shown(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report.render_page([run_data(write_story(tmp_path / "run"))]), encoding="utf-8")
    page.goto(file.as_uri())
    page.locator("#samples details.group summary").first.click()
    page.locator("#samples .response summary").first.click()
    assert "migrated from engine 1 to engine 0" in page.locator("#samples .response ol").first.inner_text()


def test_a_chat_prompt_is_shown_by_turns_with_their_roles(page: Page, tmp_path: Path) -> None:
    data, file = run_data(write_story(tmp_path / "run")), tmp_path / "report.html"
    data["samples"]["groups"][0]["prompt"] = [("system", "Be brief."), ("user", "What is 6 x 7?")]
    file.write_text(report.render_page([data]), encoding="utf-8")
    page.goto(file.as_uri())
    page.locator("#search-0").fill("what is 6 x 7")
    page.locator("#samples details.group summary").first.click()
    turns = page.locator("#samples .turn").all_inner_texts()
    assert [turn.split("\n") for turn in turns] == [["system", "Be brief."], ["user", "What is 6 x 7?"]]


def test_runs_of_the_same_name_have_different_labels(page: Page, run: Path, tmp_path: Path) -> None:
    other = write_story(tmp_path / "run")
    file = tmp_path / "report.html"
    file.write_text(report.render_page([run_data(run), run_data(other)]), encoding="utf-8")
    page.goto(file.as_uri())
    names = page.locator("#glance .runs strong").all_inner_texts()
    assert len({*names}) == 2
    assert all(name.endswith("/run") for name in names)


def open_run(page: Page, folder: Path, evaluations: list[dict[str, float]], **summary: float) -> Page:
    """Open the report of a run that has these evaluations, and these values in its summary."""
    data = run_data(write_story(folder / "run")) | {"evaluations": evaluations, "summary": summary}
    columns = {"step": [0, 1], "t_s": [1.0, 4.0], "timing_s/step": [1.0, 3.0], "reward/mean": [0.5, 1.5]}
    columns["rollout/utilization"] = [0.2, 0.4]
    data["metrics"] |= {"num": 2, "columns": columns}
    (folder / "report.html").write_text(report.render_page([data]), encoding="utf-8")
    page.goto((folder / "report.html").as_uri())
    page.wait_for_selector("body[data-ready=true]")
    return page


def figures_at_a_glance(page: Page) -> dict[str, str]:
    names, values = (page.locator(f"#glance dl {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def evaluation_of(version: int, reward: float, passed: float) -> dict[str, float]:
    return {"version": version, "reward_mean": reward, "pass@1": passed, "t_s": 1.0 + version}


@pytest.mark.parametrize(
    ("evaluations", "name", "value", "chart"),
    [
        ([(0.25, 0.25), (0.75, 0.75)], "Held-out accuracy, sampled", "25 % → 75 %", "Accuracy on held-out"),
        ([(1.5, 0.1), (2.25, 0.2)], "Held-out reward, sampled", "1.5 → 2.25", "Reward on held-out"),
        ([(0.32, 0.32)], "Held-out accuracy, sampled", "32 % at version 0", "Accuracy on held-out"),
        ([], None, None, "Reward in training"),
    ],
)
def test_only_rewards_of_0_and_1_are_an_accuracy(
    page: Page,
    tmp_path: Path,
    evaluations: list[tuple[float, float]],
    name: str | None,
    value: str | None,
    chart: str,
) -> None:
    found = [evaluation_of(k, *values) for k, values in enumerate(evaluations)]
    opened = open_run(page, tmp_path, found)
    shown = figures_at_a_glance(opened)
    assert [(n, v.replace("\u00a0", " ")) for n, v in shown.items() if n.startswith("Held-out")] == (
        [(name, value)] if name else []
    )
    first = opened.locator("#learning figure").first
    assert first.inner_text().startswith(chart)
    assert "eval.path" not in first.inner_text()


@pytest.mark.parametrize(
    ("num", "described"), [(1, "sampled is 25 % at version 0"), (2, "sampled goes from 25 % to 75 %")]
)
def test_a_chart_of_one_evaluation_is_not_described_as_a_change(
    page: Page, tmp_path: Path, num: int, described: str
) -> None:
    opened = open_run(page, tmp_path, [evaluation_of(k, *[0.25 + 0.5 * k] * 2) for k in range(num)])
    chart = opened.locator("#learning figure").first.locator("svg[role=img]")
    assert chart.get_attribute("aria-label") == f"Held-out accuracy: {described}"


@pytest.mark.parametrize(("summary", "value"), [({"rollout_utilization": 0.281}, "28 %"), ({}, "35 %")])
def test_the_utilisation_is_that_of_the_summary_or_of_the_steps_so_far(
    page: Page, tmp_path: Path, summary: dict[str, float], value: str
) -> None:
    shown = figures_at_a_glance(open_run(page, tmp_path, [], **summary))
    assert shown["Rollout utilisation"].startswith(value)
