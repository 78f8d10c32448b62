"""The runner runs episodes concurrently, each from its reset to its reward or to a named failure."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.envs.countdown import (
    LIMITS,
    Countdown,
    RecordedRunner,
    StoredCountdown,
    add_to,
    encode,
    run_episode,
    run_ready_tasks,
)

from dora.envs.base import Step
from dora.envs.runner import EnvDone, EnvFailure, EnvObservation, EnvReset, EnvRestored


def test_the_reward_of_an_episode_is_the_sum_of_its_steps() -> None:
    replies = run_episode(["-", "-", "-"])
    assert replies == [
        EnvReset(encode("3:")),
        EnvObservation(encode("2")),
        EnvObservation(encode("1")),
        EnvDone(3.0),
    ]


def test_rewards_are_summed_without_rounding_errors() -> None:
    class Sixths(Countdown):
        async def step(self, action: str) -> Step:
            step: Step = await super().step(action)
            return step._replace(reward=1 / 6)

    async def run() -> None:
        runner = RecordedRunner(Sixths, replace(LIMITS, max_turns=6))
        await runner.start("e", number=6)
        replies = [await runner.turn("e") for _ in range(6)]
        assert replies[-1] == EnvDone(1.0)

    asyncio.run(run())


def test_an_episode_continues_from_its_state_in_another_process() -> None:
    async def run() -> None:
        runner = RecordedRunner(StoredCountdown)
        started = await runner.start("e")
        first = await runner.turn("e")
        assert isinstance(started, EnvReset)
        assert isinstance(first, EnvObservation)
        for state, num_left in ((started.state, 3), (first.state, 2)):
            other = RecordedRunner(StoredCountdown, replace(LIMITS, max_turns=3))
            assert await other.restore("e", state) == EnvRestored()
            replies = [await other.turn("e") for _ in range(num_left)]
            assert replies[-1] == EnvDone(3.0)

    asyncio.run(run())


def test_a_snapshot_that_is_too_large_or_is_not_there_fails_the_episode() -> None:
    class Large(StoredCountdown):
        def snapshot(self) -> bytes:
            return bytes(2**20 + 1)

    async def run() -> None:
        failed = await RecordedRunner(Large).start("e")
        assert isinstance(failed, EnvFailure)
        assert failed.reason == "environment snapshot has 1048577 bytes, more than 1048576: keep less state"
        failed = await RecordedRunner().restore("e", b'{"rewards": [], "snapshot": ""}')
        assert isinstance(failed, EnvFailure)
        assert "environment has no method restore" in failed.reason

    asyncio.run(run())


def test_episodes_run_concurrently() -> None:
    async def run() -> None:
        runner = RecordedRunner()
        assert [await runner.start("a", 2), await runner.start("b", 1)] == [
            EnvReset(encode("2:")),
            EnvReset(encode("1:")),
        ]
        assert await runner.turn("b") == EnvDone(1.0)
        assert await runner.turn("a") == EnvObservation(encode("1"))
        assert await runner.turn("a") == EnvDone(2.0)

    asyncio.run(run())


def test_an_environment_is_reused_for_the_next_episode() -> None:
    made: list[Countdown] = []

    async def run() -> None:
        runner = RecordedRunner(lambda: add_to(made))
        for episode in "abc":
            await runner.start(episode, 1)
            await runner.turn(episode)

    asyncio.run(run())
    assert len(made) == 1


def test_an_episode_ends_after_max_turns() -> None:
    assert run_episode(["-", "-"], limits=replace(LIMITS, max_turns=2)) == [
        EnvReset(encode("3:")),
        EnvObservation(encode("2")),
        EnvDone(2.0),
    ]


@pytest.mark.parametrize("num_left", [0, 1])
def test_an_episode_ends_when_no_tokens_are_left_for_a_turn(num_left: int) -> None:
    async def run() -> None:
        runner = RecordedRunner()
        await runner.start("e")
        assert await runner.turn("e", "-", num_left) == EnvDone(1.0)

    asyncio.run(run())


def test_an_observation_that_leaves_one_token_continues_the_episode() -> None:
    async def run() -> None:
        runner = RecordedRunner()
        await runner.start("e")
        assert await runner.turn("e", "-", num_left=2) == EnvObservation(encode("2"))

    asyncio.run(run())


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
    ],
)
def test_an_error_of_an_environment_fails_its_episode_by_name(action: str, reason: str, detail: str) -> None:
    reply = run_episode([action])[-1]
    assert isinstance(reply, EnvFailure)
    assert reply.reason == reason
    assert detail in reply.detail


def test_a_call_that_takes_too_long_fails_only_its_episode() -> None:
    async def run() -> None:
        runner = RecordedRunner(limits=replace(LIMITS, timeout_s=0.05))
        await runner.start("slow")
        await runner.start("other", 1)
        slow = await runner.turn("slow", "hang")
        assert isinstance(slow, EnvFailure)
        assert slow.reason == "environment took longer than env.timeout_s = 0.05"
        assert await runner.turn("other") == EnvDone(1.0)

    asyncio.run(run())


def test_a_prompt_that_is_too_long_fails_its_episode() -> None:
    reply = run_episode([], limits=replace(LIMITS, max_prompt_length=1))[0]
    assert isinstance(reply, EnvFailure)
    assert reply.reason == "environment prompt has 2 tokens, more than data.max_prompt_length = 1"


def test_an_environment_in_an_unknown_state_is_closed_and_not_reused() -> None:
    made: list[Countdown] = []

    async def run() -> None:
        runner = RecordedRunner(lambda: add_to(made))
        await runner.start("broken")
        await runner.turn("broken", "raise")
        await runner.start("cancelled")
        runner.runner.submit_turn("cancelled", encode("hang"), 10)
        await run_ready_tasks()
        runner.runner.cancel("cancelled")
        await run_ready_tasks()
        await runner.start("fresh", 1)
        assert await runner.turn("fresh") == EnvDone(1.0)
        assert runner.has_no_reply("cancelled")

    asyncio.run(run())
    assert [one.is_closed for one in made] == [True, True, False]


def test_an_environment_that_cannot_be_closed_does_not_affect_other_episodes() -> None:
    class Stuck(Countdown):
        def close(self) -> None:
            raise SystemExit("cannot close")

    async def run() -> None:
        runner = RecordedRunner(Stuck)
        await runner.start("broken")
        await runner.start("cancelled")
        reply = await runner.turn("broken", "raise")
        assert isinstance(reply, EnvFailure)
        assert reply.reason == "environment raised KeyError"
        runner.runner.cancel("cancelled")
        await run_ready_tasks()
        await runner.start("fresh", 1)
        assert await runner.turn("fresh") == EnvDone(1.0)
        runner.runner.cancel("broken")  # has no effect
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_an_episode_cancelled_before_its_start_makes_no_environment() -> None:
    made: list[Countdown] = []

    async def run() -> None:
        runner = RecordedRunner(lambda: add_to(made))
        runner.runner.start("e", {"from": 1}, seed=0)
        runner.runner.cancel("e")
        await run_ready_tasks()
        runner.runner.submit_turn("e", encode("-"), 10)  # ignored
        runner.runner.cancel("e")

    asyncio.run(run())
    assert made == []
