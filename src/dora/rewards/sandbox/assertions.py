"""Programs that run inside sandboxes and evaluate assertions about an untrusted program.

`evaluate_calls` runs the program and evaluates the calls in the assertions. `check_expressions` runs in a
second sandbox, without the program, and checks the assertions against the values of the calls.
`rewards/code.py` sends the source of this file to a sandbox, followed by a call of one of the two.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
import types
from collections.abc import Callable
from typing import Any

_SCALARS = (int, float, str, bool, type(None))  # JSON has them all, with nan, inf and lone surrogates
_MAX_ITEMS = 2_000_000  # of an iterator; a longer one, perhaps endless, has no value


def evaluate_calls() -> None:
    """Read JSON with `program` and `calls` (Python expressions); print an empty line once the program is
    loaded, then one line per call.

    A line is JSON, see `to_json`, or empty if the call raised or returned no plain value. What the program
    prints is dropped. The program shares this process, so it can forge the lines: readers treat them as
    untrusted.
    """
    request, replies = json.load(sys.stdin), sys.stdout
    sys.stdout = io.StringIO()
    sys.set_int_max_str_digits(0)
    module = types.ModuleType("program")
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for the names of a class
    names = vars(module)
    exec(compile(request["program"], "<program>", "exec", dont_inherit=True), names)
    print(file=replies, flush=True)
    for call in request["calls"]:
        try:
            value = json.dumps(to_json(eval(call, {"math": math, **names})))
        except (Exception, SystemExit):
            value = ""
        print(value, file=replies, flush=True)
    sys.stdout = replies


def to_json(value: Any) -> Any:
    """A plain value as JSON, in which {"tuple": [1, 2]} is a tuple, and so on for the keys of `_FROM_JSON`.

    Any other iterable becomes an iterator over its items. Raises TypeError for a value that is not plain, and
    ValueError for an iterator that is too long.
    """
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, list | tuple):
        # The scan without a Python call per item is what makes a million numbers fast.
        items = value if set(_SCALARS).issuperset(map(type, value)) else [to_json(item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, set | frozenset):
        return {"set" if isinstance(value, set) else "frozenset": [to_json(item) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    items = list(itertools.islice(value, _MAX_ITEMS + 1))
    if len(items) > _MAX_ITEMS:
        raise ValueError(f"the iterator has more than {_MAX_ITEMS} items")
    return {"iterator": to_json(items)}


_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "set": set,
    "frozenset": frozenset,
    "bytes": lambda text: text.encode("latin-1"),
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "iterator": iter,
}


def from_json(text: str) -> Any:
    """The value that `to_json` has described. Raises an exception for any other text."""

    def value_of(pairs: list[tuple[str, Any]]) -> Any:
        ((kind, content),) = pairs
        return _FROM_JSON[kind](content)

    return json.loads(text, object_pairs_hook=value_of)


def check_expressions() -> None:
    """Read JSON: a list of [expression, JSON of value_0, value_1, ...]; print "1" or "0" for each.

    The JSON of the values comes from an untrusted sandbox.
    """
    sys.set_int_max_str_digits(0)
    for expression, texts in json.load(sys.stdin):
        print(int(is_true(expression, texts)), flush=True)


def is_true(expression: str, texts: list[str]) -> bool:
    """Whether the expression is true; an expression that raises is false."""
    try:
        values = {f"value_{i}": from_json(text) for i, text in enumerate(texts)}
        return bool(eval(expression, {"math": math, **values}))
    except Exception:
        return False
