"""Bad input in each API: an error in the client's form, no episode lost, and nothing left of the request."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.runtime.running import wait_until
from tests.service.fake_run import TOKEN, FakeRun, error_message, serve
from tests.service.test_agent_apis import (
    ANTHROPIC,
    CALL_TEXT,
    CLAUDE_TOOLS,
    EPISODE,
    OPENAI,
    RESPONSES,
    RESPONSES_TOOLS,
    SCHEMA,
    TOOLS,
    ask,
    chunks,
    make_run,
    text_of,
)
from tests.service.test_agent_clients import address

from dora.core.types import RequestId
from dora.data.tool_calls import MAX_DEPTH
from dora.envs.episode import (
    EpisodeBranched,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeId,
    EpisodeObservation,
    EpisodeStarted,
    PolicyTurn,
)
from dora.runtime.rollout.agent_sessions import ChatMessage, TurnRequest
from dora.service import connections
from dora.service.server import WebGateway, make_app

APIS = (OPENAI, ANTHROPIC, RESPONSES)
OTHER = EpisodeId(RequestId(0, 4, 0), 1)
QUESTION = "1 + 1?"
COMPLETIONS = "/s/a/v1/completions"
NUM_VANISHING = 200
TIMEOUT_S = 60.0
END = b"data: [DONE]\n\n"  # of a stream


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """An episode waits for an agent; bodies may be large."""
    run = make_run(tmp_path)
    run.app = make_app(run.requests, TOKEN, 2**24)
    return run


def body_of(api: str, history: list[Any], **more: Any) -> dict[str, Any]:
    """A request with a tool, for the turn after QUESTION and the messages or items of `history`."""
    messages = [{"role": "user", "content": QUESTION}, *history]
    if api == RESPONSES:
        return {"input": messages, "tools": RESPONSES_TOOLS, **more}
    if api == ANTHROPIC:
        return {"model": "policy", "max_tokens": 100, "messages": messages, "tools": CLAUDE_TOOLS, **more}
    return {"messages": messages, "tools": TOOLS, **more}


def turn_of(api: str, response: Any) -> tuple[str, list[tuple[str, Any]], list[Any]]:
    """The text of a response, its calls (name and arguments), and the turn as a client sends it back."""
    found = response.json()
    if api == ANTHROPIC:
        blocks = found["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        return text, calls, [{"role": "assistant", "content": blocks}]
    if api == RESPONSES:
        items = found["output"]
        text = "".join(item["content"][0]["text"] for item in items if item["type"] == "message")
        found_calls = [item for item in items if item["type"] == "function_call"]
        return text, [(item["name"], json.loads(item["arguments"])) for item in found_calls], items
    message = found["choices"][0]["message"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    named = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return message["content"] or "", named, [message]


def result_of(api: str, text: str) -> dict[str, Any]:
    """The result of the first call of a turn, as a message or item."""
    id = "call_a-0-0"
    if api == RESPONSES:
        return {"type": "function_call_output", "call_id": id, "output": text}
    if api == ANTHROPIC:
        block = {"type": "tool_result", "tool_use_id": id, "content": text}
        return {"role": "user", "content": [block]}
    return {"role": "tool", "tool_call_id": id, "content": text}


def nested(depth: int) -> str:
    """A JSON array of arrays."""
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("value", ["NaN", "-1e999", nested(MAX_DEPTH), nested(900)])
def test_a_call_of_the_model_that_clients_cannot_read_stays_text(run: FakeRun, api: str, value: str) -> None:
    """Also in a stream; and the history with it is no branch."""
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'
    text, calls, turn = turn_of(api, ask(run, api, body_of(api, []), call))
    assert (text, calls) == (call, [])
    stream = ask(run, api, body_of(api, [], stream=True), None)
    assert all("error" not in event or event["error"] is None for event in chunks(stream))
    run.replies()
    assert ask(run, api, body_of(api, [*turn, result_of(api, "?")]), "2", number=1).status_code == 200
    (reply,) = run.replies()
    assert isinstance(reply, EpisodeObservation)


@pytest.mark.parametrize("api", APIS)
def test_a_call_of_a_tool_that_the_request_does_not_have_reaches_the_agent(run: FakeRun, api: str) -> None:
    call = '<tool_call>{"name": "divide", "arguments": {"a": 1}}</tool_call>'
    text, calls, turn = turn_of(api, ask(run, api, body_of(api, []), call))
    assert (text, calls) == ("", [("divide", {"a": 1})])
    run.replies()
    history = [*turn, result_of(api, "there is no divide")]
    assert ask(run, api, body_of(api, history), "2", number=1).status_code == 200
    (reply,) = run.replies()
    assert isinstance(reply, EpisodeObservation)
    assert "there is no divide" in text_of(run, reply.token_ids)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("value", ["NaN", "1e999", nested(MAX_DEPTH), nested(900), nested(10**5)])
def test_a_tool_whose_schema_is_not_portable_takes_no_episode(run: FakeRun, api: str, value: str) -> None:
    content = json.dumps(body_of(api, [])).replace('"integer"', value)
    kind = {"content-type": "application/json"}
    response = run.call("POST", api, content=content, headers=kind)
    assert response.status_code in (400, 422)
    message = error_message(response, response.status_code)
    assert f"at most {MAX_DEPTH} levels" in message or "less nested" in message
    assert (run.agents.num_waiting, run.agents.num_sessions, run.replies()) == (1, 0, [])


@pytest.mark.parametrize("properties", [[], None, "a", {"a": True}, {"a": "integer"}])
@pytest.mark.parametrize("api", APIS)
def test_a_tool_with_any_schema_is_served_or_refused(run: FakeRun, api: str, properties: object) -> None:
    """The driver parses the model's turn with it, and must go on."""
    body = json.loads(json.dumps(body_of(api, [])).replace(json.dumps(SCHEMA["properties"]), '"@"'))
    content = json.loads(json.dumps(body).replace('"@"', json.dumps(properties)))
    assert turn_of(api, ask(run, api, content, CALL_TEXT))[1] == [("add", {"a": 1})]


