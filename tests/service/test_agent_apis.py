"""Tools and streams in OpenAI's and Anthropic's API, with a model whose chat template has tool calls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.tiny import MODEL
from tests.service.fake_run import TOKEN, FakeRun, error_message

from dora.core.types import RequestId
from dora.data.tokenizer import CHAT_TEMPLATE, save_bpe_tokenizer
from dora.envs.episode import EpisodeBranched, EpisodeId, EpisodeObservation, EpisodeStarted, PolicyTurn
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights

EPISODE = EpisodeId(RequestId(0, 3, 1), 0)
OPENAI, ANTHROPIC = "/s/a/v1/chat/completions", "/s/a/v1/messages"
RESPONSES = "/s/a/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
CLAUDE_TOOLS = [{"name": "add", "input_schema": SCHEMA}]
RESPONSES_TOOLS = [{"type": "function", "name": "add", "parameters": SCHEMA}]
USER = {"role": "user", "content": "1 + 1?"}
CALL = {"type": "tool_use", "id": "call_a-0-0", "name": "add", "input": {"a": 1}}
CALL_ITEM = {"type": "function_call", "call_id": "call_a-0-0", "name": "add", "arguments": "{}"}
CALL_TEXT = 'I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


TOOL = {"role": "tool", "tool_call_id": "call_a-0-0", "content": "2"}


def make_run(folder: Path, max_tokens: int = 400, **changes: object) -> FakeRun:
    """An episode waits for an agent. A prompt may have `max_tokens`, and so may a response.

    The policy has a tokenizer for any text, and a chat template with tools.
    """

    def prepare(start: Path) -> None:
        model = replace(MODEL, vocab_size=300, max_position_embeddings=2 * max_tokens)
        save_pretrained(start, model, initial_weights(model, seed=0))
        save_bpe_tokenizer(start, [CALL_TEXT] * 4, 300, CHAT_TEMPLATE + "{{ thoughts }}")

    run = FakeRun(
        folder,
        prepare,
        service__agents="true",
        data__chat_template="true",
        data__max_prompt_length=max_tokens,
        sampling__max_response_length=max_tokens,
        **changes,
    )
    run.agents.start(EPISODE, version=4)
    return run


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return make_run(tmp_path)


def ask(
    run: FakeRun, path: str, body: dict[str, Any], text: str | None, number: int = 0, end: Any = "stop"
) -> Any:
    """Request a turn; the model generates `text`, unless it is None."""
    if text is None:
        return run.ask(path, body, None)
    return run.ask(path, body, PolicyTurn(EPISODE, number, run.setup.tokenizer.encode(text), end, 200))


def text_of(run: FakeRun, ids: tuple[int, ...]) -> str:
    """Without special tokens."""
    return run.setup.tokenizer.decode(ids)


def test_the_model_calls_a_tool_and_reads_its_result(run: FakeRun) -> None:
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "auto"}
    (choice,) = ask(run, OPENAI, body, CALL_TEXT).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert call == {"id": "call_a-0-0", "type": "function", "function": function}
    assert choice["message"]["content"] == "I add."
    (started,) = run.replies()
    assert isinstance(started, EpisodeStarted)
    assert '"name": "add"' in text_of(run, started.prompt_ids)
    again = json.loads(json.dumps(choice["message"]))
    again["tool_calls"][0]["function"]["arguments"] = '{"a":1}'  # agents write JSON in their own way
    tool = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    second = ask(run, OPENAI, body | {"messages": [USER, again, tool]}, "2", number=1).json()
    assert second["choices"][0]["message"] == {"role": "assistant", "content": "2"}
    (observed,) = run.replies()
    assert isinstance(observed, EpisodeObservation)
    assert "tool\n2" in text_of(run, observed.token_ids)


@pytest.mark.parametrize("arguments", ["[1]", '{"a": '])
def test_arguments_that_are_no_json_object_are_refused(run: FakeRun, arguments: str) -> None:
    body = {"messages": [USER], "tools": TOOLS}
    answer = ask(run, OPENAI, body, CALL_TEXT).json()["choices"][0]["message"]
    run.replies()
    answer["tool_calls"][0]["function"]["arguments"] = arguments
    response = ask(run, OPENAI, body | {"messages": [USER, answer, TOOL]}, None)
    assert "no JSON object" in error_message(response, 400)
    assert run.replies() == []


@pytest.mark.parametrize(
    ("change", "has_sampled_call"),
    [
        ({"tools": []}, True),
        ({"tools": [{"type": "function", "function": {"name": "sub"}}]}, True),
        ({"arguments": '{"a": 2}'}, False),
    ],
)
def test_other_tools_or_calls_than_before_are_a_branch(
    run: FakeRun, change: dict[str, Any], has_sampled_call: bool
) -> None:
    body = {"messages": [USER], "tools": TOOLS}
    answer = ask(run, OPENAI, body, CALL_TEXT).json()["choices"][0]["message"]
    (started,) = run.replies()
    assert isinstance(started, EpisodeStarted)
    if "arguments" in change:
        answer["tool_calls"][0]["function"]["arguments"] = change["arguments"]
    else:
        body |= change
    response = ask(run, OPENAI, body | {"messages": [USER, answer, TOOL]}, "2", number=1)
    assert response.json()["choices"][0]["message"]["content"] == "2"
    (branched,) = run.replies()
    assert isinstance(branched, EpisodeBranched)
    ids = branched.prompt_ids
    log = (*started.prompt_ids, *run.setup.tokenizer.encode(CALL_TEXT))
    num_shared = len(ids) - branched.num_new
    assert ids[:num_shared] == log[:num_shared]
    assert (0 < num_shared == branched.parent < len(log), ids[num_shared] != log[num_shared]) == (True, True)
    assert ("<tool_call>" in text_of(run, ids[-branched.num_new :])) == has_sampled_call
    assert run.agents.num_retokenized == 0


def test_a_client_that_strips_or_does_not_parse_a_turn_continues_its_tokens(run: FakeRun) -> None:
    body = {"messages": [USER], "tools": TOOLS}
    ask(run, OPENAI, body, f"{CALL_TEXT} ")
    run.replies()
    raw = {"role": "assistant", "content": CALL_TEXT}
    assert ask(run, OPENAI, body | {"messages": [USER, raw, TOOL]}, "2", number=1).status_code == 200
    (observed,) = run.replies()
    assert isinstance(observed, EpisodeObservation)
    assert "tool_call" not in text_of(run, observed.token_ids)


def test_a_client_that_writes_whole_numbers_without_a_fraction_continues_its_tokens(run: FakeRun) -> None:
    """As JSON.stringify does."""
    body = {"messages": [USER], "tools": TOOLS}
    answer = ask(run, OPENAI, body, CALL_TEXT.replace('"a": 1', '"a": -1.0, "b": [0.5, 1e3]'))
    message = answer.json()["choices"][0]["message"]
    run.replies()
    message["tool_calls"][0]["function"]["arguments"] = '{"a":-1,"b":[0.5,1000]}'
    assert ask(run, OPENAI, body | {"messages": [USER, message, TOOL]}, "2", number=1).status_code == 200
    (observed,) = run.replies()
    assert isinstance(observed, EpisodeObservation)


def test_a_compacted_history_keeps_the_sampled_tokens_of_its_turns(run: FakeRun) -> None:
    ask(run, OPENAI, {"messages": [USER]}, "aXb")
    run.replies()
    history = [USER, {"role": "assistant", "content": "aXb"}, USER | {"content": "2 + 2?"}]
    ask(run, OPENAI, {"messages": history}, "4", number=1)
    run.replies()
    compacted = [USER | {"content": "(summary)"}, *history[1:], {"role": "assistant", "content": "4"}, USER]
    assert ask(run, OPENAI, {"messages": compacted}, "2", number=2).status_code == 200
    (branched,) = run.replies()
    assert isinstance(branched, EpisodeBranched)
    text = text_of(run, branched.prompt_ids)
    assert text.index("(summary)") < text.index("aXb") < text.index("2 + 2?") < text.index("1 + 1?")
    assert (run.agents.num_branches, run.agents.num_retokenized) == (1, 0)
    status = run.call("GET", "/v1/status").json()["agents"]
    assert (status["branches"], status["retokenized"]) == (1, 0)


def test_a_conversation_that_is_continued_in_several_ways_has_the_same_tokens_each_time(run: FakeRun) -> None:
    """As in a tree search."""
    prompts = []
    for number in range(0, 6, 2):
        answer = ask(run, OPENAI, {"messages": [USER]}, f"{number}", number).json()["choices"][0]["message"]
        (begun,) = run.replies()
        assert isinstance(begun, EpisodeStarted | EpisodeBranched)
        prompts.append(begun.prompt_ids)
        ask(run, OPENAI, {"messages": [USER, answer, USER]}, "next", number + 1)
        assert [type(reply) for reply in run.replies()] == [EpisodeObservation]
    assert prompts == [prompts[0]] * 3


def test_tools_are_refused_if_the_template_shows_none(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, service__agents="true")
    run.agents.start(EPISODE, version=4)
    response = ask(run, OPENAI, {"messages": [USER | {"content": "1:"}], "tools": TOOLS}, None)
    assert "data.chat_template = true" in error_message(response, 400)
    assert run.replies() == []


def test_without_tools_a_call_is_text(run: FakeRun) -> None:
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}
    (choice,) = ask(run, OPENAI, body, CALL_TEXT).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL_TEXT}
    (started,) = run.replies()
    assert isinstance(started, EpisodeStarted)
    assert "add" not in text_of(run, started.prompt_ids)


def chunks(response: Any) -> list[dict[str, Any]]:
    """The JSON of all events of a stream."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_stream_has_the_same_turn(run: FakeRun) -> None:
    body = {"messages": [USER], "tools": TOOLS}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = ask(run, OPENAI, body | options, CALL_TEXT)
    assert response.text.endswith("data: [DONE]\n\n")
    whole = ask(run, OPENAI, body, None).json()
    *parts, end, usage = chunks(response)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls == [{"index": 0} | call for call in whole["choices"][0]["message"]["tool_calls"]]
    assert (end["choices"][0]["finish_reason"], usage["choices"]) == ("tool_calls", [])
    assert usage["usage"] == whole["usage"]
    assert {part["id"] for part in (*parts, end, usage)} == {whole["id"]}
    assert len(run.replies()) == 1


