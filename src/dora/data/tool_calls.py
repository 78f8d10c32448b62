"""Tool calls in the text of a model, in the format that its chat template teaches.

A call that is malformed, or that was cut off, stays part of the text: the agent sees what the model wrote.
Parsers run in the driver on whatever a model writes, so they take linear time and raise nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


class ToolCall(NamedTuple):
    """A call of a tool; `arguments` is a JSON object as text, with sorted keys."""

    name: str
    arguments: str

    @classmethod
    def make(cls, name: str, arguments: Mapping[str, Any]) -> ToolCall:
        return cls(name, json.dumps(arguments, ensure_ascii=False, sort_keys=True))


class ParsedTurn(NamedTuple):
    """The text of a turn outside its tool calls, and the calls in order."""

    content: str
    calls: tuple[ToolCall, ...]


Parser = Callable[[str, Sequence[Tool]], ParsedTurn]

MAX_DEPTH = 100  # of nested JSON: what encodes or validates it again is recursive

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None if it is none, or is not portable."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and is_portable(value) else None


def is_portable(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Whether any JSON library can read this JSON value: no nan, no infinity, and no deeper nesting."""
    if isinstance(value, float):
        return math.isfinite(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is None or (max_depth > 0 and all(is_portable(part, max_depth - 1) for part in parts))


def parser_of(template: str) -> Parser | None:
    """The parser of the calls that a chat template describes; None if it describes no known format."""
    if "<function=" in template:
        return _parse_xml
    if "<tool_call>" in template:
        return _parse_json_blocks
    if "tools" in template and '"parameters"' in template:
        return _parse_json
    return None


def _parse_json_blocks(text: str, tools: Sequence[Tool]) -> ParsedTurn:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen2.5 and Qwen3 write."""
    return _parse_blocks(text, lambda block: _call_of(block, "arguments"))


def _parse_xml(text: str, tools: Sequence[Tool]) -> ParsedTurn:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` in a block, as Qwen3-Coder writes.

    A value whose parameter is not a string in the tool's schema is JSON.
    """
    types_of = {tool["function"]["name"]: _parameter_types(tool["function"]) for tool in tools}

    def parse(block: str) -> ToolCall | None:
        if (function := _FUNCTION.fullmatch(block)) is None:
            return None
        name, body = function.groups()
        types, values, body, position = types_of.get(name, {}), {}, body.lstrip(), 0
        while position < len(body):
            if (parameter := _PARAMETER.match(body, position)) is None:
                return None
            key, value = parameter.groups()
            values[key], position = _value_of(value, types.get(key, [])), parameter.end()
        return ToolCall.make(name, values)

    return _parse_blocks(text, parse)


def _parse_json(text: str, tools: Sequence[Tool]) -> ParsedTurn:
    """The whole turn is `{"name": ..., "parameters": {...}}`, or several with `;` between, as in Llama 3."""
    calls = [*_json_calls(text)]
    return ParsedTurn("", tuple(calls)) if calls else ParsedTurn(text, ())


def _json_calls(text: str) -> Iterator[ToolCall]:
    """The calls; none unless the text consists of calls."""
    calls, decoder, position = [], json.JSONDecoder(), len(text) - len(text.lstrip())
    while position < len(text):
        try:
            _, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return
        if (call := _call_of(text[position:end], "parameters")) is None:
            return
        calls.append(call)
        position = end
        while text[position : position + 1] in {";", " ", "\n"}:
            position += 1
    yield from calls


def _parse_blocks(text: str, parse: Callable[[str], ToolCall | None]) -> ParsedTurn:
    calls: list[ToolCall] = []
    content, position = "", 0
    while (start := text.find(_START, position)) >= 0 and (end := text.find(_END, start)) >= 0:
        call, stop = parse(text[start + len(_START) : end]), end + len(_END)
        content += text[position : stop if call is None else start]
        calls += [] if call is None else [call]
        position = stop
    content += text[position:]
    return ParsedTurn(content.strip() if calls else content, tuple(calls))


def _parameter_types(function: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The types of each parameter; a client may send any JSON as schema."""
    match function.get("parameters"):
        case {"properties": {**schemas}}:
            return {str(key): _types_of(schema) for key, schema in schemas.items()}
    return {}


def _types_of(schema: object) -> list[Any]:
    match schema:
        case {"type": [*kinds]}:
            return kinds
        case {"type": kind}:
            return [kind]
        case {"anyOf": [*parts]}:
            return [part.get("type") for part in parts if isinstance(part, dict)]
    return []


def _call_of(text: str, key: str) -> ToolCall | None:
    """The call that a JSON object describes. Models also write the key of another family than their own."""
    call = json_object(text)
    if call is None or not isinstance(call.get("name"), str):
        return None
    others = [call[other] for other in ("arguments", "parameters") if other in call]
    arguments = call.get(key, others[0] if others else {})
    return ToolCall.make(call["name"], arguments) if isinstance(arguments, dict) else None


def _value_of(text: str, kinds: Sequence[Any]) -> Any:
    """The value of a parameter with these types. Only a string that may be null is null as well."""
    is_null = text == "null" and "null" in kinds
    if [kind for kind in kinds if kind != "null"] == ["string"] and not is_null:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if is_portable(value) else text
