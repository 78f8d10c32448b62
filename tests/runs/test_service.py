"""Whole runs of `dora serve`: agents, external rewards and an external trainer, and crashes on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, journal, summary

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
            await client.post_reward(session, float(second["choices"][0]["message"]["content"].count("7")))
            results["rewarded"] += 1
        except ServiceError as error:
            results[f"{error.status}"] += 1


def test_a_run_with_agents_survives_the_loss_of_an_agent_and_an_engine(start_run: StartRun) -> None:
    run = start_run(
        command="serve",
        run__steps=6,
        sampling__max_turn_length=8,
        service__agents="true",
        service__session_timeout_s=2.0,
        reward__max_failed_fraction=1.0,
    )
    results: Counter[str] = Counter()

    async def run_agents() -> None:
        async with AsyncClient(address(run)) as client:
            agents = [asyncio.create_task(run_agent(client, results, number)) for number in range(4)]
            await asyncio.to_thread(run.wait_until, lambda: "fail" in kinds(run), "the end of a lease")
            run.workers()[0].kill()
            await asyncio.gather(*agents)

    asyncio.run(run_agents())
    ended = run.end()
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    found = summary(run.out)
    assert (found["c1"], found["c2"], found["c3"], found["engine_failures"]) == (True, True, True, 1)
    assert "session expired" in {line["reason"] for line in journal(run.out) if line["kind"] == "fail"}
    assert results["rewarded"] >= 6 * 2 * 2
    assert not (run.out / "service.json").exists()


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
    ended = run.end()
    assert ended.code == 0, ended.err
    found = summary(run.out)
    assert (found["c1"], found["c2"], found["c3"], found["steps"]) == (True, True, True, 3)


def test_a_run_that_needs_its_service_is_refused_without_it(task: Path, tmp_path: Path) -> None:
    ended = dora("train", task, "--out", tmp_path / "run", "--set", "service.agents=true")
    assert ended.code == 2
    assert "service.agents = true: the run needs its service; start it with dora serve" in ended.err
    assert not (tmp_path / "run").exists()