def history_of_another_session(api: str) -> list[Any]:
    """A call with an id of session b, and its result."""
    if api == ANTHROPIC:
        call: dict[str, Any] = {"type": "tool_use", "id": "call_b-0-0", "name": "add", "input": {"a": 7}}
        return [{"role": "assistant", "content": [call]}, result_of(api, "8")]
    if api == RESPONSES:
        call = {"type": "function_call", "call_id": "call_b-0-0", "name": "add", "arguments": '{"a": 7}'}
        return [call, result_of(api, "8")]
    function = {"name": "add", "arguments": '{"a": 7}'}
    message = {"role": "assistant", "tool_calls": [{"id": "call_b-0-0", "function": function}]}
    return [message, result_of(api, "8")]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_history_of_another_session_is_context_without_loss(run: FakeRun, api: str, is_first: bool) -> None:
    """No token of it counts as sampled here, and the other session goes on."""
    run.call("PUT", "/v1/sessions/a")
    run.agents.start(OTHER, version=4)
    run.call("PUT", "/v1/sessions/b")
    run.agents.complete("b", TurnRequest((ChatMessage("user", QUESTION),)))
    run.agents.on_turn(PolicyTurn(OTHER, 0, run.setup.tokenizer.encode(CALL_TEXT), "stop", 200))
    run.replies()
    if not is_first:
        ask(run, api, body_of(api, []), CALL_TEXT)
    run.replies()
    body = body_of(api, history_of_another_session(api))
    if not is_first:
        run.agents._no_branches = "the run has trainer.routing_replay = true"
        assert "send the messages of the last call" in error_message(ask(run, api, body, None), 409)
        run.agents._no_branches = ""
    assert ask(run, api, body, "2", number=int(not is_first)).status_code == 200
    (reply,) = run.replies()
    assert isinstance(reply, EpisodeStarted if is_first else EpisodeBranched)
    assert (run.agents.num_retokenized, run.agents.num_sessions) == (0, 2)
    assert run.call("GET", "/v1/sessions/b").json()["num_turns"] == 1
    assert run.call("POST", "/s/b/reward", json={"reward": 1.0}).status_code == 200
    assert run.replies() == [EpisodeEnded(OTHER, 0, 1.0)]


def test_a_text_completion_after_the_text_of_another_session_is_context(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, service__agents="true")
    run.agents.start(EPISODE, version=4)
    assert ask(run, COMPLETIONS, {"prompt": "13:77,"}, "8").json()["usage"]["prompt_tokens"] == 6
    assert run.replies() == [EpisodeStarted(EPISODE, tuple(run.setup.tokenizer.encode("13:77,")), None)]


