"""Style that a machine can check: short functions, module docstrings, tests without mocks and sleeps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "examples", "benchmarks", "docs")
CODE = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
TEXT = [
    path
    for pattern in ("*.md", "*.toml", "*.txt", "Makefile", ".ci/*", ".*.yaml", "*.yml", "docs/**/*.*")
    for path in ROOT.glob(pattern)
    if path.suffix not in {".pyc", ".png"}
] + [path for path in ROOT.glob("examples/**/*") if path.suffix in {".toml", ".jsonl", ".json", ".md"}]

MAX_FUNCTION_LINES = 60
SHAPELESS_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
LEFT_BEHIND = re.compile("|".join(("TO" + "DO", "FIX" + "ME")))
PLACE_OF_ONE_MACHINE = re.compile(r"(?<![\w.:])/(?:" + "|".join(("work", "root", "opt")) + ")/")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_functions_are_short() -> None:
    for path in CODE:
        for function in functions(parse(path)):
            assert function.end_lineno is not None
            num_lines = function.end_lineno - function.body[0].lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{name_of(path)}: {function.name}"


def test_every_module_says_what_it_is_for() -> None:
    source = [path for path in CODE if path.is_relative_to(ROOT / "src")]
    assert [name_of(path) for path in source if not ast.get_docstring(parse(path))] == []


def test_every_name_says_something() -> None:
    names = {path: {*path.relative_to(ROOT).parts[:-1], path.stem} for path in CODE}
    assert [name_of(path) for path, parts in names.items() if parts & SHAPELESS_NAMES] == []


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=name_of)
def test_tests_neither_mock_nor_sleep(path: Path) -> None:
    may_sleep = path.is_relative_to(ROOT / "tests" / "runtime")
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = source + alias.name
                assert not name.startswith(("unittest.mock", "mock", "pytest_mock")), f"line {node.lineno}"
        if isinstance(node, ast.Call) and not may_sleep:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            assert called != "sleep", f"line {node.lineno}"


def test_nothing_is_left_for_later_and_nothing_names_one_machine() -> None:
    for path in CODE + TEXT:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            assert not LEFT_BEHIND.search(line), f"{name_of(path)}, line {number}"
            assert not PLACE_OF_ONE_MACHINE.search(line), f"{name_of(path)}, line {number}"
