"""The calls of 64 clients of a service: episodes with tools, whole and streamed, status reads, and one
malformed call in twenty.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import shop

STATUS_PATHS = ("/v1/status", "/v1/versions", "/v1/engines", "/metrics")
RETRY_S = 0.05  # before a call with status 429 is retried
MALFORMED = 0.085  # probability of a malformed call before a call of an episode: one in twenty of all calls
STREAMED = 0.75  # share of the episodes whose turns are streams
SLOW = 0.1  # share of the streams that are read slowly
SLOW_S = 0.05  # between two lines of such a stream
VANISHING = 0.002  # probability that an agent abandons its episode before a turn; as often within a stream
HANG_UP = 0  # in place of a status: the connection was closed without a response


@dataclass
class CallStats:
    """Latencies and results of all calls; times in seconds."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # by kind of call
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # responses with an unexpected status
    rewards: dict[tuple[str, int, int], float] = field(default_factory=dict)  # group, sibling, version
    ended: Counter[str] = field(default_factory=Counter)  # sessions that ended before their reward
    refused: Counter[str] = field(default_factory=Counter)  # malformed calls
    num_calls: int = 0
    num_malformed: int = 0

    def record(self, kind: str, seconds: float, status: int) -> None:
        self.seconds.setdefault(kind, []).append(seconds)
        self.statuses[status] += 1
        self.num_calls += 1


