"""Tool calls in the text of a model, in the format that its chat template teaches.

A call that is malformed, or that was cut off, stays part of the text: the agent sees what the model wrote.
"""

from __future__ import annotations

import json
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

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


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
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {})
        for tool in tools
    }

    def parse(block: str) -> ToolCall | None:
        if (function := _FUNCTION.fullmatch(block)) is None:
            return None
        name, body = function.groups()
        if _PARAMETER.sub("", body).strip():
            return None
        types = {key: schema.get("type") for key, schema in schemas.get(name, {}).items()}
        values = {key: _value_of(value, types.get(key)) for key, value in _PARAMETER.findall(body)}
        return ToolCall.make(name, values)

    return _parse_blocks(text, parse)


def _parse_json(text: str, tools: Sequence[Tool]) -> ParsedTurn:
    """The whole turn is `{"name": ..., "parameters": {...}}`, or several with `;` between, as in Llama 3."""
    calls = [*_json_calls(text)]
    return ParsedTurn("", tuple(calls)) if calls else ParsedTurn(text, ())


def _json_calls(text: str) -> Iterator[ToolCall]:
    """The calls; none unless the text consists of calls."""
    calls, decoder, position = [], json.JSONDecoder(), 0
    while position < len(text):
        try:
            _, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return
        if (call := _call_of(text[position:end], "parameters")) is None:
            return
        calls.append(call)
        position = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
    yield from calls


def _parse_blocks(text: str, parse: Callable[[str], ToolCall | None]) -> ParsedTurn:
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = parse(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    content = _BLOCK.sub(take, text)
    return ParsedTurn(content.strip() if calls else content, tuple(calls))


def _call_of(text: str, key: str) -> ToolCall | None:
    """The call that a JSON object describes."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get(key, {})
    return ToolCall.make(call["name"], arguments) if isinstance(arguments, dict) else None


def _value_of(text: str, kind: str | None) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
