"""Whole runs of `dora serve`: agents, external rewards and an external trainer, and crashes on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import CommandResult, Run, dora, journal, metrics, query, summary, wait_until_gone

from dora.audit import audit, logprob_recheck
from dora.errors import ServiceError
from dora.service.client import Address, AsyncClient, Client

QUESTION = {"role": "user", "content": "10:"}


def address(run: Run) -> Address:
    """The address of a run's service, once it is known."""
    run.wait_until((run.out / "service.json").exists, "its service")
    return replace(Address.of_run(run.out), retry_timeout_s=3.0)


def kinds(run: Run) -> set[str]:
    """The kinds of events and actions in the journal so far."""
    return {line["kind"] for line in journal(run.out)}


async def run_agent(client: AsyncClient, results: Counter[str], number: int) -> None:
    """Run episodes of two turns until the run is over. Agent 0 drops its first episode without notice."""
    abandons = number == 0
    while True:
        try:
            session = (await client.open_session(wait_s=5.0))["session"]
        except ServiceError:
            return
        try:
            first = (await client.complete(session, [QUESTION]))["choices"][0]["message"]
            if abandons:
                abandons = False
                continue
            messages = [QUESTION, first, {"role": "tool", "content": "7;"}]
            second = await client.complete(session, messages)
            if number % 2:  # another result of the tool: a branch
                messages[-1] = {"role": "tool", "content": "8;"}
                second = await client.complete(session, messages)
                results["branches"] += 1
            reward = float(second["choices"][0]["message"]["content"].count("7"))
            first_turns = [0.5] if number % 2 == 0 else [0.5, -0.5]
            await client.post_reward(session, reward, [*first_turns, reward - sum(first_turns)])
            results["rewarded"] += 1
        except ServiceError as error:
            results[f"{error.status}"] += 1


CRITIC: dict[str, object] = {"algorithm__adv_estimator": "gae", "trainer__aux_workers": "['critic']"}


@pytest.mark.parametrize("objective", [{"algorithm__adv_estimator": "gigpo"}, CRITIC])
async def test_a_run_with_agents_survives_the_loss_of_an_agent_and_an_engine(
    start_run: StartRun, objective: dict[str, object]
) -> None:
    run = start_run(
        **objective,
        command="serve",
        run__steps=6,
        sampling__max_turn_length=4,
        service__agents="true",
        service__session_timeout_s=2.0,
        reward__max_failed_fraction=1.0,
    )
    results: Counter[str] = Counter()
    async with AsyncClient(address(run)) as client:
        agents = [asyncio.create_task(run_agent(client, results, number)) for number in range(4)]
        await asyncio.to_thread(run.wait_until, lambda: "request_failed" in kinds(run), "the end of a lease")
        run.workers()[0].kill()
        await asyncio.gather(*agents)
    ended = run.succeed()
    assert "Traceback" not in ended.err
    found = summary(run.out)
    assert (found["c1"], found["c2"], found["c3"], found["engine_failures"]) == (True, True, True, 1)
    failed = [line for line in journal(run.out) if line["kind"] == "request_failed"]
    assert ("session expired", "environment") in {(line["reason"], line["cause"]) for line in failed}
    assert found["retried_requests"] >= 1
    assert results["rewarded"] >= 6 * 2 * 2
    assert results["branches"] > 0
    assert sum(step["actor/grad_norm"] for step in metrics(run.out)) > 0
    turns = "select distinct json_array_length(turn_rewards) from samples order by 1"
    assert query(run.out, turns) == [(2,), (3,)]
    audited = audit.check(run.out)
    assert (audited.findings, audited.stored.num_branches > 0) == ((), True)
    rechecked = logprob_recheck.check(run.out, 1000)
    assert not rechecked.findings
    assert not (run.out / "service.json").exists()


AGENT = """
import json, os, urllib.request
body = {"messages": [{"role": "user", "content": os.environ["DORA_PROMPT"]}]}
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), key)) as response:
    answer = json.load(response)["choices"][0]["message"]["content"]
print(answer.count("7"))
"""


def test_any_command_runs_the_episodes_of_a_run_whose_engine_is_killed(start_run: StartRun) -> None:
    run = start_run(
        command="serve",
        run__steps=6,
        sampling__max_turn_length=8,
        service__agents="true",
        reward__max_failed_fraction=1.0,
    )
    address(run)
    rolled_out: list[CommandResult] = []
    command = ["rollout", str(run.out), "-n", "4", "--", sys.executable, "-S", "-c", AGENT]
    rollout = threading.Thread(target=lambda: rolled_out.append(dora(*command)))
    rollout.start()
    run.wait_until(lambda: "trained" in kinds(run), "the first step")
    run.workers()[0].kill()
    ended = run.end()
    assert (ended.code, "Traceback" in ended.err) == (0, False), ended.err
    rollout.join()
    assert (rolled_out[0].code, rolled_out[0].err) == (0, "")
    assert "rewarded" in rolled_out[0].out
    found = summary(run.out)
    assert (found["c1"], found["c2"], found["c3"], found["engine_failures"]) == (True, True, True, 1)
    run.audit()


