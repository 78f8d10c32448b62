"""An engine short of blocks or busy with long prompts gives the answers that it gives undisturbed."""

import random

import pytest
from tests.engine.moving import Stage
from tests.engine.test_migration import BLOCK_BYTES, close
from tests.engine.tiny import TINY, engine, request, run, tokens, weights

from dora.core.records import RequestId
from dora.engine.engine import Engine
from dora.engine.plan import State
from dora.engine.sequence import Completion, EngineError, Request
from dora.handover.moves import Kept, NotReceived, Received, Sent

KERNELS = ("eager", "numba")
LONG = request(0, group_size=1, prompt_length=1, max_tokens=90)  # six blocks in the end


def small(
    kernels: str = "eager",
    *,
    num_blocks: int | None = None,
    prefill_budget: int = 512,
    max_rows: int = 8,
    num_versions: int = 1,
) -> Engine:
    made = Engine(
        TINY,
        max_rows=max_rows,
        max_context=96,
        version_slots=2,
        kernels=kernels,
        num_blocks=num_blocks,
        prefill_budget=prefill_budget,
    )
    for version in range(num_versions):
        made.load(version, weights(version))
    return made


def all_close(answers: dict[RequestId, Completion], expected: dict[RequestId, Completion]) -> bool:
    return answers.keys() == expected.keys() and all(close(answers[i], expected[i]) for i in expected)


def swapped(made: Engine, requests: list[Request]) -> list[Request]:
    return [asked for asked in requests if made.state_of(asked.id) is State.SWAPPED]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("prefill_budget", [1, 7, 16, 40])
def test_prompts_computed_in_pieces_give_the_same_answers(kernels: str, prefill_budget: int) -> None:
    requests = [request(i, max_tokens=12) for i in range(20)]
    requests += [request(i, prompt_length=75, max_tokens=12) for i in range(20, 24)]
    expected = run(small(kernels, max_rows=32), requests)
    made = small(kernels, max_rows=32, prefill_budget=prefill_budget)
    answers = run(made, requests)
    assert tokens(answers) == tokens(expected)
    for request_id, answer in answers.items():
        assert answer.logprobs == pytest.approx(expected[request_id].logprobs, abs=1e-5)
    assert made.num_prefilled == num_prompt_tokens(requests)


def num_prompt_tokens(requests: list[Request]) -> int:
    """Tokens of prompts without their last, once per group."""
    return sum({asked.prompt_key: asked.num_prompt_kv for asked in requests}.values())


def test_rows_decode_on_while_a_long_prompt_is_computed() -> None:
    made = small(prefill_budget=10)
    first, second = request(0), request(4, prompt_length=76)
    made.submit([first])
    made.step()
    before = made.num_prefilled
    made.submit([second])
    for num_steps in range(1, 8):
        assert made.state_of(second.id) is (State.WAITING if num_steps == 1 else State.PREFILL)
        made.step()
        made.check()
        assert made.num_prefilled == before + 10 * num_steps
        assert made.progress() == {first.id: 1 + num_steps, second.id: 0}
    made.step()
    assert made.progress() == {first.id: 9, second.id: 1}
    assert made.state_of(second.id) is State.RUNNING


