"""The page of `dora dash` in a browser: it follows the run and keeps the state of the user."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.journal.recorded_runs import record_run, world_config
from tests.report.live_runs import append, half_of, journal, rest_of, served

if TYPE_CHECKING:
    from playwright.sync_api import Page

READY = "body[data-ready=true]"
LOST, LIVE, ENDED = "[data-state=lost]", "[data-state=live]", "[data-state=ended]"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("runs") / "whole", world_config(), seed=0)


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    """A copy whose journal ends in the middle."""
    return half_of(whole_run, tmp_path / "run")


def open_page(page: Page, url: str) -> None:
    """Open the page and wait until it is drawn and has fetched its data again."""
    with page.expect_response("**/data"):
        page.goto(url)
    page.wait_for_selector(READY)
    page.wait_for_selector(f"#live{LIVE}")


def shown(page: Page) -> str:
    """The figures at the top: the steps trained, among others."""
    return str(page.evaluate("document.querySelector('#glance').innerText"))


def wait_for_change(page: Page, before: str) -> None:
    page.wait_for_function("before => document.querySelector('#glance').innerText !== before", arg=before)


def test_the_page_shows_new_data_of_the_run(page: Page, whole_run: Path, run: Path) -> None:
    with served(run) as dashboard:
        open_page(page, dashboard.url)
        before = shown(page)
        append(run, rest_of(whole_run, run))
        wait_for_change(page, before)


def test_the_badge_shows_the_end_and_the_resume_of_a_run(page: Page, whole_run: Path, run: Path) -> None:
    rest = rest_of(whole_run, run)
    with served(run) as dashboard:
        open_page(page, dashboard.url)
        (run / "summary.json").write_text("{}")
        page.wait_for_selector(f"#live{ENDED}")
        (run / "summary.json").unlink()
        page.wait_for_selector(f"#live{LIVE}")
        append(run, rest)
        page.wait_for_selector(f"#live{LIVE}")


def test_a_run_without_events_is_shown_as_starting(page: Page, whole_run: Path, run: Path) -> None:
    """Its journal has only the header."""
    journal(run).write_text(journal(run).read_text().partition("\n")[0] + "\n")
    with served(run) as dashboard:
        open_page(page, dashboard.url)
        assert page.locator("#live").inner_text() == "● starting"
        assert "Starting: the processes load the model" in shown(page)
        assert not page.locator("#learning").is_visible()
        append(run, rest_of(whole_run, run))
        page.locator("#learning").wait_for(state="visible")
        assert page.locator("#live").inner_text() == "● live"
        assert "Starting" not in shown(page)


def test_the_audit_command_is_shown(page: Page, run: Path) -> None:
    with served(run) as dashboard:
        open_page(page, dashboard.url)
        assert page.locator("#glance .verdicts code").inner_text() == f"dora audit {run.as_posix()}"


def test_the_page_reconnects_to_a_restarted_server(page: Page, whole_run: Path, run: Path) -> None:
    rest = rest_of(whole_run, run)
    with served(run) as dashboard:
        open_page(page, dashboard.url)
        before, port, token = shown(page), dashboard.server_address[1], dashboard.token
    page.wait_for_selector(f"#live{LOST}")
    assert shown(page) == before
    append(run, rest)
    with served(run, port=port, token=token):
        page.wait_for_selector(f"#live{LIVE}")
        wait_for_change(page, before)


def test_an_update_keeps_tables_focus_and_scroll_position(page: Page, whole_run: Path, run: Path) -> None:
    with served(run) as dashboard:
        open_page(page, dashboard.url)
        table = page.locator("#staleness details[data-key]").first
        table.locator("summary").click()
        page.locator("#axis-time").click()
        page.locator("#axis-time").focus()
        page.evaluate("scrollTo(0, 600)")
        before, top = shown(page), page.evaluate("scrollY")
        append(run, rest_of(whole_run, run))
        wait_for_change(page, before)
        assert table.get_attribute("open") is not None
        assert page.locator("#axis-time").get_attribute("aria-pressed") == "true"
        assert page.evaluate("document.activeElement.id") == "axis-time"
        assert abs(page.evaluate("scrollY") - top) < 50


def test_the_page_connects_to_its_own_server_only(page: Page, run: Path) -> None:
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    with served(run) as dashboard:
        open_page(page, dashboard.url)
        assert urls
        assert [url for url in urls if not url.startswith((dashboard.url, "data:"))] == []