def test_a_refused_stream_has_the_status_of_its_error(run: FakeRun) -> None:
    body = {"messages": [USER], "stream": True, "temperature": 0.5}
    assert "sampling.temperature" in error_message(ask(run, OPENAI, body, None), 400)


def test_an_episode_in_anthropics_api(run: FakeRun) -> None:
    body = {"model": "policy", "max_tokens": 100, "system": "Be brief.", "tools": CLAUDE_TOOLS}
    first = ask(run, ANTHROPIC, body | {"messages": [USER]}, CALL_TEXT).json()
    assert first["content"] == [{"type": "text", "text": "I add."}, CALL]
    assert (first["stop_reason"], first["version"]) == ("tool_use", 4)
    (started,) = run.replies()
    assert isinstance(started, EpisodeStarted)
    assert (started.max_turn_tokens, "system\nBe brief." in text_of(run, started.prompt_ids)) == (100, True)
    result = {"type": "tool_result", "tool_use_id": CALL["id"], "content": [{"type": "text", "text": "2"}]}
    messages = [
        USER,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    response = ask(run, ANTHROPIC, body | {"messages": messages, "stream": True}, "2", number=1)
    events = chunks(response)
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert events[2]["delta"] == {"type": "text_delta", "text": "2"}
    assert events[4]["delta"]["stop_reason"] == "end_turn"
    (observed,) = run.replies()
    assert isinstance(observed, EpisodeObservation)
    seen = text_of(run, observed.token_ids)
    assert seen.index("tool\n2") < seen.index("user\nSo?")
    num_before = sum(first["usage"].values()) + len(observed.token_ids)
    num_tokens = len(run.setup.tokenizer.encode("2"))
    assert events[4]["usage"] == {"input_tokens": num_before, "output_tokens": num_tokens}


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"top_k": 5}, 400, "sampling.top_k = 0"),
        ({"stop_sequences": ["x"]}, 400, "sampling.stop"),
        ({"max_tokens": None}, 422, "max_tokens"),
        ({"thinking": {"type": "enabled"}}, 422, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 422, "messages"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, 400, "role assistant"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused_in_anthropics_form(
    run: FakeRun, change: dict[str, Any], status: int, reason: str
) -> None:
    body = {"model": "policy", "max_tokens": 100, "messages": [USER]} | change
    response = ask(run, ANTHROPIC, body, None)
    assert reason in error_message(response, status)
    assert response.json()["type"] == "error"
    assert (run.replies(), run.agents.num_waiting) == ([], 1)


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"top_p": 0.5}, 400, "sampling.top_p = 1.0"),
        ({"previous_response_id": "resp_a-0"}, 422, "previous_response_id"),
        ({"input": []}, 422, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 422, "input"),
        ({"input": [USER, CALL_ITEM | {"arguments": "[1]"}]}, 400, "no JSON object"),
        ({"tools": [{"type": "web_search"}]}, 422, "tools"),
        ({"include": ["reasoning.encrypted_content"]}, 422, "include"),
        ({"text": {"format": {"type": "json_object"}}}, 422, "text"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_honoured_is_refused_in_the_responses_api(
    run: FakeRun, change: dict[str, Any], status: int, reason: str, stream: bool
) -> None:
    response = ask(run, RESPONSES, {"model": "policy", "input": "1 + 1?", "stream": stream} | change, None)
    assert reason in error_message(response, status)
    assert (run.replies(), run.agents.num_waiting) == ([], 1)


def test_calls_in_the_responses_api_are_one_message_with_the_text_before_them(run: FakeRun) -> None:
    """As the policy generated them; so the history of the next request is no branch."""
    two = CALL_TEXT + '<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>'
    body: dict[str, Any] = {"instructions": "Add.", "tools": RESPONSES_TOOLS, "max_output_tokens": 90}
    first = ask(run, RESPONSES, body | {"input": "1 + 1?"}, two).json()
    assert [item["type"] for item in first["output"]] == ["message", "function_call", "function_call"]
    (started,) = run.replies()
    assert isinstance(started, EpisodeStarted)
    assert started.max_turn_tokens == 90
    results = [
        {
            "type": "function_call_output",
            "call_id": item["call_id"],
            "output": [{"type": "input_text", "text": "2"}],
        }
        for item in first["output"][1:]
    ]
    ask(run, RESPONSES, body | {"input": [USER, *first["output"], *results]}, "2", number=1)
    (observed,) = run.replies()
    assert isinstance(observed, EpisodeObservation)
    assert text_of(run, observed.token_ids).count("tool\n2") == 2


def test_a_turn_that_reached_its_length_is_an_incomplete_response(run: FakeRun) -> None:
    response = ask(run, RESPONSES, {"input": "1 + 1?"}, "2", end="length").json()
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )


