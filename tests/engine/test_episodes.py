"""Episodes: the turns and the observations between them are one sequence, computed once."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine import tiny
from tests.engine.engine_cluster import EngineCluster
from tests.engine.tiny import TINY, forward_logprobs, make_engine, make_request, run, weights

import dora.engine.engine as engine_module
from dora.core.types import RequestId
from dora.engine.batch_invariant import LogprobScorer
from dora.engine.cuda_graphs import CUDAGraphRunner
from dora.engine.decode_batch import PartialOutput
from dora.engine.engine import Engine
from dora.engine.messages import ExportFailed, ImportFinished, TurnFinished
from dora.engine.request import Completion, EngineError, Request
from dora.engine.scheduler import RequestStatus

KERNELS = ("eager", "numba")
OBSERVATIONS = {0: (7, 8, 9), 1: tuple(range(1, 21)), 2: (3,)}  # by number of the turn
Completions = dict[RequestId, Completion]
make_episode_engine = partial(make_engine, max_rows=8)
all_close = partial(tiny.all_close, has_observations=True)


def episode(number: int, max_turn_tokens: int = 6, max_tokens: int = 50, **params: object) -> Request:
    request = make_request(number, max_tokens=max_tokens, prompt_length=3 + 6 * (number % 5), group_size=1)
    params = {"max_turn_tokens": max_turn_tokens, **params}
    return replace(request, sampling=replace(request.sampling, **params))  # type: ignore[arg-type]


class Environment:
    """Replies to each turn with its observation after `delay` steps; ends episodes after three of them."""

    def __init__(self, engine: Engine, delay: Callable[[TurnFinished], int] = lambda turn: 0) -> None:
        self.engine, self.delay = engine, delay
        self.num_turns: dict[RequestId, int] = {}
        self.turns: list[TurnFinished] = []
        self._pending: list[tuple[int, TurnFinished]] = []
        self._step = 0

    def step(self) -> Completions:
        self._step += 1
        done = {completion.id: completion for completion in self.engine.step()}
        self.turns += (ended := self.engine.pop_finished_turns())
        self._pending += [(self._step + self.delay(turn), turn) for turn in ended]
        for due, turn in [*self._pending]:
            if due <= self._step:
                self._pending.remove((due, turn))
                self._reply(turn)
        self.engine.check()
        return done

    def run(self, requests: list[Request], num_steps: int = 1000) -> Completions:
        self.engine.submit(requests)
        completions: Completions = {}
        for _ in range(num_steps):
            if not self.engine.is_idle:
                completions |= self.step()
        return completions

    def lose_engine(self, completions: Completions) -> dict[RequestId, PartialOutput]:
        """What the engine has of its requests once it has read the last observations."""
        completions |= {completion.id: completion for completion in self.engine.step()}
        self._pending += [(self._step, turn) for turn in self.engine.pop_finished_turns()]
        return self.engine.partial_outputs()

    def _reply(self, turn: TurnFinished) -> None:
        number = self.num_turns.get(turn.request_id, 0)
        self.num_turns[turn.request_id] = number + 1
        if number == len(OBSERVATIONS) or len(OBSERVATIONS[number]) >= turn.num_left:
            self.engine.end_episode(turn.request_id)
        else:
            self.engine.continue_episode(turn.request_id, OBSERVATIONS[number])


def alone(kernels: str, requests: list[Request]) -> Completions:
    """Each request on an engine of its own, whose observations arrive at once."""
    return {
        request.id: Environment(make_episode_engine(kernels)).run([request])[request.id]
        for request in requests
    }


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_episode_is_one_sequence_whose_kv_is_computed_once(kernels: str) -> None:
    engine, requests = make_episode_engine(kernels), [episode(number) for number in range(8)]
    completions = Environment(engine).run(requests)
    for request in requests:
        completion = completions[request.id]
        is_observation = [False] * 6 + [True] * 3 + [False] * 6 + [True] * 20 + [False] * 6 + [True]
        is_observation += [False] * 6
        assert completion.token_ids[15:35].tolist() == [*OBSERVATIONS[1]]
        expected = np.where(is_observation, np.nan, forward_logprobs(weights(), completion))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert [chunk.num_tokens for chunk in completion.chunks] == [48]
    num_prompt_tokens = sum(request.num_prefill_tokens for request in requests)
    assert engine.num_prefilled == num_prompt_tokens + 8 * 24
    assert (engine.num_decoded, engine.num_swapped, engine.kv_usage) == (8 * 24, 0, 0)


@pytest.mark.parametrize("num_steps", [4, 6, 8, 13, 20, 27])
@pytest.mark.parametrize("settings", [{"exact": True}, {"num_blocks": 12, "max_rows": 3}])
def test_episodes_of_a_lost_engine_continue_on_another_one(num_steps: int, settings: dict[str, Any]) -> None:
    """No turn and no observation is repeated, and what is drawn is what would have been drawn."""
    torch.set_num_threads(1)
    requests = [episode(number) for number in range(4)]
    expected = Environment(make_episode_engine(**settings)).run(requests)
    environment = Environment(make_episode_engine(**settings), lambda turn: 2 * turn.request_id.row)
    completions = environment.run(requests, num_steps)
    outputs, num_replies = environment.lose_engine(completions), sum(environment.num_turns.values())
    engine = environment.engine = make_episode_engine(**settings)
    unfinished = [request for request in requests if request.id not in completions]
    engine.submit(unfinished, outputs)
    assert engine.progress() == {
        r.id: len(outputs[r.id].token_ids) if r.id in outputs else 0 for r in unfinished
    }
    completions |= environment.run([])
    assert completions.keys() == expected.keys()
    if "exact" in settings:
        assert completions == expected
    else:
        assert all_close(completions, expected)
    assert sum(environment.num_turns.values()) == 4 * (len(OBSERVATIONS) + 1) > num_replies
    sampled = {i: int(np.isfinite(output.logprobs[:, 0]).sum()) for i, output in outputs.items()}
    assert engine.num_decoded == 24 * len(unfinished) - sum(sampled.values())


@pytest.mark.parametrize("params", [{}, {"max_tokens": 4}, {"max_turn_tokens": 3}])
def test_an_output_that_ends_with_a_whole_turn_waits_for_its_observation(params: dict[str, object]) -> None:
    """Without parameters its third token is a stop token."""
    _, whole = first_turn(episode(0))
    request = episode(0, **(params or {"stop_ids": (whole.token_ids[2],)}))  # type: ignore[arg-type]
    lost, turn = first_turn(request)
    engine = make_episode_engine()
    engine.submit([request], lost.partial_outputs([request.id]))
    assert not engine.can_step
    engine.end_episode(request.id)
    (completion,) = run(engine, []).values()
    assert completion.token_ids.tolist() == turn.token_ids
    assert len(turn.token_ids) < len(whole.token_ids)
    assert (completion.finish_reason, engine.num_decoded) == (turn.finish_reason, 0)


def first_turn(request: Request) -> tuple[Engine, TurnFinished]:
    """An engine that has generated the first turn of a request."""
    engine = make_episode_engine()
    engine.submit([request])
    while not (turns := engine.pop_finished_turns()):
        engine.step()
    return engine, turns[0]


def test_in_exact_mode_a_scorer_computes_the_same_bits_after_observations() -> None:
    torch.set_num_threads(1)
    requests = [episode(number) for number in range(4)]
    completions = Environment(make_episode_engine(exact=True), lambda turn: turn.request_id.row).run(requests)
    scorer = LogprobScorer(TINY, 96, 1.0, "eager")
    for request in requests:
        completion = completions[request.id]
        found = scorer(weights(0), [request.prompt_ids], [completion.token_ids.tolist()]).tolist()
        sampled = [(own, x) for own, x in zip(completion.logprobs, found, strict=True) if not math.isnan(own)]
        assert [own for own, _ in sampled] == [x for _, x in sampled]


def test_an_observation_that_the_model_would_have_generated_changes_no_later_token() -> None:
    request = episode(3, max_turn_tokens=6, max_tokens=30)
    whole = replace(request, sampling=replace(request.sampling, max_turn_tokens=0))
    engine = make_episode_engine()
    (expected,) = run(engine, [whole]).values()
    engine.submit([request])
    completions: list[Completion] = []
    while not engine.is_idle:
        completions += engine.step()
        for turn in engine.pop_finished_turns():
            if turn.num_left <= 5:
                engine.end_episode(turn.request_id)
            else:
                written = 30 - turn.num_left
                engine.continue_episode(turn.request_id, expected.token_ids[written : written + 5])
    assert completions[0].token_ids.tolist() == expected.token_ids[: len(completions[0].token_ids)].tolist()
    assert len(completions[0].token_ids) == 28


@pytest.mark.parametrize("budget", [1, 5, 512])
@pytest.mark.parametrize("kernels", KERNELS)
def test_completions_do_not_depend_on_when_observations_arrive_or_on_other_requests(
    kernels: str, budget: int
) -> None:
    requests = [episode(number) for number in range(8)]
    engine = make_episode_engine(kernels, max_rows=6, prefill_budget=budget)
    completions = Environment(engine, lambda turn: 7 * turn.request_id.row % 11).run(requests)
    assert all_close(completions, alone(kernels, requests))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_waiting_episode_is_preempted_if_blocks_are_few_and_returns_unchanged(kernels: str) -> None:
    requests = [episode(number) for number in range(8)]
    expected = alone(kernels, requests)
    for num_blocks in (7, 9, 14):
        engine = make_episode_engine(kernels, num_blocks=num_blocks, prefill_budget=16)
        completions = Environment(engine, lambda turn: 5 * turn.request_id.row % 13).run(requests)
        assert engine.num_swapped > 0
        assert all_close(completions, expected)


def test_the_row_of_a_waiting_episode_is_given_to_a_waiting_request() -> None:
    first, second = episode(0), make_request(9, group_size=1)
    engine = make_episode_engine(max_rows=1)
    engine.submit([first, second])
    while not (turns := engine.pop_finished_turns()):
        engine.step()
    engine.step()
    assert engine.status_of(first.id) is RequestStatus.SWAPPED
    assert engine.status_of(second.id) is RequestStatus.RUNNING
    engine.continue_episode(first.id, (1, 2))  # it returns when the row is free again
    assert [turn.request_id for turn in turns] == [first.id]
    while not engine.pop_finished_turns():
        engine.step()
        engine.check()
    assert engine.progress() == {first.id: 14}


def test_padded_steps_that_start_ahead_give_the_same_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [episode(number) for number in range(6)]
    expected = Environment(make_episode_engine()).run(requests)
    monkeypatch.setattr(engine_module, "ModelRunner", CUDAGraphRunner)
    completions = Environment(make_episode_engine(), lambda turn: turn.request_id.row % 3).run(requests)
    assert all_close(completions, expected)


def test_a_turn_ends_with_a_stop_id_or_a_stop_string_in_its_own_tokens() -> None:
    def text(ids: list[int]) -> str:
        return "".join(chr(ord("a") + i) if i < 26 else "." for i in ids)

    rules = {"stop_strings": ("qz", "hi"), "stop_ids": (2, 9)}  # observations contain "hi" and 9 too
    engine, request = (
        make_episode_engine(detokenize=text),
        episode(0, max_turn_tokens=20, max_tokens=90, **rules),
    )
    environment = Environment(engine)
    completion = environment.run([request])[request.id]
    assert [turn.finish_reason for turn in environment.turns] == ["stop", "turn_length", "stop", "stop"]
    for turn in environment.turns:
        own = text(turn.token_ids)
        assert own.endswith(("qz", "hi", "c", "j")) == (turn.finish_reason == "stop")
        assert not any(stop in own[:-1] for stop in ("qz", "hi", "c", "j"))
    assert completion.finish_reason == "stop"


def test_a_turn_has_the_log_probs_of_its_tokens() -> None:
    environment, request = Environment(make_episode_engine()), episode(1, temperature=0.7, top_k=5)
    completion = environment.run([request])[request.id]
    sampled = [x for x in completion.logprobs.tolist() if not math.isnan(x)]  # those of observations are
    assert len(environment.turns) > 1
    assert [x for turn in environment.turns for x in turn.logprobs] == sampled
    assert all(len(turn.logprobs) == len(turn.token_ids) for turn in environment.turns)


def test_the_last_turn_may_be_truncated_and_reports_the_tokens_left() -> None:
    engine, request = make_episode_engine(), episode(1, max_turn_tokens=8, max_tokens=20)
    environment = Environment(engine)
    completion = environment.run([request])[request.id]
    assert [(turn.finish_reason, turn.num_left) for turn in environment.turns] == [
        ("turn_length", 12),
        ("turn_length", 1),
    ]
    assert [len(turn.token_ids) for turn in environment.turns] == [8, 8]
    assert completion.finish_reason == "turn_length"
    environment = Environment(engine)
    completion = environment.run([replace(request, sampling=replace(request.sampling, max_turn_tokens=10))])[
        request.id
    ]
    assert [(turn.finish_reason, turn.num_left) for turn in environment.turns] == [
        ("turn_length", 10),
        ("length", 0),
    ]
    assert completion.finish_reason == "length"
    assert completion.version == 0
    assert tuple(completion.prompt_ids) == request.prompt_ids


def run_to_first_turn(engine: Engine, *requests: Request) -> None:
    """Submit requests and step until all wait for their first observation."""
    engine.submit(list(requests))
    ended: list[TurnFinished] = []
    while len(ended) < len(requests):
        engine.step()
        ended += engine.pop_finished_turns()


def test_a_waiting_episode_can_be_aborted_and_leaves_nothing() -> None:
    engine, request = make_episode_engine(), [episode(number) for number in range(3)]
    run_to_first_turn(engine, *request)
    assert not engine.can_step
    assert engine.step() == []
    engine.continue_episode(request[0].id, (5,) * 9)
    engine.end_episode(request[1].id)
    assert engine.can_step
    assert engine.abort([one.id for one in request]) == dict.fromkeys([one.id for one in request], 6)
    assert engine.is_idle
    assert not engine.can_step
    engine.check()
    engine.drop(0)


def test_a_paused_engine_accepts_the_end_of_an_episode_and_completes_it_after_resume() -> None:
    engine, request = make_episode_engine(), episode(0)
    run_to_first_turn(engine, request)
    engine.pause()
    engine.end_episode(request.id)
    assert not engine.can_step
    assert engine.step() == []
    engine.resume()
    (completion,) = engine.step()
    assert len(completion.token_ids) == 6
    assert engine.is_idle


def test_others_decode_while_the_only_decode_only_request_waits() -> None:
    engine, first, second = make_episode_engine(), episode(0), make_request(9, group_size=1)
    engine.submit([first, second])
    engine.step()
    engine.decode_only([first.id])
    before = engine.progress()[second.id]
    for _ in range(5):
        engine.step()
    assert engine.progress() == {first.id: 6, second.id: before}
    engine.step()
    assert engine.progress()[second.id] == before + 1
    engine.continue_episode(first.id, (4, 5))
    engine.step()
    assert engine.progress() == {first.id: 9, second.id: before + 1}


def test_invalid_observations_are_rejected_and_the_episode_still_waits() -> None:
    engine, request = make_episode_engine(), episode(0, max_tokens=20)
    engine.submit([request])
    engine.step()
    with pytest.raises(EngineError, match=r"request 0/0/0 does not wait for an observation"):
        engine.continue_episode(request.id, (1,))
    while not engine.pop_finished_turns():
        engine.step()
    for token_ids, why in (
        ((), "has 0 tokens"),
        ((1,) * 14, "14 of max_tokens are left"),
        ((29,), "outside 0..28"),
    ):
        with pytest.raises(EngineError, match=why):
            engine.continue_episode(request.id, token_ids)
    engine.continue_episode(request.id, (1,) * 13)
    with pytest.raises(EngineError, match="does not wait"):
        engine.end_episode(request.id)
    assert [turn.num_left for _ in range(3) for turn in (engine.step(), engine.pop_finished_turns())[1]] == [
        0
    ]


def test_a_migration_waits_for_the_observation_and_includes_it(tmp_path: Path) -> None:
    request = episode(4)
    expected = alone("numba", [request])
    cluster = EngineCluster(tmp_path, "numba")
    source, destination = cluster.add_engine("source"), cluster.add_engine("destination")
    run_to_first_turn(source, request)
    migration_id = cluster.start_migration(request, "source", "destination")
    for _ in range(3):
        cluster.poll("destination")
        cluster.poll("source")
    assert source.status_of(request.id) is RequestStatus.RUNNING
    source.continue_episode(request.id, OBSERVATIONS[0])
    source.step()
    for name in ("destination", "source", "destination", "source"):
        cluster.poll(name)
    received = cluster.reply_of("destination", migration_id)
    assert isinstance(received, ImportFinished)
    assert received.num_tokens == 6 + 3 + 1
    environment = Environment(destination)
    environment.num_turns[request.id] = 1
    assert all_close(environment.run([]), expected)
    assert [len(turn.token_ids) for turn in environment.turns] == [6, 6, 6]
    assert destination.num_prefilled == len(OBSERVATIONS[1]) + len(OBSERVATIONS[2])


def test_a_migration_fails_if_the_observation_takes_longer_than_its_lease(tmp_path: Path) -> None:
    cluster, request = EngineCluster(tmp_path), episode(4)
    source = cluster.add_engine("source")
    cluster.add_engine("destination")
    run_to_first_turn(source, request)
    migration_id = cluster.start_migration(request, "source", "destination")
    for _ in range(4):
        cluster.poll("destination")
        cluster.poll("source")
        cluster.now_s += 8.0
    assert cluster.reply_of("source", migration_id) == ExportFailed(migration_id, "the lease has expired")
    source.end_episode(request.id)
    cluster.step("source")
    assert len(cluster.finished[request.id].token_ids) == 6
