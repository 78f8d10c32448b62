"""An episode is played from its reset to its reward, or ends by name; many go on beside each other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.envs.playing import RULES, Countdown, Table, encode, played, settle

from dora.envs.base import Environment, Step
from dora.envs.host import Broke, Ended, Opened, Replied


def test_an_episode_goes_from_its_prompt_to_the_sum_of_its_rewards() -> None:
    words = played(["-", "-", "-"])
    assert words == [Opened(encode("3:")), Replied(encode("2")), Replied(encode("1")), Ended(3.0)]


def test_a_whole_that_comes_in_parts_is_whole() -> None:
    class Sixths(Countdown):
        async def step(self, action: str) -> Step:
            step: Step = await super().step(action)
            return step._replace(reward=1 / 6)

    async def play() -> None:
        table = Table(Sixths, replace(RULES, max_turns=6))
        await table.begin("e", number=6)
        words = [await table.turn("e") for _ in range(6)]
        assert words[-1] == Ended(1.0)

    asyncio.run(play())


def test_episodes_go_on_beside_each_other() -> None:
    async def play() -> None:
        table = Table()
        assert [await table.begin("a", 2), await table.begin("b", 1)] == [
            Opened(encode("2:")),
            Opened(encode("1:")),
        ]
        assert await table.turn("b") == Ended(1.0)
        assert await table.turn("a") == Replied(encode("1"))
        assert await table.turn("a") == Ended(2.0)

    asyncio.run(play())


def test_an_environment_whose_episode_is_over_plays_the_next_one() -> None:
    async def play() -> int:
        table, before = Table(), Countdown.num_made
        for episode in "abc":
            await table.begin(episode, 1)
            await table.turn(episode)
        return Countdown.num_made - before

    assert asyncio.run(play()) == 1


def test_the_last_turn_allowed_is_answered_with_what_was_earned() -> None:
    assert played(["-", "-"], rules=replace(RULES, max_turns=2)) == [
        Opened(encode("3:")),
        Replied(encode("2")),
        Ended(2.0),
    ]


@pytest.mark.parametrize("num_left", [0, 1])
def test_an_episode_without_room_for_another_turn_is_over_with_what_it_earned(num_left: int) -> None:
    async def play() -> None:
        table = Table()
        await table.begin("e")
        assert await table.turn("e", "-", num_left) == Ended(1.0)

    asyncio.run(play())


def test_an_observation_that_leaves_one_token_is_read() -> None:
    async def play() -> None:
        table = Table()
        await table.begin("e")
        assert await table.turn("e", "-", num_left=2) == Replied(encode("2"))

    asyncio.run(play())


@pytest.mark.parametrize(
    ("action", "reason", "detail"),
    [
        ("raise", "environment raised KeyError", "nothing there"),
        ("silent", "environment gave an empty observation", ""),
        ("nan", "environment raised ValueError", "the reward nan must be a finite number"),
        ("pair", "environment raised TypeError", "must return (observation, reward, done)"),
        ("list", "environment raised TypeError", "must be a string, or messages such as"),
        ("exit", "environment raised SystemExit", "no license left"),
        ("cancel", "environment raised CancelledError", ""),
    ],
)
def test_what_an_environment_must_not_do_ends_its_episode_by_name(
    action: str, reason: str, detail: str
) -> None:
    word = played([action])[-1]
    assert isinstance(word, Broke)
    assert word.reason == reason
    assert detail in word.detail


def test_a_call_that_takes_too_long_ends_its_episode_and_no_other() -> None:
    async def play() -> None:
        table = Table(rules=replace(RULES, timeout_s=0.05))
        await table.begin("slow")
        await table.begin("other", 1)
        slow = await table.turn("slow", "hang")
        assert isinstance(slow, Broke)
        assert slow.reason == "environment took longer than env.timeout_s = 0.05"
        assert await table.turn("other") == Ended(1.0)

    asyncio.run(play())


def test_a_prompt_that_is_too_long_ends_its_episode() -> None:
    word = played([], rules=replace(RULES, max_prompt_length=1))[0]
    assert isinstance(word, Broke)
    assert word.reason == "environment began with 2 tokens, and data.max_prompt_length = 1"


def test_an_environment_in_an_unknown_state_is_closed_and_not_used_again() -> None:
    made: list[Countdown] = []

    def make() -> Environment:
        made.append(Countdown())
        return made[-1]

    async def play() -> None:
        table = Table(make)
        await table.begin("broken")
        await table.turn("broken", "raise")
        await table.begin("forgotten")
        table.host.take_turn("forgotten", encode("hang"), 10)
        await settle()
        table.host.forget("forgotten")
        await settle()
        await table.begin("fresh", 1)
        assert await table.turn("fresh") == Ended(1.0)
        assert table.is_silent("forgotten")

    asyncio.run(play())
    assert [one.is_closed for one in made] == [True, True, False]


def test_an_environment_that_does_not_close_breaks_no_other_episode() -> None:
    class Stuck(Countdown):
        def close(self) -> None:
            raise SystemExit("the door is stuck")

    async def play() -> None:
        table = Table(Stuck)
        await table.begin("broken")
        await table.begin("forgotten")
        word = await table.turn("broken", "raise")
        assert isinstance(word, Broke)
        assert word.reason == "environment raised KeyError"
        table.host.forget("forgotten")
        await settle()
        await table.begin("fresh", 1)
        assert await table.turn("fresh") == Ended(1.0)
        table.host.forget("broken")  # nothing of it is left
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())


def test_an_episode_that_is_forgotten_before_it_began_leaves_nothing() -> None:
    async def play() -> None:
        table, before = Table(), Countdown.num_made
        table.host.begin("e", {"from": 1}, seed=0)
        table.host.forget("e")
        await settle()
        table.host.take_turn("e", encode("-"), 10)  # late, and heard by nobody
        table.host.forget("e")
        assert Countdown.num_made == before

    asyncio.run(play())