@pytest.mark.parametrize(
    ("path", "body", "remedy"),
    [
        (RESPONSES, {"input": QUESTION, "previous_response_id": "resp_b-0"}, "send the whole conversation"),
        (
            OPENAI,
            {"messages": [{"role": "tool", "content": "1"}], "tools": [{"type": "web"}]},
            "tools.0.type",
        ),
        (OPENAI, {"messages": [{"role": "x"}] * 10**5}, "and 99995 more"),
        (RESPONSES, {"input": [{"role": "x"}] * 1000}, "input.0.message.role"),
        (ANTHROPIC, {"model": "policy", "max_tokens": 1, "messages": [], "x" * 10**6: 1}, "at least 1"),
    ],
)
def test_an_invalid_body_has_a_short_error_and_takes_no_episode(
    run: FakeRun, path: str, body: dict[str, Any], remedy: str
) -> None:
    message = error_message(run.call("POST", path, json=body), 422)
    assert remedy in message
    assert len(message) < 1000
    assert (run.agents.num_waiting, run.agents.num_sessions) == (1, 0)


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"messages": [{"role": "user"'])
@pytest.mark.parametrize("api", [*APIS, COMPLETIONS])
def test_a_body_that_is_no_json_is_refused(run: FakeRun, api: str, content: bytes) -> None:
    response = run.call("POST", api, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422)
    assert "JSON" in error_message(response, response.status_code)
    assert (run.agents.num_waiting, run.agents.num_sessions) == (1, 0)


LARGE = "x" * 10**7


@pytest.mark.parametrize("api", [*APIS, COMPLETIONS])
def test_ten_megabytes_are_refused_before_they_are_read(tmp_path: Path, api: str) -> None:
    """The default limit of a body."""
    run = make_run(tmp_path)
    run.app = make_app(run.requests, TOKEN, run.setup.config.service.max_body_bytes)
    assert "max_body_bytes" in error_message(run.call("POST", api, json={"prompt": LARGE}), 413)
    assert (run.agents.num_waiting, run.agents.num_sessions) == (1, 0)


@pytest.mark.parametrize(
    ("api", "history"),
    [
        (OPENAI, [{"role": "user", "content": LARGE}]),
        (ANTHROPIC, [{"role": "user", "content": LARGE}]),
        (RESPONSES, [{"role": "user", "content": LARGE}]),
        (OPENAI, [{"role": "user", "content": ""}] * 10**5),
        (
            OPENAI,
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}] * 10**5,
                }
            ],
        ),
        (
            ANTHROPIC,
            [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": LARGE}}],
                }
            ],
        ),
    ],
)
def test_a_conversation_that_cannot_fit_is_refused_before_the_driver_tokenizes_it(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, api: str, history: list[Any]
) -> None:
    """As the first call of a session, which takes no episode, and as a later one."""
    body = body_of(api, [*history, {"role": "user", "content": "?"}])
    encode = type(run.setup.tokenizer).encode
    monkeypatch.setattr(type(run.setup.tokenizer), "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    assert "; send " in error_message(ask(run, api, body, None), 400)
    assert (run.agents.num_waiting, run.agents.num_sessions) == (1, 0)
    monkeypatch.setattr(type(run.setup.tokenizer), "encode", encode)
    assert ask(run, api, body_of(api, []), "2").status_code == 200
    run.replies()
    monkeypatch.setattr(type(run.setup.tokenizer), "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    assert "; send " in error_message(ask(run, api, body, None), 400)
    assert (run.agents.num_sessions, run.replies()) == (1, [])


def test_a_refused_first_request_leaves_the_name_of_its_session_free(run: FakeRun) -> None:
    body = body_of(OPENAI, [{"role": "user", "content": "1 " * 390}])
    assert "they must have 1 to" in error_message(ask(run, OPENAI, body, None), 400)
    assert (run.agents.num_waiting, run.agents.num_sessions) == (1, 0)
    assert ask(run, OPENAI, body_of(OPENAI, []), "2").status_code == 200


class RawClient(socket.socket):
    """A connection whose client may stop reading, or vanish."""

    def __init__(self, run: FakeRun, method: str, path: str, body: object, buffer_size: int = 4096) -> None:
        """Sends a request; the kernel receives about `buffer_size` bytes more than the client reads."""
        super().__init__()
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_size)
        self.settimeout(TIMEOUT_S)
        url, token = address(run)
        parts = urlsplit(url)
        self.connect((parts.hostname, parts.port))
        content = json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: run", f"Authorization: Bearer {token}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "", ""]
        self.sendall("\r\n".join(lines).encode() + content)

    def vanish(self) -> None:
        """Reset the connection."""
        self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()


def num_connections(gateway: WebGateway) -> int:
    """Connections that the server has."""
    assert gateway._server is not None
    return len(gateway._server.server_state.connections)


