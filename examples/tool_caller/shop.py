"""A shop: the task of both forms of the example, without anything of DORA-RL.

    What do 7 fig cost?  ->  lookup(item="fig") = 34  ->  calculate(expression="7*34") = 238  ->  238

Each row has its own price, so the model cannot know an answer: it has to call both tools in the right order
and copy the results.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

ITEMS = ("fig", "plum", "pear", "lime", "kiwi", "date", "nut", "leek")
MAX_TURNS = 5  # three, and two for calls that failed
NUM_ROWS, NUM_HELD_OUT = 2000, 256
CALL_FORMAT = '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>'
GUESS_RATE = 0.35  # of demonstrated calls: an answer instead, which is wrong
ERROR_RATE = 0.1  # of demonstrated turns: a call of an unknown tool, or a wrong digit


def _tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("lookup", "The price of an item.", "item"),
    _tool("calculate", "A product or sum of two numbers, such as 12*34.", "expression"),
]


def tools_text() -> str:
    """The tools and the format of calls, as the model's chat template shows them."""
    functions = [tool["function"] for tool in TOOLS]
    lines = [f"{each['name']}({', '.join(each['parameters']['properties'])})\n" for each in functions]
    return "".join(lines) + CALL_FORMAT


def call_tool(name: str, arguments: str, row: Mapping[str, Any]) -> str:
    """The result of a call, whose arguments are a JSON object as text; "error" if the call is wrong."""
    values = json.loads(arguments)
    if name == "lookup":
        return str(row["price"]) if values.get("item") == row["item"] else "error"
    found = re.fullmatch(r"(\d{1,6})([*+])(\d{1,6})", str(values.get("expression")))
    if name != "calculate" or found is None:
        return "error"
    a, b = int(found[1]), int(found[3])
    return str(a * b if found[2] == "*" else a + b)


def reward_of(answer: str | None, row: Mapping[str, Any]) -> float:
    """1 for the right answer."""
    return float((answer or "").strip() == str(row["answer"]))


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows; no row is in both."""
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    while len(found) < NUM_ROWS + NUM_HELD_OUT:
        item, price, count = source.choice(ITEMS), source.randint(10, 99), source.randint(2, 9)
        prompt, answer = f"What do {count} {item} cost?", price * count
        found[item, price, count] = {"prompt": prompt, "item": item, "price": price, "answer": answer}
    all_rows = list(found.values())
    return all_rows[:NUM_ROWS], all_rows[NUM_ROWS:]


def call_text(name: str, **arguments: str) -> str:
    """A tool call as the model writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{call}</tool_call>"


def demonstration(row: Mapping[str, Any], results: Sequence[str], source: random.Random) -> str:
    """The next turn after these results of calls, often a guess and sometimes with an error."""
    known = [result for result in results if result != "error"]
    if len(known) < 2 and source.random() < GUESS_RATE:
        return str(source.randint(20, 999))
    count = re.findall(r"\d+", row["prompt"])[0]
    is_wrong = source.random() < ERROR_RATE
    match known:
        case []:
            return call_text("search" if is_wrong else "lookup", item=row["item"])
        case [price]:
            factor = str(source.randint(10, 99)) if is_wrong else price
            return call_text("calculate", expression=f"{count}*{factor}")
    return str(source.randint(20, 999)) if is_wrong else known[-1]
