"""A program for a cell: run somebody's program, then call what it defines, and print what the calls return.

In: JSON with `program` and `calls`, expressions of Python. Out: a line for each call, a Python literal, or
nothing if there is none. It shares its process with the program, which can have the lines say what it likes.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Any


def literal(value: Any) -> str:
    """A plain value as text that `ast.literal_eval` reads; subclasses as what they are made of."""
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
    raise TypeError(f"a {type(value).__name__} is no plain value")


def main() -> None:
    """Everything the program prints itself is dropped."""
    asked, answers = json.load(sys.stdin), sys.stdout
    sys.stdout = io.StringIO()
    sys.set_int_max_str_digits(0)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(asked["program"], "<program>", "exec", dont_inherit=True), names)
    for call in asked["calls"]:
        try:
            answer = literal(eval(call, names))
        except (Exception, SystemExit):
            answer = ""
        print(answer, file=answers, flush=True)
    sys.stdout = answers


if __name__ == "__main__":
    main()
