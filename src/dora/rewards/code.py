"""Judge a program by running it: standard input and output, or assertions, as a column of the data has them.

Programs run in cells (`rewards/sandbox`), which have no network, no files and no other process. What is right
stays in this process: it compares what a cell printed. Of an assertion, the calls go to a cell with the
program, and the rest, with what they returned, to a cell without it.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora.errors import RewardError
from dora.rewards.sandbox.cell import Cells, Limits

_FENCED = re.compile(r"^[ \t]*```[^`\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_CALLER, _CHECKER = (
    (Path(__file__).with_name("sandbox") / name).read_text(encoding="utf-8")
    for name in ("caller.py", "checker.py")
)
_PYTHONS_OWN = (None, "math", *dir(builtins))  # what begins with one of these is not the program's to compute
_MIN_MEMORY_MB = 64


@dataclass(frozen=True)
class Pair:
    """What a program reads, and what it then has to print."""

    given: str
    wanted: str


@dataclass(frozen=True)
class Assertion:
    """An assertion in two: what the program computes, and what has to be true of `value_0`, `value_1`, ..."""

    calls: tuple[str, ...]
    expression: str


class PassedTests:
    """The share of its tests that the program in an answer passes."""

    def __init__(
        self,
        column: str = "tests",
        all_or_nothing: bool = False,
        test_s: float = 2.0,
        answer_s: float = 6.0,
        memory_mb: int = 512,
        confined: bool = True,
    ) -> None:
        """Tests are in `column` of the data; one takes `test_s` at most, all of an answer's `answer_s`.

        Without `confined`, programs may do what this user may. Raises RewardError where they must be
        confined and cannot be, or for limits that leave nothing.
        """
        if not 0 < test_s <= answer_s:
            raise RewardError(f"test_s = {test_s:g}, answer_s = {answer_s:g}: need 0 < test_s <= answer_s")
        if memory_mb < _MIN_MEMORY_MB:
            raise RewardError(
                f"memory_mb = {memory_mb}: Python alone takes some; need {_MIN_MEMORY_MB} or more"
            )
        self._column, self._is_strict = column, all_or_nothing
        self._test_s, self._answer_s, self._memory_bytes = test_s, answer_s, memory_mb << 20
        self._cells = Cells(confined)

    def __call__(self, prompt: Any, completion: str, **row: Any) -> float:
        """0 to 1; with `all_or_nothing` 0 or 1. Raises ValueError for a row whose tests cannot be read."""
        tests = read_tests(row.get(self._column), self._column)
        program, until_s = program_of(completion), time.monotonic() + self._answer_s
        num_passed = 0
        for num_done, passed in enumerate(self._verdicts(program, tests, until_s), start=1):
            num_passed += passed
            if self._is_strict and num_passed < num_done:
                return 0.0
        return num_passed / len(tests)

    def _verdicts(self, program: str, tests: Sequence[Pair | Assertion], until_s: float) -> Iterator[bool]:
        """One for each test, pairs first; those for which no time is left have failed."""
        for test in tests:
            if isinstance(test, Pair):
                limits = self._limits(1, until_s)
                yield limits is not None and self._prints(program, test, limits)
        assertions = [test for test in tests if isinstance(test, Assertion)]
        if assertions:
            limits = self._limits(len(assertions), until_s)
            values = [] if limits is None else self._values(program, assertions, limits)
            yield from self._hold(assertions, values)

    def _prints(self, program: str, test: Pair, limits: Limits) -> bool:
        ran = self._cells.run(program, test.given.encode(), limits)
        return ran.is_good and _lines(ran.output) == _lines(test.wanted.encode())

    def _values(self, program: str, assertions: Sequence[Assertion], limits: Limits) -> list[str]:
        """What the calls of all assertions returned, as far as it came; "" where there is no value."""
        calls = [call for assertion in assertions for call in assertion.calls]
        asked = json.dumps({"program": program, "calls": calls})
        printed = self._cells.run(_CALLER, asked.encode(), limits).output
        return printed.decode(errors="replace").split("\n")[:-1]

    def _hold(self, assertions: Sequence[Assertion], values: list[str]) -> list[bool]:
        """Which assertions hold, by a cell that has not seen the program."""
        asked, answered = [], []
        for assertion in assertions:
            num = len(assertion.calls)
            own, values = values[:num], values[num:]
            answered.append(len(own) == num and all(own))
            if answered[-1]:
                asked.append((assertion.expression, own))
        limits = Limits(self._test_s, self._memory_bytes)
        told = iter(self._cells.run(_CHECKER, json.dumps(asked).encode(), limits).output.split())
        return [is_answered and next(told, b"") == b"1" for is_answered in answered]

    def _limits(self, num_tests: int, until_s: float) -> Limits | None:
        """None: the answer's time is over."""
        seconds = min(num_tests * self._test_s, until_s - time.monotonic())
        return Limits(seconds, self._memory_bytes) if seconds > 0 else None


def program_of(text: str) -> str:
    """The last fenced block of an answer, or all of it if it has none."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def read_tests(given: Any, column: str) -> list[Pair | Assertion]:
    """The tests of a row: a list of {"input", "output"} and of assertions, or the same as JSON.

    Raises ValueError naming the column.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"the column {column} is no JSON: {error}") from error
    if not isinstance(given, list) or not given:
        raise ValueError(f"the column {column} = {given!r:.80}: needs a list of tests; see docs/data.md")
    return [_read_test(test, column) for test in given]


def _read_test(test: Any, column: str) -> Pair | Assertion:
    match test:
        case {"input": str(given), "output": str(wanted)}:
            return Pair(given, wanted)
        case str(text):
            return split(text)
    needed = '{"input": TEXT, "output": TEXT} or "assert ..."'
    raise ValueError(f"a test of the column {column} = {test!r:.80}: needs {needed}")


def split(text: str) -> Assertion:
    """An assertion in its two parts. Raises ValueError if it is none, or cannot be divided."""
    try:
        (statement,) = ast.parse(text.strip()).body
        if not isinstance(statement, ast.Assert):
            raise ValueError("it is another statement")
        calls = _Calls()
        expression = ast.unparse(calls.visit(statement.test))
        if not calls.found:
            raise ValueError("it calls nothing but what is Python's own")
    except (ValueError, SyntaxError) as error:
        raise ValueError(
            f"the test {text!r:.80} is not one assertion that can be divided: {error}"
        ) from error
    return Assertion(tuple(calls.found), expression)


class _Calls(ast.NodeTransformer):
    """Takes the outermost expressions that begin with a name of the program's out of an expression."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def visit(self, node: ast.AST) -> ast.AST:
        """Raises ValueError for names that only a part of the expression knows."""
        if isinstance(node, ast.comprehension | ast.Lambda | ast.NamedExpr):
            raise ValueError("it has names of its own; write the assertions one by one")
        if _root(node) not in _PYTHONS_OWN:
            self.found.append(ast.unparse(node))
            return ast.Name(f"value_{len(self.found) - 1}", ast.Load())
        changed: ast.AST = self.generic_visit(node)
        return changed


def _root(node: ast.AST) -> str | None:
    """The name that a chain of calls and attributes begins with; None: it begins with something else."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _lines(output: bytes) -> list[bytes]:
    """Lines without blanks at their ends, and no empty ones at the end."""
    return [line.rstrip() for line in output.rstrip().split(b"\n")]
