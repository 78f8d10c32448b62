"""Programs are scored by what they print and return, and cannot find the expected values."""

from __future__ import annotations

import json
import platform
import re
import secrets
import sys
from typing import Any

import pytest

from dora.errors import RewardError
from dora.rewards.base import RewardInput, load_reward, score
from dora.rewards.code import AssertionTest, PassedTests, extract_program, read_tests, split_assertion

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 7\n", "output": "12"}]
ADDS = ["assert add(1, 2) == 3", "assert add(5, 7) == 12"]

NEEDS_LINUX = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="needs Linux",
)
pytestmark = NEEDS_LINUX


@pytest.fixture(scope="module")
def reward() -> PassedTests:
    return PassedTests(test_s=1.0, answer_s=3.0)


# Searches every reachable Python object for the expected value, and returns it.
THIEF = """
import gc, re, sys

def found():
    frame, holders = sys._getframe(), gc.get_objects()
    while frame:
        holders += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    for value in gc.get_referents(*holders):
        needle = re.search("needle-[0-9a-f]{16}", value) if isinstance(value, str) else None
        if needle:
            return needle[0]
"""


def test_expected_values_cannot_be_found_even_after_a_program_printed_them(reward: PassedTests) -> None:
    needle = f"needle-{secrets.token_hex(8)}"
    tests = [{"input": "", "output": needle}, f"assert found() == {needle!r}"]
    honest = f"def found():\n    return {needle!r}\nprint(found())\n"
    assert reward("", honest, tests=tests) == 1.0
    assert reward("", f"{THIEF}\nprint(found())\n", tests=tests) == 0.0
    revealed = [{"input": needle, "output": needle}]
    assert reward("", f"{THIEF}\nrevealed = input()\nprint(found())\n", tests=revealed) == 1.0


FORGERIES = {
    "exits": "import os\nos._exit(0)",
    "exits, politely": "exit()",
    "prints replies": "print('1\\n' * 9, flush=True)",
    "writes replies to every descriptor": "import os\nfor fd in range(1, 64):\n"
    "  try: os.write(fd, b'e1\\n1\\n')\n  except OSError: 0",
    "overrides comparison": "class Yes:\n  __eq__ = lambda s, o: True\ndef add(a, b): return Yes()",
    "overrides it in an int": "class Yes(int):\n  __eq__ = lambda *_: True\ndef add(a, b): return Yes(0)",
    "overrides repr": "class Yes(str):\n  __repr__ = lambda s: '3'\ndef add(a, b): return Yes()",
    "replaces eval": "import builtins\nbuiltins.eval = lambda *a: 3\nadd = None",
    "replaces the library": "import sys, json\nsys.modules.clear()\njson.load = 0\ndef add(a, b): return 0",
    "returns an object": "def add(a, b): return object()",
    "raises": "def add(a, b): raise SystemExit(0)",
}


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES)
def test_results_cannot_be_forged(reward: PassedTests, program: str) -> None:
    assert reward("", program, tests=[*SUMS, *ADDS]) <= 0.25  # `eval = 3` is right once, as 3 is
    assert reward("", program + "\n", tests=SUMS) == 0.0
    assert reward("", "def add(a, b):\n    return a + b\n", tests=ADDS) == 1.0


