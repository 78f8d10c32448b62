"""External agents, which share no code with DORA: they run the episodes of a run through its service.

    dora serve examples/agents.toml --out runs/agents
    python examples/external_agent.py runs/agents

An episode has up to two turns. The agent sends the question, checks the answer, repeats the question once if
the answer is wrong, and posts the reward. It needs the standard library only.
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

REWARDS = (1.0, 0.5)  # for a correct answer in the first and the second turn; else 0
RETRY_TIMEOUT_S = 30.0  # without a response, before the run counts as over
START_TIMEOUT_S = 120.0  # for the service to start
RETRY_S, REPORT_S = 0.2, 5.0
MAX_TURN_TOKENS = 200  # the repeated question included


class RunIsOver(Exception):
    """The service says that its run has ended, or does not respond any more."""


class Service:
    """One connection to a run's service; lost and early requests are retried."""

    def __init__(self, run: Path) -> None:
        self._file, self._summary = run / "service.json", run / "summary.json"
        self._connection: http.client.HTTPConnection | None = None

    def request(self, method: str, path: str, body: object = None, session: str = "") -> tuple[int, Any]:
        """Status and content of the response. Raises RunIsOver."""
        deadline_s = time.monotonic() + RETRY_TIMEOUT_S
        while time.monotonic() < deadline_s and not self._is_over():
            try:
                status, content = self._send(method, path, body, session)
                if status == 410 and content["error"]["type"].startswith("run_"):
                    break
                if status not in (429, 503):
                    return status, content
                deadline_s = time.monotonic() + RETRY_TIMEOUT_S  # it responds: engines may still be starting
            except (OSError, http.client.HTTPException, ValueError):
                self.close()
            time.sleep(RETRY_S)
        raise RunIsOver

    def _is_over(self) -> bool:
        """A run that is resumed after a crash has neither file until its service listens."""
        return self._summary.exists() and not self._file.exists()

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, method: str, path: str, body: object, session: str) -> tuple[int, Any]:
        if self._connection is None:
            address = json.loads(self._file.read_text())
            self._connection = http.client.HTTPConnection(urlsplit(address["url"]).netloc, timeout=400)
            self._token = address["token"]
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        if session:
            headers["Dora-Session"] = session
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())


def is_correct(answer: str, a: int, b: int) -> bool:
    """Whether an answer ends with the greatest common divisor."""
    return answer.endswith(f"={math.gcd(a, b):02}")


def run_episode(service: Service) -> str:
    """Run one episode; returns how it ended."""
    session = uuid.uuid4().hex
    status, episode = service.request("PUT", f"/v1/sessions/{session}?wait_s=10")
    if status != 200:
        return f"not opened: {status}"
    question = {"role": "user", "content": episode["prompt"]}
    messages = [question]
    for reward in REWARDS:
        status, completion = service.request("POST", "/v1/chat/completions", {"messages": messages}, session)
        if status != 200:
            return f"ended: {completion['error']['message']}"
        answer = completion["choices"][0]["message"]
        if is_correct(answer["content"], **episode["fields"]):
            return post_reward(service, session, reward)
        if completion["num_tokens_left"] < MAX_TURN_TOKENS:
            break
        messages = [*messages, answer, question]
    return post_reward(service, session, 0.0)


def post_reward(service: Service, session: str, reward: float) -> str:
    """End an episode; returns how it ended."""
    status, ended = service.request("POST", f"/v1/sessions/{session}/reward", {"reward": reward})
    return f"reward {reward}" if status == 200 else f"ended: {ended['error']['message']}"


def run_agent(run: Path, results: Counter[str]) -> None:
    """One agent: it runs episodes until the run is over."""
    service = Service(run)
    try:
        while True:
            results[run_episode(service)] += 1
    except RunIsOver:
        service.close()


def wait_for(file: Path) -> None:
    """Wait until the service has written its address. Raises SystemExit on a timeout."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    if not file.exists():
        print(f"waiting for {file}", flush=True)
    while not file.exists():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no {file} after {START_TIMEOUT_S:g} s; start the run with dora serve")
        time.sleep(RETRY_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run that dora serve has started")
    parser.add_argument("--agents", type=int, default=32, help="number of concurrent agents")
    options = parser.parse_args()
    wait_for(options.run / "service.json")
    results: Counter[str] = Counter()
    agents = [threading.Thread(target=run_agent, args=(options.run, results)) for _ in range(options.agents)]
    for agent in agents:
        agent.start()
    reported = Counter[str]()
    while any(agent.is_alive() for agent in agents):
        time.sleep(REPORT_S)
        new = Counter(results) - reported
        rewards = [float(result.split()[1]) for result in new.elements() if result.startswith("reward")]
        reported += new
        if rewards:
            mean = sum(rewards) / len(rewards)
            print(
                f"{reported.total()} episodes, mean reward of the last {len(rewards)}: {mean:.3f}", flush=True
            )
    print(json.dumps(reported, indent=2))


if __name__ == "__main__":
    main()