def test_a_stream_of_an_incomplete_response_says_so(run: FakeRun) -> None:
    events = chunks(ask(run, RESPONSES, {"input": "1 + 1?", "stream": True}, "2", end="length"))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.incomplete")
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "2"


def test_variables_of_the_chat_template_are_those_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, data__chat_template_kwargs='{thoughts = "(no)"}')
    body = {"messages": [USER], "chat_template_kwargs": {"thoughts": "(yes)"}}
    expected = 'must be the run\'s data.chat_template_kwargs = {"thoughts": "(no)"}; leave it out'
    assert expected in error_message(ask(run, OPENAI, body, None), 400)
    assert (run.replies(), run.agents.num_waiting) == ([], 1)
    answer = {"role": "assistant", "content": "2"}
    assert ask(run, OPENAI, body | {"chat_template_kwargs": {"thoughts": "(no)"}}, "2").status_code == 200
    (started,) = run.replies()
    assert isinstance(started, EpisodeStarted)
    assert ask(run, OPENAI, {"messages": [USER, answer, USER]}, "2", number=1).status_code == 200
    (observed,) = run.replies()
    assert isinstance(observed, EpisodeObservation)
    for ids in (started.prompt_ids, observed.token_ids):
        assert text_of(run, ids).endswith("assistant\n(no)")


def test_text_completions_are_refused_with_a_chat_template(run: FakeRun) -> None:
    response = run.call("POST", "/s/a/v1/completions", json={"prompt": "1 + 1?"})
    assert "data.chat_template = false" in error_message(response, 400)
    assert run.agents.num_waiting == 1


def test_a_key_in_anthropics_header_is_a_token(run: FakeRun) -> None:
    async def get(http: Any, key: str) -> Any:
        del http.headers["Authorization"]
        return await http.get("/s/a/v1/models", headers={"x-api-key": key})

    assert run.call_many(lambda http: get(http, TOKEN)).status_code == 200
    assert run.call_many(lambda http: get(http, "another")).status_code == 401
