"""What 64 clients do to a service: they play episodes, look around, and one call in twenty is malformed."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

LOOKS = ("/v1/status", "/v1/versions", "/v1/engines", "/metrics")
AGAIN_S = 0.05  # before a call that came too early is made again
# Shares: of calls that play an episode, before which one is malformed (of all, which are more, one in
# twenty); and of episodes whose agent is never heard of again.
MALFORMED, VANISHING = 0.085, 0.002
HANG_UP = 0  # in place of a status, where nobody waits for one


@dataclass
class Tally:
    """What came of all calls; times in seconds."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # by kind of call
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # answers that should have been others
    rewards: dict[tuple[str, int, int], float] = field(default_factory=dict)  # group, sibling, version
    ended: Counter[str] = field(default_factory=Counter)  # sessions that ended before their reward
    num_calls: int = 0
    num_malformed: int = 0

    def note(self, kind: str, seconds: float, status: int) -> None:
        self.seconds.setdefault(kind, []).append(seconds)
        self.statuses[status] += 1
        self.num_calls += 1


@dataclass
class Agent:
    """One of the clients."""

    number: int
    url: str
    token: str
    tally: Tally
    until_s: float

    async def work(self) -> None:
        self._source = random.Random(self.number)
        headers = {"Authorization": f"Bearer {self.token}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=400) as self._http:
            while time.monotonic() < self.until_s:
                await self._play()

    async def _play(self) -> None:
        """One episode of up to two turns."""
        session = uuid.uuid4().hex
        status, episode = await self._good("open", "PUT", f"/v1/sessions/{session}?wait_s=2")
        if status != 200:
            return
        question = {"role": "user", "content": episode["prompt"]}
        messages, reward = [question], 0.0
        for worth in (1.0, 0.5):
            if self._source.random() < VANISHING:
                return
            body = {"messages": messages}
            status, found = await self._good("turn", "POST", "/v1/chat/completions", body, session)
            if status != 200:
                self.tally.ended[found["error"]["message"]] += 1
                return
            answer = found["choices"][0]["message"]
            fields = episode["fields"]
            if answer["content"].endswith(f"={math.gcd(fields['a'], fields['b']):02}"):
                reward = worth
                break
            if found["num_left"] < 200:
                break
            messages = [*messages, answer, question]
        path = f"/v1/sessions/{session}/reward"
        status, found = await self._good("reward", "POST", path, {"reward": reward})
        if status == 200:
            self.tally.rewards[episode["group"], episode["sibling"], episode["version"]] = reward
        else:
            self.tally.ended[found["error"]["message"]] += 1

    async def _good(
        self, kind: str, method: str, path: str, body: object = None, session: str = ""
    ) -> tuple[int, Any]:
        """A call as it should be, perhaps after a malformed one and a look around. 429 is asked again."""
        if self._source.random() < 0.5:
            await self._look(self._source.choice(LOOKS))
        while self._source.random() < MALFORMED:
            await self._bad(session or "nobody")
        while True:
            began_s = time.perf_counter()
            headers = {"Dora-Session": session}
            response = await self._http.request(method, path, json=body, headers=headers)
            self.tally.note(kind, time.perf_counter() - began_s, response.status_code)
            if response.status_code not in (200, 410, 429):
                self.tally.wrong.append(f"{method} {path}: {response.status_code} {response.text}")
            if response.status_code != 429 or time.monotonic() > self.until_s:
                return response.status_code, response.json()
            await asyncio.sleep(AGAIN_S)

    async def _look(self, path: str) -> None:
        began_s = time.perf_counter()
        response = await self._http.get(path)
        self.tally.note("look", time.perf_counter() - began_s, response.status_code)
        if response.status_code != 200:
            self.tally.wrong.append(f"{path}: {response.status_code} {response.text}")

    async def _bad(self, session: str) -> None:
        """A malformed call; its answer must be a refusal with one of the statuses named."""
        name, (send, expected) = self._source.choice([*BAD.items()])
        began_s = time.perf_counter()
        status = await send(self, session)
        self.tally.note("malformed", time.perf_counter() - began_s, status)
        self.tally.num_malformed += 1
        if status not in expected:
            self.tally.wrong.append(f"{name}: {status}")

    async def send(self, method: str, path: str, **options: Any) -> int:
        """The status of a call through the client library."""
        return (await self._http.request(method, path, **options)).status_code

    async def send_raw(self, *parts: bytes, waits: bool = True) -> int:
        """The status of bytes on a new connection; the answer may come before all are sent."""
        place = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            return int((await reader.readline()).split()[1]) if waits else HANG_UP
        except (ConnectionError, IndexError):
            return HANG_UP  # it was cut off in the middle, as what nobody will read may be
        finally:
            writer.close()

    def head(self, method: str, path: str, *more: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: run", f"Authorization: Bearer {self.token}", *more]
        return "\r\n".join([*lines, "", ""]).encode()


Send = Callable[[Agent, str], Awaitable[int]]
JSON = {"content-type": "application/json"}
HUGE = b"100000\r\n" + b"x" * 2**20 + b"\r\n"  # one chunk of a body
BAD: dict[str, tuple[Send, tuple[int, ...]]] = {
    "a wrong token": (
        lambda a, s: a.send("GET", "/v1/status", headers={"Authorization": "Bearer of bad news"}),
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
    "an unknown key": (lambda a, s: a.send("POST", "/v1/engines", json={"count": 1, "how": 2}), (422,)),
    "a wrong type": (lambda a, s: a.send("POST", "/v1/engines", json={"count": "1"}), (422,)),
    "no such session": (lambda a, s: a.send("DELETE", "/v1/sessions/nobody-was-here"), (404,)),
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
        lambda a, s: a.send_raw(a.head("POST", "/v1/engines", "Content-Length: 1000000000")),
        (413,),
    ),
    "megabytes unannounced": (
        lambda a, s: a.send_raw(a.head("POST", "/v1/engines", "Transfer-Encoding: chunked"), *[HUGE] * 4),
        (413, HANG_UP),
    ),
    "no HTTP": (lambda a, s: a.send_raw(b"\x16\x03\x01 hello\r\n\r\n"), (400,)),
    "half a call": (
        lambda a, s: a.send_raw(a.head("POST", "/v1/engines", "Content-Length: 9"), b"{", waits=False),
        (HANG_UP,),
    ),
    "a client that disappears": (
        lambda a, s: a.send_raw(a.head("GET", "/v1/versions?newer_than=999999&wait_s=9"), waits=False),
        (HANG_UP,),
    ),
}


async def load(address: str, num_clients: int, seconds: float) -> Tally:
    """Have clients work side by side; `address` is the content of the run's service.json."""
    tally, until_s = Tally(), time.monotonic() + seconds
    found = json.loads(address)
    agents = [Agent(n, found["url"], found["token"], tally, until_s) for n in range(num_clients)]
    await asyncio.gather(*(agent.work() for agent in agents))
    return tally