def test_a_run_is_paused_and_its_engines_are_changed_while_it_trains(start_run: StartRun) -> None:
    run = start_run(command="serve", run__steps=8)
    with Client(address(run)) as client, contextlib.suppress(ServiceError):
        client.versions(newer_than=1, wait_s=60)
        assert client.pause() == {"is_paused": True}
        before = client.status()
        with pytest.raises(ServiceError, match="no sessions"):
            client.open_session()
        assert client.status()["groups"] == before["groups"]
        assert {engine["state"] for engine in client.engines()["engines"]} == {"paused"}
        client.resume()
        (new,) = client.add_engines()["engines"]
        assert client.drain_engine(0)["state"] in ("draining", "ended")
        assert new["engine"] == 2
        steps = [status["num_steps_trained"] for status in client.progress(interval_s=0.1)]
        assert steps == sorted(steps)
    ended = run.end()
    assert (ended.code, summary(run.out)["steps"]) == (0, 8)
    assert "engine 0 drained and removed" in ended.out


def score_groups(client: Client) -> None:
    """Submit rewards for every leased group until the run is over."""
    with contextlib.suppress(ServiceError):
        while True:
            group = client.get_experience(wait_s=5.0)["leased_group"]
            if group is not None:
                client.put_experience(group["lease"], [float(len({*ids})) for ids in group["token_ids"]])


def test_clients_score_and_train_a_run(start_run: StartRun) -> None:
    run = start_run(command="serve", run__steps=3, service__trainer="external", reward__function="service")
    with Client(address(run)) as client:
        reward_worker = threading.Thread(target=score_groups, args=(client,))
        reward_worker.start()
        for step in range(client.training()["step"], 3):
            groups = [*client.batch(step, ["version", "reward", "token_ids"])]
            assert [len(group["fields"]["reward"]) for group in groups] == [2, 2]
            published = client.put_weights(step + 1, client.get_weights(step), {"loss": 0.0})
            assert published["version"] == step + 1
        reward_worker.join()
    run.succeed()
    found = summary(run.out)
    assert (found["c1"], found["c2"], found["c3"], found["steps"]) == (True, True, True, 3)


def test_a_run_that_needs_its_service_is_refused_without_it(task: Path, tmp_path: Path) -> None:
    ended = dora("train", task, "--out", tmp_path / "run", "--set", "service.agents=true")
    assert ended.code == 2
    assert "service.agents = true: the run needs its service; start it with dora serve" in ended.err
    assert not (tmp_path / "run").exists()


def test_a_run_without_agents_says_what_they_have_to_do_and_its_end_is_told_to_late_ones(
    start_run: StartRun,
) -> None:
    run = start_run(command="serve", service__agents="true", service__linger_s=600.0)
    known, status = address(run), run.out / "status.json"
    run.wait_until(
        lambda: json.loads(status.read_text()).get("root_causes") == ["agents"], "the wait for agents"
    )
    needed = f"PUT {known.url}/v1/sessions/NAME"
    shown = dora("status", run.out)
    assert needed in shown.out
    assert "trainer ultimately waits for agents" in shown.out
    workers = run.workers()
    os.kill(run.pid, signal.SIGINT)
    run.wait_until((run.out / "summary.json").exists, "its summary")
    headers = {"Authorization": f"Bearer {known.token}"}
    late = httpx.put(f"{known.url}/v1/sessions/a", headers=headers)
    sentence = "the run was stopped by SIGINT after 0 of 4 steps; dora serve --resume resumes it"
    error = {"message": sentence, "type": "run_stopped", "code": 410}
    assert (late.status_code, late.json()) == (410, {"type": "error", "error": error})
    assert wait_until_gone(workers) == []
    os.kill(run.pid, signal.SIGINT)
    ended = run.end()
    assert ended.code == 130, ended
    assert "Traceback" not in ended.err
    assert f"agents: open a session with {needed}" in ended.out
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{known.url}/health")


def test_an_idle_run_fails_with_what_agents_have_to_do(start_run: StartRun) -> None:
    run = start_run(
        command="serve", service__agents="true", service__idle_timeout_s=0.5, service__linger_s=600.0
    )
    known = address(run)

    def status() -> httpx.Response:
        return httpx.get(f"{known.url}/v1/status", headers={"Authorization": f"Bearer {known.token}"})

    run.wait_until(lambda: status().status_code == 410, "its end in replies")
    error = status().json()["error"]
    assert error["type"] == "run_failed"
    assert "the run has failed after 0 of 4 steps: no event has arrived" in error["message"]
    os.kill(run.pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 1, ended
    assert f"open a session with PUT {known.url}/v1/sessions/NAME" in ended.err


def test_clients_with_only_a_base_url_and_a_key_run_all_episodes(start_run: StartRun) -> None:
    run = start_run(command="serve", run__steps=2, service__agents="true", service__linger_s=600.0)
    known = address(run)
    kinds_of_end: list[str] = []

    def run_episodes(client: int) -> None:
        with httpx.Client(headers={"Authorization": f"Bearer {known.token}"}, timeout=60.0) as http:
            for episode in range(10_000):
                base_url = f"{known.url}/s/{client}-{episode}"
                chat = http.post(f"{base_url}/v1/chat/completions", json={"messages": [QUESTION]})
                if chat.is_success:
                    text = chat.json()["choices"][0]["message"]["content"]
                    chat = http.post(f"{base_url}/reward", json={"reward": float(len({*text}))})
                if (kind := chat.json().get("error", {}).get("type", "")).startswith("run_"):
                    return kinds_of_end.append(kind)

    clients = [threading.Thread(target=run_episodes, args=(number,)) for number in range(3)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(240.0)
    assert kinds_of_end == ["run_finished"] * 3
    run.wait_until((run.out / "summary.json").exists, "its summary")
    os.kill(run.pid, signal.SIGINT)
    run.succeed()
    found = summary(run.out)
    assert (found["c1"], found["c2"], found["c3"], found["steps"], found["stopped"]) == (
        True,
        True,
        True,
        2,
        "",
    )
