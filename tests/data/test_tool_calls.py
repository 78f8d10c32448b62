"""Tool calls in the formats of the families, and text that only looks like one."""

from __future__ import annotations

import json

import pytest

from dora.data.tool_calls import ParsedTurn, ToolCall, parser_of

HERMES = "{% if tools %}...<tool_call>{% endif %}"
CODER = "{% if tools %}<tool_call><function=...>{% endif %}"
LLAMA = '{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        },
    },
}
CALL = ToolCall("add", '{"a": 1, "note": "2"}')


def parse(template: str, text: str) -> ParsedTurn:
    parser = parser_of(template)
    assert parser is not None
    return parser(text, [ADD])


def test_a_template_without_tools_has_no_parser() -> None:
    assert parser_of("{% for message in messages %}{{ message.content }}{% endfor %}") is None


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "add", "arguments": {"note": "2", "a": 1}}\n</tool_call>'),
        (
            CODER,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (LLAMA, '{"name": "add", "parameters": {"a": 1, "note": "2"}}'),
        (LLAMA, '\n\n{"name": "add", "parameters": {"a": 1, "note": "2"}}\n'),
        (LLAMA, '{"name": "add", "arguments": {"a": 1, "note": "2"}}'),
        (HERMES, '<tool_call>{"name": "add", "parameters": {"note": "2", "a": 1}}</tool_call>'),
    ],
)
def test_a_call_in_the_format_of_the_family(template: str, text: str) -> None:
    assert parse(template, text) == ParsedTurn("", (CALL,))


def test_several_calls_after_a_text() -> None:
    block = '<tool_call>{"name": "add", "arguments": {"a": 1, "note": "2"}}</tool_call>'
    assert parse(HERMES, f"I add.\n{block}\n{block}") == ParsedTurn("I add.", (CALL, CALL))
    call = '{"name": "add", "parameters": {"a": 1, "note": "2"}}'
    assert parse(LLAMA, f"{call}; {call}").calls == (CALL, CALL)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, "no call"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}'),  # cut off
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, f"<tool_call>{'[' * 100_000}</tool_call>"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>'),
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 100}{"]" * 100}}}}}</tool_call>'),
        (CODER, "<tool_call><function=add>a = 1</function></tool_call>"),
        (CODER, "<tool_call>add(1)</tool_call>"),
        (LLAMA, '{"a": 1}'),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}} and so on'),
        (LLAMA, ""),
    ],
)
def test_what_is_no_call_stays_text(template: str, text: str) -> None:
    assert parse(template, text) == ParsedTurn(text, ())


def test_arguments_compare_whatever_their_spelling() -> None:
    assert ToolCall.make("add", json.loads('{"note":"2","a":1}')) == CALL


def test_a_value_of_an_unknown_parameter_is_json_or_text() -> None:
    text = (
        "<tool_call><function=sub><parameter=x>3</parameter><parameter=y>z</parameter></function></tool_call>"
    )
    assert parse(CODER, text).calls == (ToolCall("sub", '{"x": 3, "y": "z"}'),)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
    ],
)
def test_a_string_that_may_be_null_is_text(schema: object, text: str, value: object) -> None:
    parser = parser_of(CODER)
    assert parser is not None
    call = f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    assert parser(call, [tool]).calls == (ToolCall("f", json.dumps({"x": value})),)


@pytest.mark.parametrize("value", ["NaN", "-1e999", "[" * 500 + "]" * 500])
def test_a_value_that_json_cannot_carry_is_text(value: str) -> None:
    text = f"<tool_call><function=sub><parameter=x>{value}</parameter></function></tool_call>"
    assert parse(CODER, text).calls == (ToolCall("sub", json.dumps({"x": value})),)


@pytest.mark.parametrize(
    "parameters", [None, [], {"properties": None}, {"properties": {"a": True, "b": "x"}}]
)
def test_a_tool_may_have_any_schema(parameters: object) -> None:
    parser = parser_of(CODER)
    assert parser is not None
    text = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    assert parser(text, [tool]).calls == (ToolCall("add", '{"a": 1}'),)


@pytest.mark.parametrize(
    ("template", "start", "repeated", "end"),
    [
        (HERMES, "", "<tool_call>", ""),
        (CODER, "<tool_call><function=f>", "<parameter=x>", "</function></tool_call>"),
        (CODER, "<tool_call><function=f>", " ", "?</function></tool_call>"),
        (LLAMA, "", '{"name": ', ""),
    ],
)
def test_a_model_that_repeats_itself_is_parsed_in_linear_time(
    template: str, start: str, repeated: str, end: str
) -> None:
    """In quadratic time, this would take hours."""
    text = start + repeated * 10**6 + end
    assert parse(template, text) == ParsedTurn(text, ())
