"""A program for a cell of its own: which assertions hold for values that another cell has printed.

In: JSON, a list of expressions of Python, each with the literals that it calls value_0, value_1 and so on.
Out: a line for each, 1 if it holds. What comes from the other cell is only ever read as a literal.
"""

from __future__ import annotations

import ast
import json
import math
import sys


def holds(expression: str, literals: list[str]) -> bool:
    """Whether it is true; what cannot be computed is not."""
    try:
        values = {f"value_{i}": ast.literal_eval(text) for i, text in enumerate(literals)}
        return bool(eval(expression, {"math": math, **values}))
    except Exception:
        return False


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    for expression, literals in json.load(sys.stdin):
        print(int(holds(expression, literals)), flush=True)
