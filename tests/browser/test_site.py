"""The documentation site: its search works without a server, and a phone shows its tables and code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from tests.browser.contrast import script

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

ROOT = Path(__file__).parents[2]
# mkdocs.yml with few pages: the whole site takes many seconds to build.
SMALL = """
site_name: Small
use_directory_urls: false
theme:
  name: material
  font: false
  features: [content.code.copy]
  palette:
    - {media: "(prefers-color-scheme: light)", scheme: default}
    - {media: "(prefers-color-scheme: dark)", scheme: slate}
plugins: [search, offline]
extra: {polyfills: [iframe-worker.js]}
extra_css: [site.css]
markdown_extensions: [tables, pymdownx.highlight, pymdownx.superfences]
"""
WIDE = f"""# Wide

    dora train examples/gcd.toml {"--set trainer.lr=1e-4 " * 8}

| name | {" | ".join(f"measured{k}" for k in range(9))} |
| --- {"| --- " * 9} |
| `reward/mean` {"| 1,000,000 " * 9} |
"""
PHONE: ViewportSize = {"width": 390, "height": 844}
LAPTOP: ViewportSize = {"width": 1280, "height": 800}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    docs = folder / "docs"
    docs.mkdir()
    for name in ("iframe-worker.js", "site.css"):
        shutil.copy(ROOT / "docs" / name, docs)
    (docs / "index.md").write_text("# Beginning\n\nNothing is said here.\n")
    (docs / "other.md").write_text("# The bound\n\nStaleness is bounded by admission.\n")
    (docs / "wide.md").write_text(WIDE)
    (folder / "mkdocs.yml").write_text(SMALL)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder / "site"


def test_the_search_needs_no_server(page: Page, site: Path) -> None:
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.locator("input[name=query]").press_sequentially("admission")
    found = page.locator(".md-search-result__link").first
    found.wait_for()
    assert "The bound" in found.inner_text()


def test_the_site_has_the_options_of_the_small_one() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    options = ("  - offline\n", "    - iframe-worker.js ", "use_directory_urls: false\n")
    for part in (*options, "    - content.code.copy\n", "  - site.css\n"):
        assert part in config


@pytest.mark.parametrize("size", [PHONE, LAPTOP], ids=["phone", "laptop"])
def test_the_button_that_copies_stands_beside_the_code(page: Page, site: Path, size: ViewportSize) -> None:
    page.set_viewport_size(size)
    page.goto((site / "wide.html").as_uri())
    button, code = page.locator(".md-code__button").bounding_box(), page.locator("pre code").bounding_box()
    assert button is not None
    assert code is not None
    assert code["x"] + code["width"] <= button["x"]
    assert button["x"] + button["width"] <= size["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_button_that_copies_can_be_seen(page: Page, site: Path, scheme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto((site / "wide.html").as_uri())
    assert (
        page.locator(".md-code__button").evaluate(script("return contrast(e, 'color')", "e")) > 3
    )  # WCAG 2.2, of what is no text


def test_a_wide_table_scrolls_in_its_own_box_and_an_edge_is_marked(page: Page, site: Path) -> None:
    page.set_viewport_size(PHONE)
    page.goto((site / "wide.html").as_uri())
    box = page.locator(".md-typeset__scrollwrap")
    assert "gradient" in box.evaluate("e => getComputedStyle(e).backgroundImage")
    assert page.locator("article table").evaluate("e => getComputedStyle(e).backgroundColor").endswith(", 0)")
    last = page.locator("article td").last
    right = "e => e.getBoundingClientRect().right"
    assert last.evaluate(right) > PHONE["width"]
    box.evaluate("e => { e.scrollLeft = e.scrollWidth }")
    assert last.evaluate(right) <= PHONE["width"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
