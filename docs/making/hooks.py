"""Hooks of mkdocs: pages of the site that are not files of docs/.

Files of the repository that pages link to become pages, so that the site has no link out of itself. Each JSON
file of benchmarks/results becomes a page of tables.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.making import benchmarks, sources

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)([^)]*)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a section with the pages of results to the shelf that has the page of benchmarks."""
    page = {"Benchmarks": "benchmarks.md"}
    (shelf,) = [pages for item in config.nav or [] for pages in item.values() if page in pages]
    shelf.append({"Results": [{title: path} for title, path in benchmarks.pages().items()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of results, and of every file outside of docs/ that a page links to."""
    for title, path in benchmarks.pages().items():
        files.append(File.generated(config, path, content=benchmarks.page(title)))
    wanted: set[str] = set()
    for file in files.documentation_pages():
        page = Path(file.src_uri)
        wanted |= {sources.path_of(page, target) for target, _ in LINK.findall(file.content_string)}
    for path in sorted(wanted):
        files.append(File.generated(config, f"source/{path}.md", content=sources.page(ROOT / path, path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links out of docs/ to the pages made above."""
    here = Path(page.file.src_uri)
    if here.parts[0] == "source":
        return markdown

    def inside(match: re.Match[str]) -> str:
        return f"]({'../' * (len(here.parts) - 1)}source/{sources.path_of(here, match[1])}.md)"

    return LINK.sub(inside, markdown)
