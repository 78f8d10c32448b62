"""Programs that run inside sandboxes and evaluate assertions about an untrusted program.

`evaluate_calls` runs the program and evaluates the calls in the assertions. `check_expressions` runs in a
second sandbox, without the program, and checks the assertions against the values of the calls.
`rewards/code.py` sends the source of this file to a sandbox, followed by a call of one of the two.
"""

from __future__ import annotations

import ast
import io
import json
import math
import sys
from typing import Any


def evaluate_calls() -> None:
    """Read JSON with `program` and `calls` (Python expressions); print one line per call.

    A line is a Python literal, or empty if the call raised or returned no plain value. What the program
    prints is dropped. The program shares this process, so it can forge the lines: readers treat them as
    untrusted.
    """
    request, replies = json.load(sys.stdin), sys.stdout
    sys.stdout = io.StringIO()
    sys.set_int_max_str_digits(0)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(request["program"], "<program>", "exec", dont_inherit=True), names)
    for call in request["calls"]:
        try:
            value = literal(eval(call, names))
        except (Exception, SystemExit):
            value = ""
        print(value, file=replies, flush=True)
    sys.stdout = replies


def literal(value: Any) -> str:
    """A plain value as text for `ast.literal_eval`; an instance of a subclass becomes its base type.

    Raises TypeError for any other value.
    """
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, float):
        return float.__repr__(value).replace("inf", "1e999")
    for plain in (int, complex, str, bytes):
        if isinstance(value, plain):
            return plain.__repr__(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    parts = ", ".join(map(literal, value)) if isinstance(value, list | tuple | set | frozenset) else None
    if isinstance(value, list):
        return f"[{parts}]"
    if isinstance(value, tuple):
        return f"({parts},)" if value else "()"
    if parts is not None:
        return f"{{{parts}}}" if value else "set()"
    raise TypeError(f"{type(value).__name__} is not a plain type")


def check_expressions() -> None:
    """Read JSON: a list of [expression, literals of value_0, value_1, ...]; print "1" or "0" for each.

    The literals come from an untrusted sandbox and are only parsed by `ast.literal_eval`.
    """
    sys.set_int_max_str_digits(0)
    for expression, literals in json.load(sys.stdin):
        print(int(is_true(expression, literals)), flush=True)


def is_true(expression: str, literals: list[str]) -> bool:
    """Whether the expression is true; an expression that raises is false."""
    try:
        values = {f"value_{i}": ast.literal_eval(text) for i, text in enumerate(literals)}
        return bool(eval(expression, {"math": math, **values}))
    except Exception:
        return False
