"""A real browser without a window; tests that want one are skipped where there is none.

It is Chromium as the system has it, driven by Playwright from the extra `dev`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [  # nothing of its own over a network
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
]
LAPTOP = {"width": 1280, "height": 800}
WAIT_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for the tests of a file, for it takes a second to start; no longer, for Playwright has a loop of
    its own run in the thread that other tests need theirs in.
    """
    driver = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"there is no browser: none of {', '.join(NAMES)}")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a laptop's size that has no errors, whatever a test does with it."""
    errors: list[str] = []
    page = browser.new_page(viewport=LAPTOP)  # type: ignore[arg-type]
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []
