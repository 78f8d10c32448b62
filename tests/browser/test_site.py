"""The search of the documentation site works without a server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
# The plugins of mkdocs.yml with two pages: the whole site takes many seconds to build.
SMALL = """
site_name: Small
use_directory_urls: false
theme: {name: material, font: false}
plugins: [search, offline]
extra: {polyfills: [iframe-worker.js]}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    pytest.importorskip("material", reason="needs the extra docs")
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "docs" / "iframe-worker.js", docs)
    (docs / "index.md").write_text("# Beginning\n\nNothing is said here.\n")
    (docs / "other.md").write_text("# The bound\n\nStaleness is bounded by admission.\n")
    (tmp_path / "mkdocs.yml").write_text(SMALL)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return tmp_path / "site"


def test_the_search_needs_no_server(page: Page, site: Path) -> None:
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.locator("input[name=query]").press_sequentially("admission")
    found = page.locator(".md-search-result__link").first
    found.wait_for()
    assert "The bound" in found.inner_text()


def test_the_site_has_the_plugins_of_the_small_one() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for part in ("  - offline\n", "    - iframe-worker.js ", "use_directory_urls: false\n"):
        assert part in config