@pytest.mark.parametrize("num_steps", range(1, 18))
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_request_swapped_out_at_any_offset_of_a_block_goes_on_bit_by_bit(
    kernels: str, num_steps: int
) -> None:
    """It stands still for a rush, whose rows need its blocks; so both decode alone all the time."""
    asked = request(1, group_size=1, max_tokens=40)
    expected = {a.id: run(small(kernels), [a])[a.id] for a in (asked, LONG)}
    made = small(kernels, num_blocks=6, max_rows=2)
    made.submit([asked])
    for _ in range(num_steps):
        made.step()
    num_prefilled = made.num_prefilled
    made.submit([LONG])
    made.rush([LONG.id])
    answers: dict[RequestId, Completion] = {}
    while made.state_of(asked.id) is not State.SWAPPED:
        answers |= {answer.id: answer for answer in made.step()}
    assert made.progress()[asked.id] == num_steps
    assert made.swapped_bytes == -(-(len(asked.prompt_ids) + num_steps - 1) // 16) * BLOCK_BYTES
    answers |= run(made, [])
    assert answers == expected
    assert (made.num_swapped, made.num_prefilled, made.kv_share) == (1, num_prefilled, 0)


@pytest.mark.parametrize("num_blocks", [7, 8, 9, 11, 14, 20])
@pytest.mark.parametrize("kernels", KERNELS)
def test_pools_too_small_for_all_rows_change_no_answer(kernels: str, num_blocks: int) -> None:
    requests = [request(i, version=i % 8 // 4, max_tokens=45) for i in range(32)]
    expected = run(small(kernels, max_rows=32, num_versions=2), requests)
    made = small(kernels, num_blocks=num_blocks, num_versions=2, prefill_budget=30)
    assert all_close(run(made, requests), expected)
    assert made.num_swapped > 0
    assert made.kv_share == 0


def test_the_pool_that_holds_everything_never_swaps() -> None:
    made = small(max_rows=4)
    run(made, [request(i, prompt_length=1 + i * 11 % 50, max_tokens=46) for i in range(16)])
    assert made.num_swapped == 0


def test_aborts_wherever_a_request_is_leak_nothing() -> None:
    source = random.Random(0)
    requests = [request(i, prompt_length=1 + i // 4 * 13 % 50, max_tokens=45) for i in range(32)]
    expected = run(small(max_rows=32), requests)
    made = small(num_blocks=9, prefill_budget=6)
    made.submit(requests)
    answers: dict[RequestId, Completion] = {}
    chances = {State.SWAPPED: 0.2, State.PREFILL: 0.3, State.WAITING: 0.04, State.RUNNING: 0.01}
    seen: set[State] = set()
    given_up: list[Request] = []
    while not made.idle:
        answers |= {answer.id: answer for answer in made.step()}
        made.check()
        for state, chance in chances.items():
            there = [asked for asked in requests if made.state_of(asked.id) is state]
            if there and source.random() < chance:
                given_up.append(source.choice(there))
                before = made.progress()[given_up[-1].id]
                assert made.abort([given_up[-1].id]) == {given_up[-1].id: before}
                assert made.state_of(given_up[-1].id) is State.DONE
                seen.add(state)
                made.check()
    assert seen == chances.keys()
    assert made.kv_share == 0
    assert all_close(answers, {a.id: expected[a.id] for a in requests if a not in given_up})


def crowded(made: Engine) -> list[Request]:
    """Let eight requests run until some of them are swapped out."""
    requests = [request(i, group_size=1, max_tokens=40) for i in range(8)]
    made.submit(requests)
    while not swapped(made, requests):
        made.step()
    return requests


def test_a_request_swapped_out_is_unfinished() -> None:
    made = small(num_blocks=12)
    requests = crowded(made)
    asked = swapped(made, requests)[0]
    assert made.progress()[asked.id] > 0
    assert made.num_rows + made.num_waiting == 8
    with pytest.raises(EngineError, match="here already"):
        made.submit([asked])
    made.abort([other.id for other in requests if other != asked])
    with pytest.raises(EngineError, match="version 0 has 1 unfinished requests"):
        made.drop(0)
    assert not made.idle
    assert made.can_step
    assert len(run(made, [])) == 1


def test_requests_move_away_while_others_are_swapped_out(stage: Stage) -> None:
    source = stage.engine("a", num_blocks=12)
    stage.engine("b")
    source.submit(requests := [request(i, group_size=1, max_tokens=40) for i in range(8)])
    while not swapped(source, requests):
        stage.step("a")
    moved = next(asked for asked in requests if source.state_of(asked.id) is State.RUNNING)
    stage.move(moved, "a", "b")
    waited = swapped(source, requests)[-1]
    move = stage.begin(waited, "a", "b")  # as soon as it has a row again
    answers = stage.run()
    assert stage.word_of("a", move) == Sent(move)
    assert isinstance(stage.word_of("b", move), Received)
    assert all_close(answers, run(engine(stage.kernels), requests))


def test_a_request_that_is_swapped_out_on_its_way_stays(stage: Stage) -> None:
    asked = request(1, group_size=1, max_tokens=40)
    source = stage.engine("a", num_blocks=6, max_rows=2)
    stage.engine("b")
    source.submit([asked])
    stage.step("a", 12)
    move = stage.begin(asked, "a", "b")
    source.submit([LONG])
    source.rush([LONG.id])
    while source.state_of(asked.id) is not State.SWAPPED:
        stage.step("a")
    stage.poll("a")
    assert stage.word_of("a", move) == Kept(move, "it was swapped out for want of KV blocks")
    stage.engines["b"].cancel_move(move)
    assert all_close(stage.run(), run(engine(stage.kernels), [asked, LONG]))


def test_a_destination_that_runs_short_of_blocks_gives_the_move_up(stage: Stage) -> None:
    asked = request(1, group_size=1, max_tokens=80)
    stage.engine("a").submit([asked])
    stage.engine("b", num_blocks=7).submit([LONG])
    stage.step("a", 60)
    stage.step("b", 60)
    move = stage.begin(asked, "a", "b")
    stage.poll("a")
    stage.poll("b")
    assert stage.word_of("b", move) == NotReceived(move, "too few KV blocks are free")
    stage.engines["a"].cancel_move(move)
    assert all_close(stage.run(), run(engine(stage.kernels), [asked, LONG]))


def test_a_request_grows_where_it_arrives(stage: Stage) -> None:
    """The destination reserves a few blocks, and takes more while the source publishes full ones."""
    asked = request(1, group_size=1, max_tokens=80)
    expected = run(engine(stage.kernels), [asked])[asked.id]
    stage.engine("a").submit([asked])
    stage.engine("b", num_blocks=7)
    stage.step("a", 70)
    stage.move(asked, "a", "b")
    assert stage.run()[asked.id] == expected
