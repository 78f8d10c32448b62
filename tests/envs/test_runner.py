"""The runner runs episodes concurrently, each from its reset to its reward or to a named failure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.envs.countdown import (
    LIMITS,
    Countdown,
    RecordedRunner,
    StoredCountdown,
    add_to,
    ended,
    episode_id,
    observed,
    run_episode,
    run_ready_tasks,
    started,
)

from dora.envs.base import Observation, Step
from dora.envs.episode import EpisodeFailed, EpisodeObservation, EpisodeStarted


def test_the_reward_of_an_episode_is_the_sum_of_its_steps() -> None:
    replies = run_episode(["-", "-", "-"])
    assert replies == [
        started("3:"),
        observed(0, "2"),
        observed(1, "1"),
        ended(2, 3.0),
    ]


async def test_rewards_are_summed_without_rounding_errors() -> None:
    class Sixths(Countdown):
        async def step(self, action: str) -> Step:
            step: Step = await super().step(action)
            return step._replace(reward=1 / 6)

    runner = RecordedRunner(Sixths, replace(LIMITS, max_turns=6))
    await runner.start("e", number=6)
    replies = [await runner.turn("e") for _ in range(6)]
    assert replies[-1] == replace(ended(5, 1.0), turn_rewards=(1 / 6,) * 6)


async def test_an_episode_continues_from_its_state_in_another_process() -> None:
    runner = RecordedRunner(StoredCountdown)
    begun = await runner.start("e")
    first = await runner.turn("e")
    assert isinstance(begun, EpisodeStarted)
    assert isinstance(first, EpisodeObservation)
    for state, num_left in ((begun.state, 3), (first.state, 2)):
        other = RecordedRunner(StoredCountdown, replace(LIMITS, max_turns=3))
        assert await other.restore("e", state) == started("3:")
        replies = [await other.turn("e") for _ in range(num_left)]
        assert replies[-1] == ended(num_left - 1, 3.0)


async def test_a_snapshot_that_is_too_large_or_is_not_there_fails_the_episode() -> None:
    class Large(StoredCountdown):
        def snapshot(self) -> bytes:
            return bytes(2**20 + 1)

    failed = await RecordedRunner(Large).start("e")
    assert isinstance(failed, EpisodeFailed)
    assert failed.reason == "environment snapshot has 1048577 bytes, more than 1048576: keep less state"
    failed = await RecordedRunner().restore("e", b'{"rewards": [], "snapshot": ""}')
    assert isinstance(failed, EpisodeFailed)
    assert "environment has no method restore" in failed.reason


async def test_episodes_run_concurrently() -> None:
    runner = RecordedRunner()
    assert [await runner.start("a", 2), await runner.start("b", 1)] == [
        started("2:", "a"),
        started("1:", "b"),
    ]
    assert await runner.turn("b") == ended(0, 1.0, "b")
    assert await runner.turn("a") == observed(0, "1", "a")
    assert await runner.turn("a") == ended(1, 2.0, "a")


async def test_an_environment_is_reused_for_the_next_episode() -> None:
    made: list[Countdown] = []
    runner = RecordedRunner(lambda: add_to(made))
    for episode in "abc":
        await runner.start(episode, 1)
        await runner.turn(episode)
    assert len(made) == 1


def test_an_episode_ends_after_max_turns() -> None:
    assert run_episode(["-", "-"], limits=replace(LIMITS, max_turns=2)) == [
        started("3:"),
        observed(0, "2"),
        ended(1, 2.0, cut="max_turns"),
    ]


@pytest.mark.parametrize("num_left", [0, 1])
async def test_an_episode_ends_when_no_tokens_are_left_for_a_turn(num_left: int) -> None:
    runner = RecordedRunner()
    await runner.start("e")
    assert await runner.turn("e", "-", num_left) == ended(0, 1.0, cut="observation_length")


async def test_an_observation_that_leaves_one_token_continues_the_episode() -> None:
    runner = RecordedRunner()
    await runner.start("e")
    assert await runner.turn("e", "-", num_left=2) == observed(0, "2")


@pytest.mark.parametrize(
    ("action", "reason", "detail"),
    [
        ("raise", "environment raised KeyError", "nothing there"),
        ("empty", "environment gave an empty observation", ""),
        ("nan", "environment raised ValueError", "the reward nan must be a finite number"),
        ("pair", "environment raised TypeError", "must return (observation, reward, done)"),
        ("list", "environment raised TypeError", "must be a string, or messages such as"),
        ("exit", "environment raised SystemExit", "no license left"),
        ("cancel", "environment raised CancelledError", ""),
        ("panic", "environment raised Panic", "index out of bounds"),
    ],
)
def test_an_error_of_an_environment_fails_its_episode_by_name(action: str, reason: str, detail: str) -> None:
    reply = run_episode([action])[-1]
    assert isinstance(reply, EpisodeFailed)
    assert reply.reason == reason
    assert detail in reply.detail


async def test_a_call_that_takes_too_long_fails_only_its_episode() -> None:
    runner = RecordedRunner(limits=replace(LIMITS, timeout_s=0.05))
    await runner.start("slow")
    await runner.start("other", 1)
    slow = await runner.turn("slow", "hang")
    assert isinstance(slow, EpisodeFailed)
    assert slow.reason == "environment took longer than env.timeout_s = 0.05"
    assert await runner.turn("other") == ended(0, 1.0, "other")


def test_a_prompt_that_is_too_long_fails_its_episode() -> None:
    reply = run_episode([], limits=replace(LIMITS, max_prompt_length=1))[0]
    assert isinstance(reply, EpisodeFailed)
    assert reply.reason == "environment prompt has 2 tokens, more than data.max_prompt_length = 1"


def test_an_empty_prompt_fails_its_episode() -> None:
    class Mute(Countdown):
        async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
            return ""

    reply = run_episode([], make=Mute)[0]
    assert isinstance(reply, EpisodeFailed)
    assert reply.reason == "environment gave an empty prompt"


async def test_an_environment_in_an_unknown_state_is_closed_and_not_reused() -> None:
    made: list[Countdown] = []
    runner = RecordedRunner(lambda: add_to(made))
    await runner.start("broken")
    await runner.turn("broken", "raise")
    await runner.start("cancelled")
    runner.submit("cancelled", "hang")
    await run_ready_tasks()
    runner.runner.cancel(episode_id("cancelled"))
    await run_ready_tasks()
    await runner.start("fresh", 1)
    assert await runner.turn("fresh") == ended(0, 1.0, "fresh")
    assert runner.has_no_reply("cancelled")
    assert [one.is_closed for one in made] == [True, True, False]


async def test_an_environment_that_cannot_be_closed_does_not_affect_other_episodes() -> None:
    class Stuck(Countdown):
        def close(self) -> None:
            raise SystemExit("cannot close")

    runner = RecordedRunner(Stuck)
    await runner.start("broken")
    await runner.start("cancelled")
    reply = await runner.turn("broken", "raise")
    assert isinstance(reply, EpisodeFailed)
    assert reply.reason == "environment raised KeyError"
    runner.runner.cancel(episode_id("cancelled"))
    await run_ready_tasks()
    await runner.start("fresh", 1)
    assert await runner.turn("fresh") == ended(0, 1.0, "fresh")
    runner.runner.cancel(episode_id("broken"))  # has no effect
    assert len(asyncio.all_tasks()) == 1


async def test_an_episode_cancelled_before_its_start_makes_no_environment() -> None:
    made: list[Countdown] = []
    runner = RecordedRunner(lambda: add_to(made))
    runner.runner.start(episode_id("e"), {"from": 1}, seed=0)
    runner.runner.cancel(episode_id("e"))
    await run_ready_tasks()
    runner.submit("e", "-")  # ignored
    runner.runner.cancel(episode_id("e"))
    assert made == []
