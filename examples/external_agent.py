"""Agents that share no code with DORA: they play the episodes of a run through its service.

    dora serve examples/agents.toml --out runs/agents
    python examples/external_agent.py runs/agents

An episode has up to two turns: an agent sends the question, looks at the answer, asks once more if it
is wrong, and posts what the episode was worth. The standard library is all it needs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WORTH = (1.0, 0.5, 0.0)  # right at once, at the second try, not at all
PATIENCE_S = 30.0  # that a service may be away before the run is over
START_S = 120.0  # that a service may take to begin
RETRY_S, REPORT_S = 0.2, 5.0
LONGEST_TURN = 200  # tokens, with the question asked again


class RunIsOver(Exception):
    """Nobody answers any more."""


class Service:
    """One connection to a run's service. A call that gets lost, or comes too early, is made again."""

    def __init__(self, run: Path) -> None:
        self._file = run / "service.json"
        self._connection: http.client.HTTPConnection | None = None

    def call(self, method: str, path: str, body: object = None, session: str = "") -> tuple[int, Any]:
        """Status and content of the answer. Raises RunIsOver."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and self._file.exists():
            try:
                status, content = self._send(method, path, body, session)
                if status not in (429, 503):
                    return status, content
            except (OSError, http.client.HTTPException, ValueError):
                self.close()
            time.sleep(RETRY_S)
        raise RunIsOver

    def close(self) -> None:
        """Hang up; the next call dials again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, method: str, path: str, body: object, session: str) -> tuple[int, Any]:
        if self._connection is None:
            found = json.loads(self._file.read_text())
            self._connection = http.client.HTTPConnection(urlsplit(found["url"]).netloc, timeout=400)
            self._token = found["token"]
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        if session:
            headers["Dora-Session"] = session
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())


def is_right(answer: str, a: int, b: int) -> bool:
    """Whether an answer ends in the greatest common divisor."""
    return answer.endswith(f"={math.gcd(a, b):02}")


def play(service: Service) -> str:
    """One episode; returns how it went."""
    session = uuid.uuid4().hex
    status, episode = service.call("PUT", f"/v1/sessions/{session}?wait_s=10")
    if status != 200:
        return f"not opened: {status}"
    question = {"role": "user", "content": episode["prompt"]}
    messages = [question]
    for worth in WORTH[:2]:
        status, completion = service.call("POST", "/v1/chat/completions", {"messages": messages}, session)
        if status != 200:
            return f"ended: {completion['error']['message']}"
        answer = completion["choices"][0]["message"]
        if is_right(answer["content"], **episode["fields"]):
            return post(service, session, worth)
        if completion["num_left"] < LONGEST_TURN:
            break
        messages = [*messages, answer, question]
    return post(service, session, WORTH[-1])


def post(service: Service, session: str, reward: float) -> str:
    """The episode is over; returns how it went."""
    status, ended = service.call("POST", f"/v1/sessions/{session}/reward", {"reward": reward})
    return f"reward {reward}" if status == 200 else f"ended: {ended['error']['message']}"


def work(run: Path, tally: Counter[str]) -> None:
    """One agent, which plays one episode after the other until the run is over."""
    service = Service(run)
    try:
        while True:
            tally[play(service)] += 1
    except RunIsOver:
        service.close()


def wait_for(file: Path) -> None:
    """Until a service has written where it is. Raises SystemExit if none does."""
    deadline_s = time.monotonic() + START_S
    if not file.exists():
        print(f"waiting for {file}", flush=True)
    while not file.exists():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{file} is not there after {START_S:g} s; start the run with dora serve")
        time.sleep(RETRY_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run that dora serve has started")
    parser.add_argument("--agents", type=int, default=32, help="how many play at once")
    given = parser.parse_args()
    wait_for(given.run / "service.json")
    tally: Counter[str] = Counter()
    agents = [threading.Thread(target=work, args=(given.run, tally)) for _ in range(given.agents)]
    for agent in agents:
        agent.start()
    told = Counter[str]()
    while any(agent.is_alive() for agent in agents):
        time.sleep(REPORT_S)
        new = Counter(tally) - told
        rewards = [float(how.split()[1]) for how in new.elements() if how.startswith("reward")]
        told += new
        if rewards:
            mean = sum(rewards) / len(rewards)
            print(f"{told.total()} episodes, mean reward of the last {len(rewards)}: {mean:.3f}", flush=True)
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
