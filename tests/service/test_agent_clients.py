"""The SDKs of OpenAI and Anthropic, unmodified, run episodes through the real server.

Tests import them: each takes a second, in every process that collects the tests.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.service.fake_run import FakeRun, serve
from tests.service.test_agent_apis import (
    CALL_TEXT,
    CLAUDE_TOOLS,
    EPISODE,
    RESPONSES_TOOLS,
    TOOLS,
    USER,
    make_run,
)

from dora.envs.episode import EpisodeObservation, EpisodeReply, PolicyTurn


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    """A served run; an episode waits for an agent."""
    run = make_run(tmp_path)
    with serve(run):
        yield run


@contextmanager
def model(run: FakeRun, turns: Sequence[str], num_left: int = 200) -> Iterator[list[EpisodeReply]]:
    """A model that generates these turns, one for each request; yields the requests."""
    replies: list[EpisodeReply] = []

    def generate() -> None:
        for number, text in enumerate(turns):
            replies.append(run.messages.get()[1])
            run.finish_turn(PolicyTurn(EPISODE, number, run.setup.tokenizer.encode(text), "stop", num_left))

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    yield replies
    thread.join(60)
    assert len(replies) == len(turns)


def address(run: FakeRun) -> tuple[str, str]:
    """URL and auth token of the service."""
    fields = json.loads((run.setup.out / "service.json").read_text())
    return fields["url"], fields["token"]


def openai_client(run: FakeRun) -> Any:
    """OpenAI's client for the session a."""
    import openai

    url, token = address(run)
    return openai.OpenAI(base_url=f"{url}/s/a/v1", api_key=token, max_retries=0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_with_openais_client_calls_a_tool(run: FakeRun, is_stream: bool) -> None:
    import openai

    client = openai_client(run)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages: list[Any] = [USER]
    with model(run, [CALL_TEXT, "2"]):
        first = complete(client, messages, is_stream)
        (call,) = first.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        messages += [first, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        assert complete(client, messages, is_stream).content == "2"
    with pytest.raises(openai.BadRequestError, match=r"sampling.temperature = 1.0; leave it out"):
        client.chat.completions.create(model="policy", messages=messages, temperature=0.1)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()


@pytest.mark.parametrize("is_stream", [False, True])
def test_openais_client_gets_the_log_probs_of_a_turn(run: FakeRun, is_stream: bool) -> None:
    client = openai_client(run)
    ids = [*run.setup.tokenizer.encode(CALL_TEXT), run.setup.tokenizer.stop_ids[0]]
    logprobs = [-i / 8 for i in range(len(ids))]
    about = {"model": "policy", "messages": [USER], "tools": TOOLS, "logprobs": True}

    def generate() -> None:
        run.messages.get()
        run.finish_turn(PolicyTurn(EPISODE, 0, ids, "stop", 200, logprobs))

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    if is_stream:
        with client.chat.completions.stream(**about) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**about).choices[0]
    thread.join(60)
    assert [token.logprob for token in choice.logprobs.content] == logprobs
    *tokens, stop = (token.token for token in choice.logprobs.content)
    assert ("".join(tokens), bool(stop)) == (CALL_TEXT, True)
    again = client.chat.completions.create(**about | {"logprobs": False}).choices[0]
    assert (again.logprobs, again.message.content) == (None, "I add.")


def test_log_probs_that_an_engine_does_not_report_are_refused(run: FakeRun) -> None:
    import openai

    client = openai_client(run)
    about = {"model": "policy", "messages": [USER]}
    with (
        model(run, ["2"]),
        pytest.raises(openai.BadRequestError, match=r"leave logprobs out"),
    ):
        client.chat.completions.create(**about, logprobs=True)
    assert client.chat.completions.create(**about).choices[0].message.content == "2"


def complete(client: Any, messages: Sequence[Any], is_stream: bool) -> Any:
    """The message of the model, accumulated by the client where it is streamed."""
    about = {"model": "policy", "messages": messages, "tools": TOOLS}
    if not is_stream:
        return client.chat.completions.create(**about).choices[0].message
    with client.chat.completions.stream(**about, stream_options={"include_usage": True}) as stream:
        completion = stream.get_final_completion()
    assert completion.usage.completion_tokens > 0
    return completion.choices[0].message


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_with_openais_client_calls_a_tool_in_the_responses_api(
    run: FakeRun, is_stream: bool
) -> None:
    import openai

    client = openai_client(run)
    about = {"model": "policy", "instructions": "Use the tool.", "tools": RESPONSES_TOOLS}

    def create(items: Sequence[Any]) -> Any:
        if not is_stream:
            return client.responses.create(input=items, **about)
        with client.responses.stream(input=items, **about) as stream:
            return stream.get_final_response()

    with model(run, [CALL_TEXT, "2", "3"]) as replies:
        first = create([USER])
        text, call = first.output
        assert (first.output_text, text.content[0].text) == ("I add.", "I add.")
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        items = [
            USER,
            *first.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
        ]
        second = create(items)
        assert (second.status, second.output_text) == ("completed", "2")
        assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens
        assert create([*items, *second.output, {"role": "user", "content": "And 3?"}]).output_text == "3"
    assert all(isinstance(reply, EpisodeObservation) for reply in replies[1:])  # no history was changed
    for given, message in (
        ({"temperature": 0.1}, r"sampling.temperature = 1.0; leave it out"),
        ({"previous_response_id": first.id}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ):
        with pytest.raises(openai.APIStatusError, match=message):
            client.responses.create(**about | {"input": [USER]} | given)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_with_anthropics_client_calls_a_tool(run: FakeRun, is_stream: bool) -> None:
    import anthropic

    url, token = address(run)
    client: Any = anthropic.Anthropic(base_url=f"{url}/s/a", api_key=token, max_retries=0)

    def create(messages: Sequence[Any]) -> Any:
        about = {"model": "policy", "max_tokens": 100, "tools": CLAUDE_TOOLS, "messages": messages}
        if not is_stream:
            return client.messages.create(**about)
        with client.messages.stream(**about) as stream:
            return stream.get_final_message()

    with model(run, [CALL_TEXT, "2"]) as replies:
        first = create([USER])
        text, call = first.content
        assert (text.text, call.name, call.input) == ("I add.", "add", {"a": 1})
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
        answer = {"role": "assistant", "content": first.content}
        messages = [USER, answer, {"role": "user", "content": [result]}]
        assert create(messages).content[0].text == "2"
    assert cast(Any, replies[0]).max_turn_tokens == 100
    with pytest.raises(anthropic.BadRequestError, match=r"sampling.top_k"):
        client.messages.create(model="policy", max_tokens=100, messages=messages, extra_body={"top_k": 3})
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="another").messages.create(model="", max_tokens=9, messages=[USER])


def test_an_agent_with_openais_client_continues_a_text(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, service__agents="true")
    run.agents.start(EPISODE, version=4)
    with serve(run), model(run, ["77", "8"]) as replies:
        client = openai_client(run)
        text = "13:"
        for answer in ("77", "8"):
            choice = client.completions.create(model="policy", prompt=text).choices[0]
            assert choice.text == answer
            text += f"{choice.text},"
    assert isinstance(replies[1], EpisodeObservation)