@contextmanager
def large_turn(run: FakeRun) -> Iterator[dict[str, Any]]:
    """The body of a request for a stream that is larger than all buffers between server and client."""
    ids = run.setup.tokenizer.encode("1") * 100_000

    def generate() -> None:
        run.messages.get()
        run.finish_turn(PolicyTurn(EPISODE, 0, ids, "stop", 200, [-0.125] * len(ids)))

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    yield body_of(OPENAI, [], stream=True, logprobs=True)
    thread.join(TIMEOUT_S)


def test_a_client_that_stops_reading_a_stream_loses_its_connection(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile other clients are served; afterwards its session has the turn."""
    monkeypatch.setattr(connections, "READ_TIMEOUT_S", 0.3)
    with serve(run) as gateway, large_turn(run) as body, RawClient(run, "POST", OPENAI, body) as client:
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        url, token = address(run)
        status = httpx.get(f"{url}/v1/status", headers={"Authorization": f"Bearer {token}"})
        assert status.json()["agents"]["sessions"] == 1
        wait_until(lambda: num_connections(gateway) == 0)
        assert not b"".join(iter(lambda: client.recv(2**20), b"")).endswith(END)
        assert run.call("GET", "/v1/sessions/a").json()["num_turns"] == 1
        assert run.call("POST", "/s/a/reward", json={"reward": 1.0}).status_code == 200


def test_a_client_that_reads_slowly_gets_the_whole_stream(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "READ_TIMEOUT_S", 1.0)
    with (
        serve(run) as gateway,
        large_turn(run) as body,
        RawClient(run, "POST", OPENAI, body, 2**16) as client,
    ):
        content = bytearray()
        while not content.endswith(END):
            content += (part := client.recv(2**16))
            assert part, "the service closed the connection"
            threading.Event().wait(0.005)
        assert len(content) > 2**22
        wait_until(lambda: gateway.num_requests == 0)


def test_sessions_whose_clients_vanish_end_and_leave_nothing(run: FakeRun) -> None:
    """Some without a turn, some during one, some during its stream, some after it."""
    run.agents.release(EPISODE)
    for i in range(NUM_VANISHING):
        run.agents.start(EpisodeId(RequestId(0, 3, i), i), version=4)
    turn_ids = run.setup.tokenizer.encode(CALL_TEXT)
    with serve(run) as gateway:
        num_threads, clients = threading.active_count(), list[RawClient]()
        for i in range(NUM_VANISHING):
            method, path = ("POST", f"/s/{i}/v1/chat/completions") if i % 4 else ("PUT", f"/v1/sessions/{i}")
            clients.append(RawClient(run, method, path, body_of(OPENAI, [], stream=True)))
        started = set[EpisodeId]()

        def have_started() -> bool:
            started.update(reply.episode for reply in run.replies())
            return run.agents.num_sessions == NUM_VANISHING and len(started) >= NUM_VANISHING * 3 // 4

        wait_until(have_started)
        episodes = [run.agents._sessions[str(i)].episode for i in range(NUM_VANISHING)]
        assert started == {episode for i, episode in enumerate(episodes) if i % 4}
        for i, (client, episode) in enumerate(zip(clients, episodes, strict=True)):
            if i % 4 > 1:
                run.finish_turn(PolicyTurn(episode, 0, turn_ids, "stop", 200))
                assert client.recv(15 if i % 4 == 2 else 10**5).startswith(b"HTTP/1.1 200 OK")
            client.vanish()
        wait_until(lambda: gateway.num_requests == 0 and num_connections(gateway) == 0)
        run.process()
        assert not run.requests._waiting
        for episode in episodes[1::4]:  # the model does not know that nobody waits
            run.finish_turn(PolicyTurn(episode, 0, turn_ids, "stop", 200))
        assert (run.agents.num_sessions, run.agents.num_waiting) == (NUM_VANISHING, 0)
        run.agents._clock._ran_s += run.setup.config.service.session_timeout_s + 1
        run.agents.check_deadlines()
        replies = run.replies()
        assert (len(replies), {reply.episode for reply in replies}) == (len(started), started)
        assert all(
            isinstance(reply, EpisodeFailed) and reply.reason == "session expired" for reply in replies
        )
        for episode in started:
            run.agents.release(episode)
        assert (run.agents.num_sessions, run.agents.num_waiting) == (0, NUM_VANISHING // 4)
        assert threading.active_count() == num_threads
        assert all(not ended.turns and not ended.token_ids for ended in run.agents._ended.values())