@dataclass
class Agent:
    """A client, which runs one episode after another."""

    number: int
    url: str
    token: str
    stats: CallStats
    until_s: float

    async def work(self) -> None:
        self._source = random.Random(self.number)
        headers = {"Authorization": f"Bearer {self.token}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=400) as self._http:
            while time.monotonic() < self.until_s:
                await self._run_episode()

    async def _run_episode(self) -> None:
        """One episode of the shop, whose turns call tools."""
        session = uuid.uuid4().hex
        status, episode = await self._call("open", "PUT", f"/v1/sessions/{session}?wait_s=2")
        if status != 200:
            return
        messages: list[Any] = [{"role": "user", "content": episode["prompt"]}]
        row, reward, is_streamed = episode["fields"], 0.0, self._source.random() < STREAMED
        for _ in range(shop.MAX_TURNS):
            if self._source.random() < VANISHING:
                self.stats.ended["vanished before a turn"] += 1
                return
            body = {"messages": messages, "tools": shop.TOOLS}
            message = await (self._stream(session, body) if is_streamed else self._complete(session, body))
            if message is None:
                return
            if not message.get("tool_calls"):
                reward = shop.reward_of(message["content"], row)
                break
            messages.append(message)
            for call in message["tool_calls"]:
                result = shop.call_tool(call["function"]["name"], call["function"]["arguments"], row)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        path = f"/v1/sessions/{session}/reward"
        status, found = await self._call("reward", "POST", path, {"reward": reward})
        if status == 200:
            self.stats.rewards[episode["group"], episode["sibling"], episode["version"]] = reward
        else:
            self.stats.ended[found["error"]["message"]] += 1

    async def _complete(self, session: str, body: dict[str, Any]) -> Any:
        """The message of the next turn; None if the session has ended or has no room for it."""
        status, found = await self._call("turn", "POST", "/v1/chat/completions", body, session)
        if status == 200:
            return found["choices"][0]["message"]
        self.stats.ended[found["error"]["message"]] += 1
        return None

    async def _stream(self, session: str, body: dict[str, Any]) -> Any:
        """The same, from a stream, which is sometimes read slowly or not to its end."""
        await self._send_others(session)
        is_slow, vanishes = self._source.random() < SLOW, self._source.random() < VANISHING
        path, began_s = f"/s/{session}/v1/chat/completions", time.perf_counter()
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        async with self._http.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
                self._record("stream", began_s, f"POST {path}", response)
                self.stats.ended[response.json()["error"]["message"]] += 1
                return None
            self.stats.seconds.setdefault("first event", []).append(time.perf_counter() - began_s)
            line = ""
            async for line in response.aiter_lines():
                if vanishes:
                    self.stats.ended["vanished within a stream"] += 1
                    return None
                if is_slow:
                    await asyncio.sleep(SLOW_S)
                if line.startswith("data: {"):
                    delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                    message["content"] += delta.get("content") or ""
                    message["tool_calls"] += delta.get("tool_calls", [])
                elif line == "data: [DONE]":
                    self.stats.record(
                        "slow stream" if is_slow else "stream", time.perf_counter() - began_s, 200
                    )
                    return message
        self.stats.wrong.append(f"a stream ended with {line}")
        return None

    async def _send_others(self, session: str) -> None:
        """What a client sends before a call: sometimes a status read, and malformed calls."""
        if self._source.random() < 0.5:
            await self._read_status(self._source.choice(STATUS_PATHS))
        while self._source.random() < MALFORMED:
            await self._send_malformed(session or "unknown")

    def _record(self, kind: str, began_s: float, call: str, response: httpx.Response) -> None:
        """Record a call of a session; 409: the episode has no room for more messages."""
        self.stats.record(kind, time.perf_counter() - began_s, response.status_code)
        if response.status_code not in (200, 409, 410, 429):
            self.stats.wrong.append(f"{call}: {response.status_code} {response.text}")

    async def _call(
        self, kind: str, method: str, path: str, body: object = None, session: str = ""
    ) -> tuple[int, Any]:
        """A valid call, sometimes after a status read and malformed calls. Status 429 is retried."""
        await self._send_others(session)
        while True:
            began_s = time.perf_counter()
            headers = {"Dora-Session": session}
            response = await self._http.request(method, path, json=body, headers=headers)
            self._record(kind, began_s, f"{method} {path}", response)
            if response.status_code != 429 or time.monotonic() > self.until_s:
                return response.status_code, response.json()
            await asyncio.sleep(RETRY_S)

    async def _read_status(self, path: str) -> None:
        began_s = time.perf_counter()
        response = await self._http.get(path)
        self.stats.record("look", time.perf_counter() - began_s, response.status_code)
        if response.status_code != 200:
            self.stats.wrong.append(f"{path}: {response.status_code} {response.text}")

    async def _send_malformed(self, session: str) -> None:
        """A random one of the `MALFORMED_CALLS`; the response must have one of its statuses."""
        name, (send, expected) = self._source.choice([*MALFORMED_CALLS.items()])
        began_s = time.perf_counter()
        status = await send(self, session)
        self.stats.record("malformed", time.perf_counter() - began_s, status)
        self.stats.num_malformed += 1
        self.stats.refused[name] += 1
        if status not in expected:
            self.stats.wrong.append(f"{name}: {status}")

    async def send(self, method: str, path: str, **options: Any) -> int:
        """The status of a call through httpx."""
        return (await self._http.request(method, path, **options)).status_code

    async def send_raw(self, *parts: bytes, waits: bool = True) -> int:
        """The status of bytes on a new connection. The response may arrive before all bytes are sent."""
        address = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            return int((await reader.readline()).split()[1]) if waits else HANG_UP
        except (ConnectionError, IndexError):
            return HANG_UP  # the service may close a connection whose body it does not read
        finally:
            writer.close()

    def request_head(self, method: str, path: str, *more: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: run", f"Authorization: Bearer {self.token}", *more]
        return "\r\n".join([*lines, "", ""]).encode()


def a_call(arguments: str) -> dict[str, Any]:
    """A history with a tool call of these arguments."""
    call = {"id": "call_x-0-0", "function": {"name": "price", "arguments": arguments}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    return {"messages": [*messages, {"role": "tool", "content": "1"}], "tools": shop.TOOLS, "stream": True}


Send = Callable[[Agent, str], Awaitable[int]]
JSON = {"content-type": "application/json"}
HUGE = b"100000\r\n" + b"x" * 2**20 + b"\r\n"  # one chunk of a body
TOOL_USE = {"type": "tool_use", "id": "call_x-0-0", "name": "price", "input": {}}
MALFORMED_CALLS: dict[str, tuple[Send, tuple[int, ...]]] = {
    "a wrong token": (
        lambda a, s: a.send("GET", "/v1/status", headers={"Authorization": "Bearer wrong"}),
        (401,),
    ),
    "no JSON": (
        lambda a, s: a.send("POST", f"/v1/sessions/{s}/reward", content=b"{", headers=JSON),
        (422,),
    ),
    "nan": (
        lambda a, s: a.send("POST", f"/v1/sessions/{s}/reward", content=b'{"reward":NaN}', headers=JSON),
        (422,),
    ),
    "a deep body": (
        lambda a, s: a.send("POST", "/v1/chat/completions", content=b"[" * 10**5, headers=JSON),
        (400, 422),
    ),
    "a call whose arguments are no JSON": (
        lambda a, s: a.send("POST", f"/s/{s}/v1/chat/completions", json=a_call("{")),
        (400,),
    ),
    "a call whose arguments are nested": (
        lambda a, s: a.send(
            "POST", f"/s/{s}/v1/chat/completions", json=a_call('{"a":' * 200 + "1" + "}" * 200)
        ),
        (400,),
    ),
    "a tool of the provider": (
        lambda a, s: a.send(
            "POST", f"/s/{s}/v1/responses", json={"input": "?", "tools": [{"type": "web_search"}]}
        ),
        (422,),
    ),
    "a response of another session": (
        lambda a, s: a.send(
            "POST", f"/s/{s}/v1/responses", json={"input": "?", "previous_response_id": "resp_x-0"}
        ),
        (422,),
    ),
    "a block of another role": (
        lambda a, s: a.send(
            "POST",
            f"/s/{s}/v1/messages",
            json={"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": [TOOL_USE]}]},
        ),
        (400,),
    ),
    "ten megabytes": (
        lambda a, s: a.send_raw(
            a.request_head("POST", f"/s/{s}/v1/messages", f"Content-Length: {10 * 2**20}"), *[HUGE[8:-2]] * 10
        ),
        (413, HANG_UP),
    ),
    "an unknown key": (lambda a, s: a.send("POST", "/v1/engines", json={"count": 1, "how": 2}), (422,)),
    "a wrong type": (lambda a, s: a.send("POST", "/v1/engines", json={"count": "1"}), (422,)),
    "no such session": (lambda a, s: a.send("DELETE", "/v1/sessions/unknown"), (404,)),
    "no such engine": (lambda a, s: a.send("POST", "/v1/engines/999999/drain"), (404,)),
    "no such path": (lambda a, s: a.send("GET", "/v1/secrets"), (404,)),
    "a path in a name": (lambda a, s: a.send("PUT", "/v1/sessions/..%2f..%2fetc%2fpasswd"), (404, 405, 422)),
    "another past": (
        lambda a, s: a.send(
            "POST",
            "/v1/chat/completions",
            json={"messages": [{"role": "assistant", "content": "1"}]},
            headers={"Dora-Session": s},
        ),
        (400, 404, 409, 410),
    ),
    "a gigabyte announced": (
        lambda a, s: a.send_raw(a.request_head("POST", "/v1/engines", "Content-Length: 1000000000")),
        (413,),
    ),
    "megabytes unannounced": (
        lambda a, s: a.send_raw(
            a.request_head("POST", "/v1/engines", "Transfer-Encoding: chunked"), *[HUGE] * 4
        ),
        (413, HANG_UP),
    ),
    "no HTTP": (lambda a, s: a.send_raw(b"\x16\x03\x01 hello\r\n\r\n"), (400,)),
    "half a call": (
        lambda a, s: a.send_raw(
            a.request_head("POST", "/v1/engines", "Content-Length: 9"), b"{", waits=False
        ),
        (HANG_UP,),
    ),
    "a client that disappears": (
        lambda a, s: a.send_raw(
            a.request_head("GET", "/v1/versions?newer_than=999999&wait_s=9"), waits=False
        ),
        (HANG_UP,),
    ),
}


async def send_traffic(address: str, num_clients: int, seconds: float) -> CallStats:
    """Run clients concurrently for so long; `address` is the content of the run's service.json."""
    stats, until_s = CallStats(), time.monotonic() + seconds
    found = json.loads(address)
    agents = [Agent(n, found["url"], found["token"], stats, until_s) for n in range(num_clients)]
    await asyncio.gather(*(agent.work() for agent in agents))
    return stats
