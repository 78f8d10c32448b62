"""Answers that go on with newer weights: from the same KV, or from KV that is computed again."""

from __future__ import annotations

import math

import pytest
import torch
from tests.engine.tiny import TINY, request, run, tokens, weights
from torch import Tensor
from torch.nn import functional as F

import dora.engine.engine as engine_module
from dora.core.records import GroupId, RequestId
from dora.engine.graphs import GraphRunner
from dora.engine.plan import State
from dora.engine.sequence import Completion, Request, Sampling
from dora.model.decoder import forward, head, rope_tables
from dora.model.weights import Layout
from dora.renewal.engine import RenewingEngine

KINDS = pytest.mark.parametrize("keeps_kv", [True, False], ids=["keeps", "recomputes"])
NUM_BEFORE = 7  # steps with the first weights


def renewing(
    *,
    keeps_kv: bool,
    kernels: str = "eager",
    num_blocks: int | None = None,
    max_rows: int = 8,
    prefill_budget: int = 512,
) -> RenewingEngine:
    made = RenewingEngine(
        TINY,
        keeps_kv=keeps_kv,
        max_rows=max_rows,
        max_context=96,
        version_slots=2,
        kernels=kernels,
        num_blocks=num_blocks,
        prefill_budget=prefill_budget,
    )
    made.load(0, weights(0))
    return made


def finish(made: RenewingEngine) -> dict[RequestId, Completion]:
    return run(made, [])


def step_and_renew(
    made: RenewingEngine, requests: list[Request], flat: Tensor
) -> dict[RequestId, Completion]:
    """Some steps with version 0, then version 1 is loaded; all answers."""
    made.submit(requests)
    answers: dict[RequestId, Completion] = {}
    for _ in range(NUM_BEFORE):
        answers |= {c.id: c for c in made.step()}
        made.check()
    made.load(1, flat)
    made.check()
    made.drop(0)  # nobody needs it any more
    return answers | finish(made)


@KINDS
@pytest.mark.parametrize("kernels", ["eager", "numba", "padded"])
def test_with_equal_weights_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, kernels: str, keeps_kv: bool
) -> None:
    if kernels == "padded":  # as on a GPU, where a step is begun before the last one's tokens are known
        monkeypatch.setattr(engine_module, "Runner", GraphRunner)
        kernels = "eager"
    requests = [request(i) for i in range(8)]
    expected = run(renewing(keeps_kv=keeps_kv, kernels=kernels), requests)
    answers = step_and_renew(renewing(keeps_kv=keeps_kv, kernels=kernels), requests, weights(0))
    assert tokens(answers) == tokens(expected)


@KINDS
@pytest.mark.parametrize("is_padded", [False, True])
def test_every_token_is_said_to_be_from_the_weights_that_drew_it(
    monkeypatch: pytest.MonkeyPatch, is_padded: bool, keeps_kv: bool
) -> None:
    if is_padded:
        monkeypatch.setattr(engine_module, "Runner", GraphRunner)
    answers = step_and_renew(renewing(keeps_kv=keeps_kv), [request(i) for i in range(4)], weights(1))
    for answer in answers.values():
        assert [(c.version, c.num_tokens) for c in answer.chunks] == [(0, NUM_BEFORE), (1, 20 - NUM_BEFORE)]
        assert len({c.digest for c in answer.chunks}) == 2
        assert answer.version == 1


def test_what_is_computed_again_goes_on_as_if_the_new_weights_had_been_asked() -> None:
    asked = [request(i, prompt_length=21) for i in range(4)]
    answers = step_and_renew(renewing(keeps_kv=False), asked, weights(1))
    for old in asked:
        answer = answers[old.id]
        prompt = (*old.prompt_ids, *answer.token_ids[:NUM_BEFORE])
        sampling = Sampling(1.0, max_tokens=20 - NUM_BEFORE)
        made = renewing(keeps_kv=False)
        made.load(1, weights(1))
        (fresh,) = run(made, [Request(old.id, GroupId(0, 9), prompt, 1, old.seed, sampling)]).values()
        assert answer.token_ids[NUM_BEFORE:] == fresh.token_ids
        assert answer.logprobs[NUM_BEFORE:] == pytest.approx(fresh.logprobs, abs=1e-5)
    assert len(answers) == 4


def test_siblings_have_their_prompt_computed_again_once() -> None:
    made = renewing(keeps_kv=False)
    asked = [request(i, prompt_length=33) for i in range(4)]
    step_and_renew(made, asked, weights(1))
    own = [33 + NUM_BEFORE - 1 - 32 * (i > 0) for i in range(4)]  # two whole blocks are shared
    assert made.num_recomputed == sum(own)


def test_what_is_kept_is_read_by_the_new_weights() -> None:
    """As if: keys and values of old weights for all tokens but the last, and the new weights for that one."""
    (asked,) = [request(0, group_size=1, prompt_length=5)]
    made = renewing(keeps_kv=True)
    (answer,) = step_and_renew(made, [asked], weights(1)).values()
    assert made.num_recomputed == 0
    ids = [*asked.prompt_ids, *answer.token_ids[:NUM_BEFORE]]
    logits = next_logits(ids, before=weights(0), after=weights(1))
    drawn = answer.token_ids[NUM_BEFORE]
    assert math.isclose(answer.raw_logprobs[NUM_BEFORE], float(logits.log_softmax(-1)[drawn]), abs_tol=1e-5)
    pure = next_logits(ids, before=weights(1), after=weights(1))
    assert float((pure - logits).abs().max()) > 0.01


