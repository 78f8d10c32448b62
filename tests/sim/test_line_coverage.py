"""The swarm reaches every line of the rules, and every mark: it does not test what no world reaches."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dora.core
from dora.core import codec
from dora.sim.coverage import MARKS
from dora.sim.swarm import run_world

NUM_SEEDS = 1_000
# They reach lines and marks that few worlds reach; without them the test only takes longer.
RARE_SEEDS = (346, 116, 138, 54, 48, 47, 33, 39, 85, 89)
CORE = Path(dora.core.__file__).parent
# Not rules: journals and waits have their own tests, and a correct world breaks no invariant.
NO_RULES = {"codec.py", "invariants.py", "wait_graph.py"}
# Lines that no correct world reaches, beside every `raise`.
UNREACHED = {
    ("admission.py", "continue"),  # requests that wait and free rows of one version never coexist here
    ("index.py", "return None"),  # an empty ranking is deleted by its owner
    ("types.py", 'epoch, row = text.split("/")'),  # names of groups are read by other packages
    ("types.py", "return cls(int(epoch), int(row))"),
}

Key = tuple[str, int, str]  # file, first line, name of a function


def functions(code: CodeType) -> Iterator[CodeType]:
    """All functions defined in a module, also nested ones; class bodies run at import."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: no class body
                yield constant
            yield from functions(constant)


def lines_of_raises(source: str) -> set[int]:
    raises = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))
    return {line for node in raises for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def lines_to_reach(path: Path) -> dict[Key, set[int]]:
    """The lines of each function, without its head and without `raise`."""
    source = path.read_text()
    raises = lines_of_raises(source)
    return {
        (str(path), code.co_firstlineno, code.co_name): {
            line for _, _, line in code.co_lines() if line and line > code.co_firstlineno
        }
        - raises
        for code in functions(compile(source, str(path), "exec"))
    }


class LineTracer:
    """Removes lines as they run; a function with none left is not traced any more."""

    def __init__(self) -> None:
        self.missing: dict[Key, set[int]] = {}
        for path in CORE.glob("*.py"):
            if path.name not in NO_RULES:
                self.missing |= lines_to_reach(path)

    def on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        lines = self._lines(frame.f_code)
        return self.on_line if lines else None

    def on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        lines = self._lines(frame.f_code)
        lines.discard(frame.f_lineno)
        return self.on_line if lines else None

    def unreached(self) -> set[tuple[str, str]]:
        """File and text of the missing lines."""
        missing = {(path, line) for (path, _, _), lines in self.missing.items() for line in lines}
        return {(Path(path).name, linecache.getline(path, line).strip()) for path, line in missing}

    def _lines(self, code: CodeType) -> set[int]:
        return self.missing.get((code.co_filename, code.co_firstlineno, code.co_name), set())


def test_every_line_of_the_rules_and_every_mark_is_reached() -> None:
    tracer, before = LineTracer(), sys.gettrace()
    marks: set[str] = set()
    codec._type_hints.cache_clear()  # filled by other tests
    is_line_missing = True
    try:
        for index, seed in enumerate((*RARE_SEEDS, *range(NUM_SEEDS))):
            if is_line_missing and index % 10 == 0:
                is_line_missing = tracer.unreached() != UNREACHED
            sys.settrace(tracer.on_call if is_line_missing else before)
            marks |= {name for name in run_world(seed).coverage if ": " in name}
            if marks == {*MARKS} and not is_line_missing:
                break
    finally:
        sys.settrace(before)
    assert tracer.unreached() - UNREACHED == set()
    assert UNREACHED - tracer.unreached() == set(), "these lines are reached"
    assert {*MARKS} - marks == set(), "no world reaches these situations"
    assert marks - {*MARKS} == set(), "these are not in MARKS"
