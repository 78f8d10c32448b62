"""Episodes: turns of the model with other words in between are one sequence, computed once."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engine.moving import Stage
from tests.engine.tiny import TINY, full_logits, request, weights

import dora.engine.engine as engine_module
from dora.core.records import RequestId
from dora.engine.exact import Scorer
from dora.engine.graphs import GraphRunner
from dora.engine.plan import State
from dora.engine.sequence import Completion, EngineError, Request
from dora.handover.moves import Kept, Received
from dora.turns.engine import TurnTakingEngine
from dora.turns.words import TurnEnded

KERNELS = ("eager", "numba")
WORDS = {0: (7, 8, 9), 1: tuple(range(1, 21)), 2: (3,)}  # what the other side says to a turn, by number
Answers = dict[RequestId, Completion]


def made(kernels: str = "eager", **settings: object) -> TurnTakingEngine:
    asked = {"max_rows": 8, "max_context": 96, "version_slots": 2, "kernels": kernels} | settings
    engine = TurnTakingEngine(TINY, **asked)  # type: ignore[arg-type]
    engine.load(0, weights(0))
    return engine


def episode(number: int, max_turn_tokens: int = 6, max_tokens: int = 50, **rules: object) -> Request:
    asked = request(number, max_tokens=max_tokens, prompt_length=3 + 6 * (number % 5), group_size=1)
    rules = {"max_turn_tokens": max_turn_tokens, **rules}
    return replace(asked, sampling=replace(asked.sampling, **rules))  # type: ignore[arg-type]


class Other:
    """Answers every turn as WORDS has it, so many steps later, and ends each episode after three answers."""

    def __init__(self, engine: TurnTakingEngine, delay: Callable[[TurnEnded], int] = lambda turn: 0) -> None:
        self.engine, self.delay = engine, delay
        self.num_turns: dict[RequestId, int] = {}
        self.turns: list[TurnEnded] = []
        self._owed: list[tuple[int, TurnEnded]] = []
        self._step = 0

    def step(self) -> Answers:
        self._step += 1
        done = {completion.id: completion for completion in self.engine.step()}
        self.turns += (ended := self.engine.take_turns())
        self._owed += [(self._step + self.delay(turn), turn) for turn in ended]
        for due, turn in [*self._owed]:
            if due <= self._step:
                self._owed.remove((due, turn))
                self._answer(turn)
        self.engine.check()
        return done

    def run(self, requests: list[Request]) -> Answers:
        self.engine.submit(requests)
        answers: Answers = {}
        while not self.engine.idle:
            answers |= self.step()
        return answers

    def _answer(self, turn: TurnEnded) -> None:
        number = self.num_turns.get(turn.request, 0)
        self.num_turns[turn.request] = number + 1
        if number == len(WORDS) or len(WORDS[number]) >= turn.num_left:
            self.engine.finish(turn.request)
        else:
            self.engine.observe(turn.request, WORDS[number])


def same(one: Completion, other: Completion) -> bool:
    """Tokens and reasons are equal, log-probs are close, and what was read has none in both."""
    return (
        (one.token_ids, one.chunks, one.finish_reason) == (other.token_ids, other.chunks, other.finish_reason)
    ) and one.logprobs == pytest.approx(other.logprobs, abs=1e-5, nan_ok=True)


def computed(asked: Request, answer: Completion) -> list[float]:
    """Log-probs by one forward pass over the whole sequence; those of what was read are left out."""
    start = len(asked.prompt_ids)
    logits = full_logits(weights(0), [*asked.prompt_ids, *answer.token_ids])[start - 1 : -1]
    found = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0].tolist()
    return [math.nan if math.isnan(own) else x for own, x in zip(answer.logprobs, found, strict=True)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_episode_is_one_sequence_whose_kv_is_computed_once(kernels: str) -> None:
    engine, requests = made(kernels), [episode(number) for number in range(8)]
    answers = Other(engine).run(requests)
    for asked in requests:
        answer = answers[asked.id]
        is_read = [math.isnan(x) for x in answer.logprobs]
        spoken = [False] * 6 + [True] * 3 + [False] * 6 + [True] * 20 + [False] * 6 + [True] + [False] * 6
        assert is_read == spoken
        assert answer.token_ids[15:35] == [*WORDS[1]]
        assert answer.logprobs == pytest.approx(computed(asked, answer), abs=1e-4, nan_ok=True)
        assert [chunk.num_tokens for chunk in answer.chunks] == [48]
    num_prompt_tokens = sum(asked.num_prompt_kv for asked in requests)
    assert engine.num_prefilled == num_prompt_tokens + 8 * 24
    assert (engine.num_decoded, engine.num_swapped, engine.kv_share) == (8 * 24, 0, 0)


def test_in_exact_mode_a_scorer_finds_the_same_bits_with_all_that_was_read() -> None:
    torch.set_num_threads(1)
    requests = [episode(number) for number in range(4)]
    answers = Other(made(exact=True), lambda turn: turn.request.row).run(requests)
    scorer = Scorer(TINY, 96, 1.0, "eager")
    for asked in requests:
        answer = answers[asked.id]
        found = scorer(weights(0), [asked.prompt_ids], [answer.token_ids]).tolist()
        drawn = [(own, x) for own, x in zip(answer.logprobs, found, strict=True) if not math.isnan(own)]
        assert [own for own, _ in drawn] == [x for _, x in drawn]


def test_words_that_the_model_would_have_written_change_nothing_behind_them() -> None:
    asked = episode(3, max_turn_tokens=6, max_tokens=30)
    whole = replace(asked, sampling=replace(asked.sampling, max_turn_tokens=0))
    engine = made()
    engine.submit([whole])
    (expected,) = [done for _ in range(30) for done in engine.step()]
    engine.submit([asked])
    answers: list[Completion] = []
    while not engine.idle:
        answers += engine.step()
        for turn in engine.take_turns():
            if turn.num_left <= 5:
                engine.finish(turn.request)
            else:
                written = 30 - turn.num_left
                engine.observe(turn.request, expected.token_ids[written : written + 5])
    assert answers[0].token_ids == expected.token_ids[: len(answers[0].token_ids)]
    assert len(answers[0].token_ids) == 28


@pytest.mark.parametrize("budget", [1, 5, 512])
@pytest.mark.parametrize("kernels", KERNELS)
def test_answers_do_not_depend_on_when_the_other_side_speaks_or_who_is_beside(
    kernels: str, budget: int
) -> None:
    requests = [episode(number) for number in range(8)]
    expected = {asked.id: Other(made(kernels)).run([asked])[asked.id] for asked in requests}
    engine = made(kernels, max_rows=6, prefill_budget=budget)
    answers = Other(engine, lambda turn: 7 * turn.request.row % 11).run(requests)
    assert all(same(answers[asked.id], expected[asked.id]) for asked in requests)


@pytest.mark.parametrize("kernels", KERNELS)
def test_whoever_waits_gives_way_where_blocks_are_few_and_comes_back_as_it_was(kernels: str) -> None:
    requests = [episode(number) for number in range(8)]
    expected = {asked.id: Other(made(kernels)).run([asked])[asked.id] for asked in requests}
    for num_blocks in (7, 9, 14):
        engine = made(kernels, num_blocks=num_blocks, prefill_budget=16)
        answers = Other(engine, lambda turn: 5 * turn.request.row % 13).run(requests)
        assert engine.num_swapped > 0
        assert all(same(answers[asked.id], expected[asked.id]) for asked in requests)


def test_a_row_at_rest_is_given_to_who_waits_for_one() -> None:
    first, second = episode(0), request(9, group_size=1)
    engine = made(max_rows=1)
    engine.submit([first, second])
    while not (turns := engine.take_turns()):
        engine.step()
    engine.step()
    assert engine.state_of(first.id) is State.SWAPPED
    assert engine.state_of(second.id) is State.RUNNING
    engine.observe(first.id, (1, 2))  # it comes back when the row is free again
    assert [turn.request for turn in turns] == [first.id]
    while not engine.take_turns():
        engine.step()
        engine.check()
    assert engine.progress() == {first.id: 14}


def test_padded_steps_that_begin_ahead_give_the_same_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [episode(number) for number in range(6)]
    expected = Other(made()).run(requests)
    monkeypatch.setattr(engine_module, "Runner", GraphRunner)
    answers = Other(made(), lambda turn: turn.request.row % 3).run(requests)
    assert all(same(answers[asked.id], expected[asked.id]) for asked in requests)


def test_a_turn_ends_with_a_stop_id_or_a_stop_string_of_its_own() -> None:
    def text(ids: list[int]) -> str:
        return "".join(chr(ord("a") + i) if i < 26 else "." for i in ids)

    rules = {"stop_strings": ("qz", "hi"), "stop_ids": (2, 9)}  # the other side says "hi" and 9, too
    engine, asked = made(detokenize=text), episode(0, max_turn_tokens=20, max_tokens=90, **rules)
    other = Other(engine)
    answer = other.run([asked])[asked.id]
    assert [turn.finish_reason for turn in other.turns] == ["stop", "turn_length", "stop", "stop"]
    for turn in other.turns:
        own = text(turn.token_ids)
        assert own.endswith(("qz", "hi", "c", "j")) == (turn.finish_reason == "stop")
        assert not any(stop in own[:-1] for stop in ("qz", "hi", "c", "j"))
    assert answer.finish_reason == "stop"


def test_the_last_turn_may_be_cut_and_says_what_is_left() -> None:
    engine, asked = made(), episode(1, max_turn_tokens=8, max_tokens=20)
    other = Other(engine)
    answer = other.run([asked])[asked.id]
    assert [(turn.finish_reason, turn.num_left) for turn in other.turns] == [
        ("turn_length", 12),
        ("turn_length", 1),
    ]
    assert [len(turn.token_ids) for turn in other.turns] == [8, 8]
    assert answer.finish_reason == "turn_length"
    other = Other(engine)
    answer = other.run([replace(asked, sampling=replace(asked.sampling, max_turn_tokens=10))])[asked.id]
    assert [(turn.finish_reason, turn.num_left) for turn in other.turns] == [
        ("turn_length", 10),
        ("length", 0),
    ]
    assert answer.finish_reason == "length"
    assert answer.version == 0
    assert answer.prompt_ids == asked.prompt_ids


def waiting(engine: TurnTakingEngine, *requests: Request) -> None:
    """Submit, and step until all wait for their first answer."""
    engine.submit(list(requests))
    ended: list[TurnEnded] = []
    while len(ended) < len(requests):
        engine.step()
        ended += engine.take_turns()


def test_a_request_that_waits_can_be_given_up_and_leaves_nothing() -> None:
    engine, asked = made(), [episode(number) for number in range(3)]
    waiting(engine, *asked)
    assert not engine.can_step
    assert engine.step() == []
    engine.observe(asked[0].id, (5,) * 9)
    engine.finish(asked[1].id)
    assert engine.can_step
    assert engine.abort([one.id for one in asked]) == dict.fromkeys([one.id for one in asked], 6)
    assert engine.idle
    assert not engine.can_step
    engine.check()
    engine.drop(0)


def test_a_paused_engine_hears_answers_and_acts_on_them_later() -> None:
    engine, asked = made(), episode(0)
    waiting(engine, asked)
    engine.pause()
    engine.finish(asked.id)
    assert not engine.can_step
    assert engine.step() == []
    engine.resume()
    (answer,) = engine.step()
    assert len(answer.token_ids) == 6
    assert engine.idle


def test_others_decode_while_a_rushed_request_waits() -> None:
    engine, rushed, other = made(), episode(0), request(9, group_size=1)
    engine.submit([rushed, other])
    engine.step()
    engine.rush([rushed.id])
    before = engine.progress()[other.id]
    for _ in range(5):
        engine.step()
    assert engine.progress() == {rushed.id: 6, other.id: before}
    engine.step()
    assert engine.progress()[other.id] == before + 1
    engine.observe(rushed.id, (4, 5))
    engine.step()
    assert engine.progress() == {rushed.id: 9, other.id: before + 1}


def test_answers_that_cannot_be_are_refused_and_the_request_still_waits() -> None:
    engine, asked = made(), episode(0, max_tokens=20)
    engine.submit([asked])
    engine.step()
    with pytest.raises(EngineError, match=r"request 0/0/0 does not wait for an answer"):
        engine.observe(asked.id, (1,))
    while not engine.take_turns():
        engine.step()
    for words, why in (((), "0 observed tokens"), ((1,) * 14, "14 are left"), ((29,), "outside 0..28")):
        with pytest.raises(EngineError, match=why):
            engine.observe(asked.id, words)
    engine.observe(asked.id, (1,) * 13)
    with pytest.raises(EngineError, match="does not wait"):
        engine.finish(asked.id)
    assert [turn.num_left for _ in range(3) for turn in (engine.step(), engine.take_turns())[1]] == [0]


def test_a_move_waits_for_the_other_side_and_takes_all_that_was_read_along(tmp_path: Path) -> None:
    asked = episode(4)
    expected = Other(made("numba")).run([asked])[asked.id]
    stage = Stage(tmp_path, "numba")
    here, there = stage.engine("here"), stage.engine("there")
    waiting(here, asked)
    move = stage.begin(asked, "here", "there")
    for _ in range(3):
        stage.poll("there")
        stage.poll("here")
    assert here.state_of(asked.id) is State.RUNNING
    here.observe(asked.id, WORDS[0])
    here.step()
    for name in ("there", "here", "there", "here"):
        stage.poll(name)
    received = stage.word_of("there", move)
    assert isinstance(received, Received)
    assert received.num_tokens == 6 + 3 + 1
    other = Other(there)
    other.num_turns[asked.id] = 1
    assert same(other.run([])[asked.id], expected)
    assert [len(turn.token_ids) for turn in other.turns] == [6, 6, 6]
    assert there.num_prefilled == len(WORDS[1]) + len(WORDS[2])


def test_a_move_for_which_the_other_side_takes_too_long_is_given_up(tmp_path: Path) -> None:
    stage, asked = Stage(tmp_path), episode(4)
    here = stage.engine("here")
    stage.engine("there")
    waiting(here, asked)
    move = stage.begin(asked, "here", "there")
    for _ in range(4):
        stage.poll("there")
        stage.poll("here")
        stage.now_s += 8.0
    assert stage.word_of("here", move) == Kept(move, "its lease is over")
    here.finish(asked.id)
    stage.step("here")
    assert len(stage.finished[asked.id].token_ids) == 6