def next_logits(ids: list[int], *, before: Tensor, after: Tensor) -> Tensor:
    """Logits [vocab] behind the last token: `after` reads it, `before` has read all others."""
    kept: list[tuple[Tensor, Tensor]] = []
    cos, sin = rope_tables(TINY, len(ids))

    def whole(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((k, v))
        return attended(q, k, v, is_causal=True)

    def last(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        old_k, old_v = kept[layer]
        return attended(q, torch.cat([old_k, k]), torch.cat([old_v, v]), is_causal=False)

    forward(Layout(TINY).views(before), TINY, torch.tensor(ids[:-1]), cos[:-1], sin[:-1], whole)
    views = Layout(TINY).views(after)
    return F.linear(forward(views, TINY, torch.tensor(ids[-1:]), cos[-1:], sin[-1:], last), head(views))[0]


def attended(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """[N, heads, dim] of queries, keys and values like it."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return out[0].transpose(0, 1)


@KINDS
@pytest.mark.parametrize("prefill_budget", [3, 512])
def test_what_waits_or_is_in_prefill_begins_with_the_newest(keeps_kv: bool, prefill_budget: int) -> None:
    made = renewing(keeps_kv=keeps_kv, max_rows=2, prefill_budget=prefill_budget)
    asked = [request(i, group_size=1, prompt_length=40) for i in range(4)]
    made.submit(asked)
    made.step()
    made.load(1, weights(1))
    answers = finish(made)
    assert answers.keys() == {r.id for r in asked}
    late = answers[asked[-1].id]
    assert [(c.version, c.num_tokens) for c in late.chunks] == [(1, 20)]
    (fresh,) = run(
        made, [Request(asked[-1].id, asked[-1].group, late.prompt_ids, 1, asked[-1].seed, asked[-1].sampling)]
    ).values()
    assert fresh.token_ids == late.token_ids


@KINDS
def test_what_was_sent_for_an_old_version_begins_with_the_newest(keeps_kv: bool) -> None:
    made = renewing(keeps_kv=keeps_kv)
    made.load(1, weights(1))
    made.drop(0)
    (answer,) = run(made, [request(0)]).values()
    assert {chunk.version for chunk in answer.chunks} == {1}


@KINDS
def test_held_out_answers_keep_their_version(keeps_kv: bool) -> None:
    asked = request(0)
    held_out = Request(RequestId(-1, 0, 0), GroupId(-1, 0), asked.prompt_ids, 0, asked.seed, asked.sampling)
    made = renewing(keeps_kv=keeps_kv)
    made.submit([held_out, asked])
    for _ in range(NUM_BEFORE):
        made.step()
    made.load(1, weights(1))
    answers = finish(made)
    assert [c.version for c in answers[held_out.id].chunks] == [0]
    assert [c.version for c in answers[asked.id].chunks] == [0, 1]
    expected = run(renewing(keeps_kv=keeps_kv), [held_out])
    assert answers[held_out.id].token_ids == expected[held_out.id].token_ids


@KINDS
def test_an_engine_short_of_blocks_ends_all_the_same(keeps_kv: bool) -> None:
    """Rows that are swapped out lose their KV, so that it can never pass for that of the new weights."""
    made = renewing(keeps_kv=keeps_kv, num_blocks=9)
    asked = [request(i, group_size=1, prompt_length=10, max_tokens=60) for i in range(4)]
    made.submit(asked)
    while not any(made.state_of(r.id) is State.SWAPPED for r in asked):
        made.step()
        made.check()
    made.load(1, weights(1))
    answers = finish(made)
    assert answers.keys() == {r.id for r in asked}
    assert made.num_recomputed > 0
    again = request(9, group_size=1, prompt_length=10)
    asked_again = Request(again.id, again.group, asked[0].prompt_ids, 1, again.seed, again.sampling)
    fresh = renewing(keeps_kv=keeps_kv)
    fresh.load(1, weights(1))
    assert tokens(run(made, [asked_again])) == tokens(run(fresh, [asked_again]))


@KINDS
def test_what_is_given_up_leaves_nothing(keeps_kv: bool) -> None:
    made = renewing(keeps_kv=keeps_kv)
    asked = [request(i) for i in range(4)]
    made.submit(asked)
    made.step()
    made.load(1, weights(1))
    made.abort([r.id for r in asked])
    made.check()
    assert made.idle
    assert tokens(run(made, asked)).keys() == {r.id for r in asked}


def test_a_row_without_a_token_does_not_keep_the_kv_of_its_prompt() -> None:
    """Else its record would name one version, and another would have read the prompt."""
    made = renewing(keeps_kv=True)
    rushed, late = request(0, prompt_length=20), request(4, prompt_length=20)
    made.submit([rushed])
    made.step()
    made.rush([rushed.id])
    made.submit([late])
    made.step()  # it has a row, and stands still
    assert made.progress()[late.id] == 0
    made.load(1, weights(1))
    made.rush([])
    answers = finish(made)
    fresh = renewing(keeps_kv=True)
    fresh.load(1, weights(1))
    asked = Request(late.id, late.group, late.prompt_ids, 1, late.seed, late.sampling)
    assert [(c.version, c.num_tokens) for c in answers[late.id].chunks] == [(1, 20)]
    assert answers[late.id].token_ids == run(fresh, [asked])[late.id].token_ids
    assert [c.version for c in answers[rushed.id].chunks] == [0, 1]
