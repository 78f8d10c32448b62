"""Pages agree with the code: no key, metric or number is missing, unknown, or out of date."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.making import benchmarks, gallery, tables
from tests.docs.blocks import ROOT

from dora.config.schema import iter_keys
from dora.core.events import GroupScored
from dora.core.types import GroupId
from dora.metrics.catalog import SECTIONS, MetricDoc
from dora.metrics.evaluation import EvaluationResult

DOCS = ROOT / "docs"


def metrics_of(key: str) -> tuple[MetricDoc, ...]:
    return next(part.metrics for part in SECTIONS if part.key == key)


def test_tables_on_the_pages_are_those_of_the_code() -> None:
    """If not: python -m docs.making.tables"""
    known = tables.tables()
    pages = {page: page.read_text(encoding="utf-8") for page in tables.pages()}
    assert [page.name for page, text in pages.items() if tables.written(text, known) != text] == []
    shown = {name for text in pages.values() for _, name, _ in tables.MARKED.findall(text)}
    assert shown == known.keys()


def test_the_curves_of_the_gallery_are_those_of_the_benchmark() -> None:
    """If not: python -m docs.making.tables"""
    shown = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "images").glob("gallery-*.svg")}
    assert shown == gallery.pictures()


def test_every_config_key_is_on_its_page() -> None:
    page = (DOCS / "config.md").read_text(encoding="utf-8")
    assert [f"{section}.{key}" for section, key, _ in iter_keys() if f"| `{key}` |" not in page] == []


def test_documented_evaluation_metrics_are_those_of_an_evaluation() -> None:
    evaluation = EvaluationResult(
        7, num_prompts=2, num_responses=3, is_greedy=True, sources={"easy": range(1), "hard": range(1, 2)}
    )
    for prompt in range(2):
        evaluation.update(GroupScored(GroupId(-8, prompt), (1.0, 0.0, 1.0)))
        evaluation.task_rewards[GroupId(-8, prompt)] = {"looks": (1.0, 0.0, 1.0)}
    evaluation.lengths.append(3)
    evaluation.finish()
    measured, documented = evaluation.metrics(), metrics_of("evaluation")
    assert [name for name in measured if not any(metric.matches(name) for metric in documented)] == []
    names = [name for metric in documented for name in metric.names]
    assert [name for name in names if not any(map(MetricDoc((name,), "", "").matches, measured))] == []


def test_conditional_metrics_are_in_the_code() -> None:
    """Unconditional ones are compared with a whole run, in tests/runs."""
    texts = {
        node.value
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    written = texts | {f"off_policy{text}" for text in texts if text.startswith("/")}
    names = [
        n for key in ("training", "trainer", "timing") for m in metrics_of(key) if m.only for n in m.names
    ]
    begins = [re.split(r"NAME|(?<=_)N$", name)[0] for name in names]
    assert [begin for begin in begins if begin not in written] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def test_every_result_has_a_page_with_its_ratios_and_is_named_on_the_overview() -> None:
    overview = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    for name in benchmarks.pages():
        assert f"`{name}`" in overview
        page = benchmarks.page(name)
        for ratio in json.loads((benchmarks.RESULTS / f"{name}.json").read_text())["ratios"]:
            assert f"| {ratio} |" in page


def test_numbers_are_formatted_with_four_significant_digits() -> None:
    assert [benchmarks.figure(value) for value in (1.0, 0.12345, 12345.6, 7, "a|b", None, True)] == [
        *("1", "0.1235", "12,346", "7", "a\\|b", "", "True")
    ]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """mkdocs.yml is strict: a broken link or anchor is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (made.returncode, made.stdout + made.stderr) == (0, "")
    pages = {str(page.relative_to(tmp_path / "site")) for page in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "benchmarks/placement.html", "source/src/dora/core/bound.py.html"} <= pages
    scripts = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"(?:src|<link[^>]* href)=\"?https?://[^\s\">]+", scripts) == []
