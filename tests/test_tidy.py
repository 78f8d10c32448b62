"""Taste, held by machine: short files, short functions, said what they are, nothing left lying about."""

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
    if path.suffix != ".pyc"
] + [path for path in ROOT.glob("examples/**/*") if path.suffix in {".toml", ".jsonl", ".json", ".md"}]

MAX_FILE_LINES = 400
MAX_CORE_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_ENGINE_LINES = 3000  # of engine and model together, without blank lines, comments and docstrings
DOCSTRING_LINES = range(2, 9)
SHAPELESS_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
LEFT_BEHIND = re.compile("|".join(("TO" + "DO", "FIX" + "ME")))
PLACE_OF_ONE_MACHINE = re.compile(r"(?<![\w.:])/(?:" + "|".join(("work", "root", "opt")) + ")/")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def in_core(path: Path) -> bool:
    return path.is_relative_to(ROOT / "src" / "dora" / "core")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_are_short() -> None:
    for path in CODE:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        assert num_lines <= (MAX_CORE_FILE_LINES if in_core(path) else MAX_FILE_LINES), name_of(path)


def test_functions_are_short() -> None:
    for path in CODE:
        for function in functions(parse(path)):
            assert function.end_lineno is not None
            num_lines = function.end_lineno - function.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{name_of(path)}: {function.name}"


def num_code_lines(path: Path) -> int:
    text, tree = path.read_text(encoding="utf-8"), parse(path)
    told: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            told.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return sum(bool(line) and not line.startswith("#") and number not in told for number, line in lines)


def test_the_engine_can_be_read_in_an_afternoon() -> None:
    rooms = (ROOT / "src" / "dora" / "engine", ROOT / "src" / "dora" / "model")
    num_lines = sum(num_code_lines(path) for room in rooms for path in room.rglob("*.py"))
    assert num_lines <= MAX_ENGINE_LINES


def test_a_module_says_what_it_is_in_two_to_eight_lines() -> None:
    docstrings = {
        name_of(path): ast.get_docstring(parse(path)) or ""
        for path in CODE
        if path.is_relative_to(ROOT / "src")
    }
    lengths = {name: len(docstring.splitlines()) for name, docstring in docstrings.items()}
    assert {name: num for name, num in lengths.items() if num not in DOCSTRING_LINES} == {}


def test_no_name_is_a_drawer_for_anything() -> None:
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
