"""Whole runs of `dora serve`, played and steered from outside, with what may happen to either side."""

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
    file = run.out / "service.json"
    run.wait_until(file.exists, "its service")
    return replace(Address.of_run(run.out), patience_s=3.0)


def kinds(run: Run) -> set[str]:
    """Of facts and orders so far."""
    return {line["kind"] for line in journal(run.out)}


async def play(run: AsyncClient, ends: Counter[str], number: int) -> None:
    """One agent, until the run is over: two turns an episode. The first one once disappears in the middle."""
    is_lost = number == 0
    while True:
        try:
            session = (await run.open_session(wait_s=5.0))["session"]
        except ServiceError:
            return
        try:
            first = (await run.complete(session, [QUESTION]))["choices"][0]["message"]
            if is_lost:
                is_lost = False
                continue
            messages = [QUESTION, first, {"role": "tool", "content": "7;"}]
            second = await run.complete(session, messages)
            await run.post_reward(session, float(second["choices"][0]["message"]["content"].count("7")))
            ends["rewarded"] += 1
        except ServiceError as error:
            ends[f"{error.status}"] += 1


def test_agents_play_a_run_though_one_of_them_and_an_engine_disappear(start_run: StartRun) -> None:
    run = start_run(
        command="serve",
        run__steps=6,
        sampling__max_turn_length=8,
        service__agents="true",
        service__session_timeout_s=2.0,
        reward__max_failed_fraction=1.0,
    )
    ends: Counter[str] = Counter()

    async def all_play() -> None:
        async with AsyncClient(address(run)) as client:
            agents = [asyncio.create_task(play(client, ends, number)) for number in range(4)]
            await asyncio.to_thread(run.wait_until, lambda: "fail" in kinds(run), "the end of a lease")
            run.workers()[0].kill()
            await asyncio.gather(*agents)

    asyncio.run(all_play())
    ended = run.end()
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    found = summary(run.out)
    assert (found["c1"], found["c2"], found["c3"], found["engine_failures"]) == (True, True, True, 1)
    assert "session expired" in {line["reason"] for line in journal(run.out) if line["kind"] == "fail"}
    assert ends["rewarded"] >= 6 * 2 * 2
    assert not (run.out / "service.json").exists()


def test_a_run_is_steered_while_it_trains(start_run: StartRun) -> None:
    run = start_run(command="serve", run__steps=8)
    with Client(address(run)) as client, contextlib.suppress(ServiceError):
        client.versions(newer_than=1, wait_s=60)
        assert client.pause() == {"is_paused": True}
        before = client.status()
        with pytest.raises(ServiceError, match="no sessions"):
            client.open_session()
        assert client.status()["groups"] == before["groups"]
        assert {engine["state"] for engine in client.engines()["engines"]} == {"resting"}
        client.resume()
        (new,) = client.add_engines()["engines"]
        assert client.drain_engine(0)["state"] in ("leaving", "ended")
        assert new["engine"] == 2
        steps = [status["num_steps_trained"] for status in client.progress(interval_s=0.1)]
        assert steps == sorted(steps)
    ended = run.end()
    assert (ended.code, summary(run.out)["steps"]) == (0, 8)
    assert "engine 0 drained and removed" in ended.out


def judge(client: Client) -> None:
    """Judges whatever is lent, until the run is over."""
    with contextlib.suppress(ServiceError):
        while True:
            loan = client.get_experience(wait_s=5.0)["loan"]
            if loan is not None:
                client.put_experience(loan["lease"], [float(len({*ids})) for ids in loan["token_ids"]])


def test_a_run_is_judged_and_trained_by_clients(start_run: StartRun) -> None:
    run = start_run(command="serve", run__steps=3, service__trainer="external", reward__function="service")
    with Client(address(run)) as client:
        judging = threading.Thread(target=judge, args=(client,))
        judging.start()
        for step in range(client.training()["step"], 3):
            groups = [*client.batch(step, ["version", "reward", "token_ids"])]
            assert [len(group["fields"]["reward"]) for group in groups] == [2, 2]
            published = client.put_weights(step + 1, client.get_weights(step), {"loss": 0.0})
            assert published["version"] == step + 1
        judging.join()
    ended = run.end()
    assert ended.code == 0, ended.err
    found = summary(run.out)
    assert (found["c1"], found["c2"], found["c3"], found["steps"]) == (True, True, True, 3)


def test_a_run_that_needs_its_service_is_refused_without(task: Path, tmp_path: Path) -> None:
    ended = dora("train", task, "--out", tmp_path / "run", "--set", "service.agents=true")
    assert ended.code == 2
    assert "service.agents = true: the run needs its service; start it with dora serve" in ended.err
    assert not (tmp_path / "run").exists()
