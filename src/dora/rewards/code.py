"""Reward for programs: run them against the tests in a column of the data.

Programs run in a sandbox (`rewards/sandbox`) without network, files or other processes. Expected values stay
in this process, which compares the printed output. An assertion is split: its calls are evaluated in the
sandbox of the program, the rest in a second sandbox that never sees the program.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from dora.errors import RewardError
from dora.rewards.sandbox.runner import OUTPUT_BYTES, Sandbox, SandboxLimits
from dora.rewards.thoughts import without_thoughts

_FENCED = re.compile(r"^([ \t]*)```([^`\n]*)\n(.*?)^[ \t]*```[ \t\r]*$", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"\W*(?:python|py)[\d.]*(?![\w-])", re.IGNORECASE)  # not pycon, which is a session
_ASSERTIONS = (Path(__file__).with_name("sandbox") / "assertions.py").read_text(encoding="utf-8")
_EVALUATE_CALLS = f"{_ASSERTIONS}\nevaluate_calls()\n"
_CHECK_EXPRESSIONS = f"{_ASSERTIONS}\ncheck_expressions()\n"
_NOT_PROGRAM = (None, "math", *dir(builtins))  # roots of expressions that do not call the program
_MIN_MEMORY_MB = 64
_VALUES_BYTES = 64 << 20  # of the values of all calls of a completion


@dataclass(frozen=True)
class InputOutputTest:
    """A program that reads `stdin` must print `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class AssertionTest:
    """A split assertion: calls of the program, and an expression over their values value_0, value_1, ..."""

    calls: tuple[str, ...]
    expression: str


class PassedTests:
    """The fraction of its tests that the program in a completion passes."""

    def __init__(
        self,
        column: str = "tests",
        all_or_nothing: bool = False,
        test_s: float = 2.0,
        answer_s: float = 6.0,
        memory_mb: int = 512,
        confined: bool = True,
    ) -> None:
        """`column` has the tests; `test_s` limits one test, `answer_s` all tests of a completion.

        `confined = False` gives programs all rights of this user. Raises RewardError where programs must be
        confined and cannot be, or for limits that no program can keep.
        """
        if not 0 < test_s <= answer_s:
            raise RewardError(f"test_s = {test_s:g}, answer_s = {answer_s:g}: need 0 < test_s <= answer_s")
        if memory_mb < _MIN_MEMORY_MB:
            raise RewardError(f"memory_mb = {memory_mb}: Python itself needs {_MIN_MEMORY_MB} or more")
        self._column, self._all_or_nothing = column, all_or_nothing
        self._test_s, self._completion_s, self._memory_bytes = test_s, answer_s, memory_mb << 20
        self._sandbox = Sandbox(confined)

    def __call__(self, prompt: Any, completion: str, **row: Any) -> float:
        """0 to 1; with `all_or_nothing` 0 or 1. Raises ValueError for a row with unreadable tests."""
        tests = read_tests(row.get(self._column), self._column)
        program, deadline_s = extract_program(completion), time.monotonic() + self._completion_s
        num_passed = 0
        for num_run, passed in enumerate(self._run(program, tests, deadline_s), start=1):
            num_passed += passed
            if self._all_or_nothing and num_passed < num_run:
                return 0.0
        return num_passed / len(tests)

    def _run(
        self, program: str, tests: Sequence[InputOutputTest | AssertionTest], deadline_s: float
    ) -> Iterator[bool]:
        """Whether each test passes, input-output tests first; a test without time left fails."""
        for test in tests:
            if isinstance(test, InputOutputTest):
                limits = self._limits(deadline_s)
                yield limits is not None and self._prints_expected(program, test, limits)
        assertions = [test for test in tests if isinstance(test, AssertionTest)]
        if assertions:
            yield from self._check_assertions(
                assertions, self._evaluate_calls(program, assertions, deadline_s)
            )

    def _prints_expected(self, program: str, test: InputOutputTest, limits: SandboxLimits) -> bool:
        result = self._sandbox.run(program, test.stdin.encode(), limits)
        return result.is_success and _lines(result.output) == _lines(test.expected.encode())

    def _evaluate_calls(
        self, program: str, assertions: Sequence[AssertionTest], deadline_s: float
    ) -> list[list[str]]:
        """JSON of the values of each assertion's calls; "" for a call without one, [] for unfinished calls.

        A process has the time of one test. The assertion in which it ends is evaluated in another process,
        and has failed if it is unfinished there, too.
        """
        found: list[list[str]] = []
        num_bytes = _VALUES_BYTES
        while num_bytes > 0 and (rest := assertions[len(found) :]):
            limits = self._limits(deadline_s, num_bytes)
            if limits is None:
                break
            request = {"program": program, "calls": [call for assertion in rest for call in assertion.calls]}
            output = self._sandbox.run(_EVALUATE_CALLS, json.dumps(request).encode(), limits).output
            num_bytes -= len(output)
            lines = iter(output.decode(errors="replace").split("\n")[:-1])
            if next(lines, None) is None:  # the program does not load
                break
            values = [[*islice(lines, len(assertion.calls))] for assertion in rest]
            pairs = zip(rest, values, strict=True)
            finished = [*takewhile(lambda pair: len(pair[0].calls) == len(pair[1]), pairs)]
            found += [own for _, own in finished] or [[]]
            if self._all_or_nothing and not finished:
                break
        return found + [[] for _ in assertions[len(found) :]]

    def _check_assertions(
        self, assertions: Sequence[AssertionTest], values: Sequence[list[str]]
    ) -> list[bool]:
        """Which assertions hold for the values of their calls."""
        request, has_values = [], []
        for assertion, own in zip(assertions, values, strict=True):
            has_values.append(len(own) == len(assertion.calls) and all(own))
            if has_values[-1]:
                request.append((assertion.expression, own))
        limits = SandboxLimits(self._test_s, self._memory_bytes)
        output = self._sandbox.run(_CHECK_EXPRESSIONS, json.dumps(request).encode(), limits).output
        replies = iter(output.split())
        return [has_value and next(replies, b"") == b"1" for has_value in has_values]

    def _limits(self, deadline_s: float, output_bytes: int = OUTPUT_BYTES) -> SandboxLimits | None:
        """Limits of the next run; None if the time of the completion is over."""
        seconds = min(self._test_s, deadline_s - time.monotonic())
        return SandboxLimits(seconds, self._memory_bytes, output_bytes) if seconds > 0 else None


def extract_program(text: str) -> str:
    """The last fenced block of a completion after its thoughts, or the whole text there if it has none. If
    blocks are marked as Python, the last of these: the block after it often shows what the program prints.

    As in Markdown, its lines lose the indentation of the opening fence, as far as they have it.
    """
    text = without_thoughts(text)
    blocks = _FENCED.findall(text)
    if not blocks:
        return text
    marked = [block for block in blocks if _PYTHON.match(block[1])]
    indent, _, program = (marked or blocks)[-1]
    return re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", program, flags=re.MULTILINE) if indent else str(program)


def read_tests(value: Any, column: str) -> list[InputOutputTest | AssertionTest]:
    """The tests of a row: a list of {"input", "output"} and of assertions, or the same as JSON.

    Raises ValueError naming the column.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"the column {column} is not JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise ValueError(f"the column {column} = {value!r:.80}: needs a list of tests; see docs/data.md")
    return [_read_test(test, column) for test in value]


def _read_test(test: Any, column: str) -> InputOutputTest | AssertionTest:
    match test:
        case {"input": str(stdin), "output": str(expected)}:
            return InputOutputTest(stdin, expected)
        case str(text):
            return split_assertion(text)
    needed = '{"input": TEXT, "output": TEXT} or "assert ..."'
    raise ValueError(f"a test of the column {column} = {test!r:.80}: needs {needed}")


def split_assertion(text: str) -> AssertionTest:
    """Split an assertion into calls of the program and the rest. Raises ValueError if it cannot be split."""
    try:
        (statement,) = ast.parse(text.strip()).body
        if not isinstance(statement, ast.Assert):
            raise ValueError("it is not an assert statement")
        extractor = _CallExtractor()
        expression = ast.unparse(extractor.visit(statement.test))
        if not extractor.calls:
            raise ValueError("it does not call the program")
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"the test {text!r:.80} is not one assertion that can be split: {error}") from error
    return AssertionTest(tuple(extractor.calls), expression)


class _CallExtractor(ast.NodeTransformer):
    """Replaces the outermost expressions that use a name of the program by value_0, value_1, ..."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def visit(self, node: ast.AST) -> ast.AST:
        """Raises ValueError for an expression that binds names of its own."""
        if isinstance(node, ast.comprehension | ast.Lambda | ast.NamedExpr):
            raise ValueError("it binds names; write one assertion for each value")
        if _root_name(node) not in _NOT_PROGRAM:
            self.calls.append(ast.unparse(node))
            return ast.Name(f"value_{len(self.calls) - 1}", ast.Load())
        visited: ast.AST = self.generic_visit(node)
        return visited


def _root_name(node: ast.AST) -> str | None:
    """The name at the start of a chain of calls and attributes; None if the chain starts otherwise."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _lines(output: bytes) -> list[bytes]:
    """Lines without trailing blanks, and without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split(b"\n")]
