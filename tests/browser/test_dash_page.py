"""The page of `dora dash` in a real browser: it follows the run, and leaves what a reader does alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.observe.following import append, half_of, journal, rest_of, served
from tests.observe.recording import record_run, world_config

if TYPE_CHECKING:
    from playwright.sync_api import Page

READY = "body[data-ready=true]"
LOST, LIVE, ENDED = "[data-state=lost]", "[data-state=live]", "[data-state=ended]"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("runs") / "whole", world_config(), seed=0)


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    """Its journal ends in the middle."""
    return half_of(whole_run, tmp_path / "run")


def open_page(page: Page, url: str) -> None:
    """Until it is drawn, and has fetched what may have been new since."""
    with page.expect_response("**/data"):
        page.goto(url)
    page.wait_for_selector(READY)
    page.wait_for_selector(f"#live{LIVE}")


def shown(page: Page) -> str:
    """What is seen at a glance: how far the run is, among others."""
    return str(page.evaluate("document.querySelector('#glance').innerText"))


def wait_until_other(page: Page, before: str) -> None:
    page.wait_for_function("before => document.querySelector('#glance').innerText !== before", arg=before)


def test_the_page_shows_what_the_run_writes_while_it_is_open(page: Page, whole_run: Path, run: Path) -> None:
    with served(run) as dash:
        open_page(page, dash.url)
        before = shown(page)
        append(run, rest_of(whole_run, run))
        wait_until_other(page, before)


def test_the_badge_says_when_the_run_ends_and_when_it_goes_on(page: Page, whole_run: Path, run: Path) -> None:
    rest = rest_of(whole_run, run)
    with served(run) as dash:
        open_page(page, dash.url)
        (run / "summary.json").write_text("{}")
        page.wait_for_selector(f"#live{ENDED}")
        (run / "summary.json").unlink()
        page.wait_for_selector(f"#live{LIVE}")
        append(run, rest)
        page.wait_for_selector(f"#live{LIVE}")


def test_a_run_that_only_starts_is_shown_as_starting(page: Page, whole_run: Path, run: Path) -> None:
    """Its journal has no fact yet."""
    journal(run).write_text(journal(run).read_text().partition("\n")[0] + "\n")
    with served(run) as dash:
        open_page(page, dash.url)
        assert page.locator("#live").inner_text() == "● starting"
        assert "Starting: models load" in shown(page)
        assert not page.locator("#learning").is_visible()
        append(run, rest_of(whole_run, run))
        page.locator("#learning").wait_for(state="visible")
        assert page.locator("#live").inner_text() == "● live"
        assert "Starting" not in shown(page)


def test_the_command_that_audits_the_run_is_named(page: Page, run: Path) -> None:
    with served(run) as dash:
        open_page(page, dash.url)
        assert page.locator("#glance .verdicts code").inner_text() == f"dora audit {run.as_posix()}"


def test_a_server_that_goes_and_comes_back_is_found_again(page: Page, whole_run: Path, run: Path) -> None:
    rest = rest_of(whole_run, run)
    with served(run) as dash:
        open_page(page, dash.url)
        before, port, token = shown(page), dash.server_address[1], dash.token
    page.wait_for_selector(f"#live{LOST}")
    assert shown(page) == before
    append(run, rest)
    with served(run, port=port, token=token):
        page.wait_for_selector(f"#live{LIVE}")
        wait_until_other(page, before)


def test_what_a_reader_has_opened_and_where_he_is_stays(page: Page, whole_run: Path, run: Path) -> None:
    with served(run) as dash:
        open_page(page, dash.url)
        table = page.locator("#staleness details[data-key]").first
        table.locator("summary").click()
        page.locator("#axis-time").click()
        page.locator("#axis-time").focus()
        page.evaluate("scrollTo(0, 600)")
        before, top = shown(page), page.evaluate("scrollY")
        append(run, rest_of(whole_run, run))
        wait_until_other(page, before)
        assert table.get_attribute("open") is not None
        assert page.locator("#axis-time").get_attribute("aria-pressed") == "true"
        assert page.evaluate("document.activeElement.id") == "axis-time"
        assert abs(page.evaluate("scrollY") - top) < 50


def test_the_page_asks_nobody_but_its_own_server(page: Page, run: Path) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with served(run) as dash:
        open_page(page, dash.url)
        assert asked
        assert [url for url in asked if not url.startswith((dash.url, "data:"))] == []