def test_the_reward_is_the_fraction_of_passed_tests_or_all_or_nothing(reward: PassedTests) -> None:
    strict = PassedTests(all_or_nothing=True)
    three, both = "print(3)", [*SUMS, *ADDS]
    assert reward("", three, tests=SUMS) == 0.5
    assert reward("", three + "\ndef add(a, b): return 3", tests=both) == 0.5
    assert [strict("", program, tests=SUMS) for program in (three, ADD)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        ("def f(a): return sorted(a)", ["assert f([2, 1]) == [1, 2]", "assert set(f((3,))) == {3}"], 1.0),
        ("class Solution:\n  def f(self, a): return a * 2", ["assert Solution().f(2) == 4"], 1.0),
        ("def f(a): return a / 3", ["assert math.isclose(f(1), 0.3333, rel_tol=1e-3)"], 1.0),
        ("def f(a): return float('inf'), -1.5, None, b'\\n', ''", ["assert f(0)[0] > 1e300"], 1.0),
        ("def f(a): print('noise'); return a", ["assert f('x\\ny') == 'x\\ny', 'equal'"], 1.0),
        ("def f(a): return {1: (), 'a': frozenset([2])}", ["assert f(0) == {1: (), 'a': {2}}"], 1.0),
        ("def f(a): return 10 ** 5000", ["assert f(0) == 10 ** 5000"], 1.0),
        ("def f(a): return a[0]", ["assert f([1]) == 1", "assert f([]) == 1"], 0.5),
        ("def f(a):\n  while a: pass\n  return 1", ["assert f(0) == 1", "assert f(1) == 1"], 0.5),
        ("from collections import Counter\ndef f(a): return Counter(a)", ["assert f('aa') == {'a': 2}"], 1.0),
        ("f = lambda a: True", ["assert f(1) is True", "assert not f(2)"], 0.5),
        ("def f(): return float('nan')", ["assert math.isnan(f())", "assert f() != f()"], 1.0),
        ("def f(): return [1.5, float('nan')]", ["assert math.isnan(f()[1])", "assert sum(f()) > 0"], 0.5),
        ("def f():\n  yield 1\n  yield 2", ["assert list(f()) == [1, 2]", "assert next(f()) == 1"], 1.0),
        ("def f(a): return map(abs, a)", ["assert list(f([-1, 2])) == [1, 2]"], 1.0),
        ("def f(a): return {1: 2, 3: 4}.items()", ["assert sorted(f(0)) == [(1, 2), (3, 4)]"], 1.0),
        ("def f(a): return range(a)", ["assert list(f(2)) == [0, 1]", "assert f(2) == range(2)"], 1.0),
        ("def f():\n  while True: yield 1", ["assert sum(f()) == 2", "assert 1 in f()"], 0.0),
        ("def f(a): return {frozenset(a)}", ["assert f([1]) == {frozenset([1])}"], 1.0),
        ("def f(a): return complex(a, float('inf'))", ["assert f(1) == complex(1, 1e999)"], 1.0),
        (
            "def f(a): return [a, (None, True), {'x': [b'\\xff', '\\ud800']}]",
            ["assert f(1) == [1, (None, True), {'x': [b'\\xff', '\\ud800']}]"],
            1.0,
        ),
        ("def f(a): return math.sqrt(a)\nimport math", ["assert f(math.inf) == math.inf"], 1.0),
        ("import os\ndef f(a): return a or os._exit(0)", ["assert f(0) == 1", "assert f(1) == 1"], 0.5),
        (
            "def f(a):\n  while a < 0: pass\n  return a",
            ["assert f(1) == 1", "assert f(-1) == 1", "assert f(2) == 2"],
            2 / 3,
        ),
        ("1 / 0\ndef f(a): return a", ["assert f(0) == 0"], 0.0),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\nimport pickle\n"
            "@dataclass\nclass Box:\n  a: int\ndef f(a): return pickle.loads(pickle.dumps(Box(a))).a",
            ["assert f(2) == 2"],
            1.0,
        ),
        ("def f(a): return a", ["assert f(math.pi) > 3"], 1.0),
    ],
)
def test_assertions_are_evaluated(program: str, tests: list[str], expected: float) -> None:
    assert PassedTests(test_s=0.5)("", program, tests=tests) == expected


def test_each_assertion_has_the_time_of_a_test(reward: PassedTests) -> None:
    hangs = "def f(a):\n  while a < 0: pass\n  return a"
    assert reward("", hangs, tests=["assert f(-1) == 1", "assert f(1) == 1", "assert f(2) == 2"]) == 2 / 3
    slow = "import time\ndef f(a):\n  end = time.monotonic() + 0.9\n  while time.monotonic() < end: pass\n"
    strict = PassedTests(test_s=1.5, answer_s=20.0, all_or_nothing=True)
    assert strict("", slow, tests=["assert f(1) is None", "assert f(2) is None"]) == 1.0


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ("list(range(n))", "499999500000"),
        ("[i + 0.5 for i in range(n)]", "500000000000"),
        ("(str(i) for i in range(n))", "len"),
        ("[(i, i) for i in range(n)]", "len"),
    ],
)
def test_a_call_may_return_a_million_values(values: str, total: str) -> None:
    test = "len(list(f(10**6))) == 10**6" if total == "len" else f"sum(f(10**6)) == {total}"
    patient = PassedTests(test_s=20.0, answer_s=20.0)
    assert patient("", f"def f(n): return {values}", tests=[f"assert {test}"]) == 1.0


