"""The swarm reaches every line of the rules: a rule that no world comes to is not tested by it."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dora.core
from dora.core import snapshot
from dora.sim.swarm import run_world

NUM_SEEDS = 300
CORE = Path(dora.core.__file__).parent
# No rules: journals are read by their own tests, no right world breaks anything, waits and words are told.
NO_RULES = {"codec.py", "invariants.py", "waits.py", "wording.py"}
# Lines that no right world reaches, beside every `raise`.
UNREACHED = {
    ("admission.py", "continue"),  # requests that wait and free rows of one version never coexist here
    ("ranking.py", "return None"),  # an empty ranking is deleted by its owner
    ("fleet.py", "def engine(self) -> int: ..."),  # a type
    ("snapshot.py", "except (KeyError, TypeError, ValueError) as error:"),  # a damaged snapshot
}

Key = tuple[str, int, str]  # file, first line, name of a function


def functions(code: CodeType) -> Iterator[CodeType]:
    """All functions defined in a module, however deep; class bodies run when they are imported."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: no class body
                yield constant
            yield from functions(constant)


def lines_of_raises(source: str) -> set[int]:
    raises = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))
    return {line for node in raises for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def lines_to_reach(path: Path) -> dict[Key, set[int]]:
    """By function: its lines, but for its head and for what raises."""
    source = path.read_text()
    raises = lines_of_raises(source)
    return {
        (str(path), code.co_firstlineno, code.co_name): {
            line for _, _, line in code.co_lines() if line and line > code.co_firstlineno
        }
        - raises
        for code in functions(compile(source, str(path), "exec"))
    }


class Watch:
    """Crosses off lines as they run; a function with none left costs nothing more."""

    def __init__(self) -> None:
        self.missing: dict[Key, set[int]] = {}
        for path in CORE.glob("*.py"):
            if path.name not in NO_RULES:
                self.missing |= lines_to_reach(path)

    def called(self, frame: FrameType, event: str, arg: Any) -> Any:
        lines = self._lines(frame.f_code)
        return self.ran if lines else None

    def ran(self, frame: FrameType, event: str, arg: Any) -> Any:
        lines = self._lines(frame.f_code)
        lines.discard(frame.f_lineno)
        return self.ran if lines else None

    def unreached(self) -> set[tuple[str, str]]:
        """File and text of the lines that are left."""
        left = {(path, line) for (path, _, _), lines in self.missing.items() for line in lines}
        return {(Path(path).name, linecache.getline(path, line).strip()) for path, line in left}

    def _lines(self, code: CodeType) -> set[int]:
        return self.missing.get((code.co_filename, code.co_firstlineno, code.co_name), set())


def test_every_line_of_the_rules_is_reached() -> None:
    watch, before = Watch(), sys.gettrace()
    snapshot._hints.cache_clear()  # other tests may have filled it
    sys.settrace(watch.called)
    try:
        for seed in range(NUM_SEEDS):
            run_world(seed)
            if seed % 10 == 9 and watch.unreached() == UNREACHED:
                break
    finally:
        sys.settrace(before)
    assert watch.unreached() - UNREACHED == set()
    assert UNREACHED - watch.unreached() == set(), "these are reached after all"