def test_an_assertion_is_split_into_calls_and_the_rest() -> None:
    assert split_assertion("assert f(1)[0] == 'a b'.split()[0]") == AssertionTest(
        ("f(1)",), "value_0[0] == 'a b'.split()[0]"
    )
    assert split_assertion("assert max(f(1), g.h(2)) == min(3, 4)") == AssertionTest(
        ("f(1)", "g.h(2)"), "max(value_0, value_1) == min(3, 4)"
    )


@pytest.mark.parametrize(
    ("tests", "complaint"),
    [
        (None, "the column tests = None: needs a list of tests"),
        ([], "needs a list of tests"),
        ("[{", "the column tests is not JSON"),
        ([3], 'a test of the column tests = 3: needs {"input": TEXT, "output": TEXT} or "assert ..."'),
        ([{"input": "1"}], "needs"),
        (["f(1)"], "it is not an assert statement"),
        (["assert f(1) =="], "invalid syntax"),
        (["assert max(1, 2) == 2"], "it does not call the program"),
        (["assert all(f(i) for i in range(3))"], "it binds names"),
    ],
)
def test_tests_that_cannot_be_read_are_named(tests: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        read_tests(tests, "tests")


def test_the_program_is_the_last_fenced_block_or_the_whole_text() -> None:
    assert extract_program("print(1)") == "print(1)"
    assert extract_program("First:\n```\na\n```\nbetter:\n```python\nb = 1\nc\n```\nDone.") == "b = 1\nc\n"
    assert extract_program("```\na\n```\n``` Python\nb\n```\nIt prints:\n```\n4\n```") == "b\n"
    assert extract_program("```python\na\n```\n```py\nb\n```") == "b\n"
    for mark in ("pycon", "python-repl", "pytb", "text"):
        assert extract_program(f"```python3 title=a\na\n```\n```{mark}\n>>> a\n```") == "a\n"
    assert extract_program("```python\nnever closed") == "```python\nnever closed"


def test_a_block_in_a_list_loses_the_indentation_of_its_fence() -> None:
    block = "1. Code:\n\n   ```python\n   def f(a):\n       return a\n\n text\n   ```\n2. Done."
    assert extract_program(block) == "def f(a):\n    return a\n\ntext\n"
    assert extract_program("```\n  kept\n ```") == "  kept\n"


def test_fences_may_end_lines_as_windows_does() -> None:
    assert extract_program("Code:\r\n```python\r\nprint(1)\r\n```\r\nDone.") == "print(1)\r\n"


def test_output_is_compared_without_trailing_blanks(reward: PassedTests) -> None:
    tests = [{"input": "", "output": "1\n\n2"}]
    programs = (
        "print('1  \\n\\n2\\n\\n')",
        "print('1\\n2')",
        "import sys\nsys.stdout.buffer.write(b'1\\n\\n2\\xff')",
    )
    assert [reward("", program, tests=tests) for program in programs] == [1.0, 0.0, 0.0]


def test_input_may_be_long_and_left_unread(reward: PassedTests) -> None:
    given = "x" * 3_000_000
    tests = [{"input": given, "output": "3000000"}]
    assert reward("", "print(len(input()))", tests=tests) == 1.0
    assert reward("", "print(3000000)", tests=tests) == 1.0
    assert reward("", "print(input() * 2)", tests=tests) == 0.0


def test_it_loads_as_a_reward_class() -> None:
    made = load_reward("dora.rewards.code:PassedTests", options={"column": "test_list"})
    inputs = [
        RewardInput("add", text, (), {"test_list": json.dumps(SUMS)}) for text in (ADD, "", "import os\n\x00")
    ]
    assert [result.reward for result in score(made, inputs)] == [1.0, 0.0, 0.0]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"test_s": 0}, "test_s = 0"),
        ({"test_s": 9.0}, "test_s = 9"),
        ({"memory_mb": 1}, "memory_mb = 1:"),
        ({"columns": "x"}, "argument 'columns'"),
    ]
    for options, message in refused:
        with pytest.raises(RewardError, match=message):
            load_reward("dora.rewards.code:PassedTests", options=options)
