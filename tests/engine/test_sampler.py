"""Draws follow the distribution asked for, and depend on their own row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dora.engine.sampler import RULE, Drawn, Float32s, Rules, rule, sample, stream_of, uniform
from dora.engine.sequence import Sampling

NUM = 50_000


def rules(samplings: list[Sampling], seed: int = 3) -> Rules:
    return np.array([rule(seed, sampling) for sampling in samplings], RULE)


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Sampling:
    return Sampling(temperature, 1, (), top_p, top_k, min_p)


def draw_often(logits: list[float], asked: Sampling) -> Drawn:
    """NUM draws from the same logits, at positions 0, 1, 2, ..."""
    row = rules([asked])
    return sample(np.tile(np.array(logits, np.float32), (NUM, 1)), np.arange(NUM), np.repeat(row, NUM))


def bits(drawn: Drawn, row: int = 0) -> tuple[int, bytes, bytes]:
    """All that was drawn for a row, to the last bit."""
    return int(drawn.tokens[row]), drawn.logprobs[row].tobytes(), drawn.raw_logprobs[row].tobytes()


def drawn_logits(source: np.random.Generator, num_rows: int, vocab: int) -> Float32s:
    """From almost even to almost certain, and with many ties in every other row."""
    logits = source.normal(size=(num_rows, vocab)) * source.uniform(0.1, 8, (num_rows, 1))
    logits[::2] = logits[::2].round()
    return logits.astype(np.float32)


def drawn_sampling(source: np.random.Generator) -> Sampling:
    """Every filter is on in half of the cases."""
    return sampling(
        temperature=float(source.choice([0.0, 0.5, 1.0, 1.0, 1.7])),
        top_p=float(source.choice([1.0, source.uniform(0.01, 1)])),
        top_k=int(source.choice([0, int(source.integers(1, 400))])),
        min_p=float(source.choice([0.0, source.uniform(0, 0.3)])),
    )


def naive_logprobs(logits: Float32s, asked: Sampling) -> NDArray[np.float64]:
    """Log-probs [vocab] by the words of `Sampling`: everything sorted, one filter after the other."""
    odds = np.exp((logits.astype(np.float64) - logits.max()) / (asked.temperature or 1.0))
    order = np.lexsort((np.arange(len(odds)), -odds))
    if asked.temperature > 0:
        order = order[: asked.top_k or None]
        probs = odds[order] / odds[order].sum()
        if asked.top_p < 1:
            order = order[: 1 + int((probs.cumsum() < asked.top_p).sum())]
        order = order[odds[order] >= asked.min_p]
    logprobs, order = np.full(len(odds), -np.inf), order[odds[order] > 0]
    logprobs[order] = np.log(odds[order] / odds[order].sum())
    return logprobs


def test_random_numbers_are_uniform_and_uncorrelated_over_positions_and_seeds() -> None:
    one, counter = np.full(NUM, stream_of(1), np.uint64), np.arange(NUM)
    streams = np.array([stream_of(seed) for seed in range(NUM)], np.uint64)
    for numbers in (uniform(one, counter), uniform(streams, np.ones(NUM, np.int64))):
        assert (numbers >= 0).all()
        assert (numbers < 1).all()
        assert abs(numbers.mean() - 1 / 2) < 0.005
        assert abs(numbers.var() - 1 / 12) < 0.002
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


def test_a_number_depends_only_on_its_own_stream_and_position() -> None:
    streams, positions = np.arange(9, dtype=np.uint64), np.arange(9) * 3
    whole = uniform(streams, positions)
    assert [float(uniform(streams[i : i + 1], positions[i : i + 1])[0]) for i in range(9)] == whole.tolist()
    assert len(set(whole.tolist())) == 9


def test_the_low_64_bits_of_a_seed_count() -> None:
    assert stream_of(-1) == stream_of(2**64 - 1) != stream_of(1)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (sampling(), {0, 1, 2, 3, 5}),
        (sampling(temperature=0.7), {0, 1, 2, 3, 5}),
        (sampling(top_k=3), {0, 1, 3}),
        (sampling(temperature=1.5, top_p=0.9), {0, 1, 2, 3}),
        (sampling(min_p=0.1), {0, 1, 3}),
        (sampling(top_k=4, top_p=0.8, min_p=0.3), {1, 3}),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(asked: Sampling, kept: set[int]) -> None:
    logits = [0.0, 1.0, -1.0, 2.0, -np.inf, -2.0]
    drawn = draw_often(logits, asked)
    assert set(drawn.tokens.tolist()) == kept
    expected = naive_logprobs(np.array(logits, np.float32), asked)
    np.testing.assert_allclose(drawn.logprobs, expected[drawn.tokens], atol=1e-6)
    ids = sorted(kept)
    wanted = NUM * np.exp(expected[ids])
    chi_square = ((np.bincount(drawn.tokens, minlength=6)[ids] - wanted) ** 2 / wanted).sum()
    assert chi_square < 25  # 5 degrees of freedom at most: p > 0.0001


def test_filtered_distributions_are_those_of_transformers() -> None:
    source = np.random.default_rng(0)
    no_tokens: Any = torch.zeros(1, 0, dtype=torch.int64)  # transformers wants its own class
    for vocab in (7, 300, 5000):
        asked = [sampling(0.8, 0.9), sampling(1.3, top_k=5), sampling(1.0, min_p=0.02)]
        asked += [sampling(float(t), float(p), 20, 0.01) for t, p in source.uniform(0.4, 1, (40, 2))]
        logits = (source.normal(size=(len(asked), vocab)) * 3).astype(np.float32)
        drawn = sample(logits, np.arange(len(asked)), rules(asked))
        for i, (scores, one) in enumerate(zip(torch.from_numpy(logits), asked, strict=True)):
            warpers = LogitsProcessorList([TemperatureLogitsWarper(one.temperature)])
            if one.top_k:
                warpers.append(TopKLogitsWarper(one.top_k))
            if one.top_p < 1:
                warpers.append(TopPLogitsWarper(one.top_p))
            if one.min_p:
                warpers.append(MinPLogitsWarper(one.min_p))
            expected = warpers(no_tokens, scores[None])[0].log_softmax(-1)
            assert drawn.logprobs[i] == pytest.approx(float(expected[drawn.tokens[i]]), abs=2e-6)
            tempered = (scores.double() / one.temperature).log_softmax(-1)[drawn.tokens[i]]
            assert drawn.unfiltered_logprobs[i] == pytest.approx(float(tempered), abs=3e-6)


def test_both_logprobs_are_those_of_a_log_softmax() -> None:
    source = np.random.default_rng(1)
    temperatures = [1.0, 0.6, 1.8, 0.0, 1.0, 0.3]
    asked = [sampling(temperature) for temperature in temperatures]
    for vocab in (3, 4000, 60_000):
        logits = (source.normal(size=(6, vocab)) * 3).astype(np.float32)
        drawn = sample(logits, np.arange(6), rules(asked))
        for i, temperature in enumerate(temperatures):
            scores, token = torch.from_numpy(logits[i]).double(), drawn.tokens[i]
            raw = scores.log_softmax(-1)[token]
            expected = (scores / (temperature or 1.0)).log_softmax(-1)[token]
            assert drawn.raw_logprobs[i] == pytest.approx(float(raw), abs=3e-6)
            assert (
                drawn.logprobs[i] == drawn.unfiltered_logprobs[i] == pytest.approx(float(expected), abs=3e-6)
            )
        plain = [0, 3, 4]
        assert drawn.logprobs[plain].tobytes() == drawn.raw_logprobs[plain].tobytes()


@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([1, 2, 33, 700]))
@settings(max_examples=60, deadline=None)
def test_sorting_only_candidates_changes_no_distribution(seed: int, vocab: int) -> None:
    source = np.random.default_rng(seed)
    asked = [drawn_sampling(source) for _ in range(12)]
    logits = drawn_logits(source, 12, vocab)
    drawn = sample(logits, source.integers(0, 1000, 12), rules(asked))
    for i, one in enumerate(asked):
        expected = naive_logprobs(logits[i], one)[drawn.tokens[i]]
        assert drawn.logprobs[i] == pytest.approx(expected, abs=5e-6)


@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([2, 15, 1000, 40_000]))
@settings(max_examples=40, deadline=None)
def test_a_row_draws_the_same_bits_alone_and_in_any_batch(seed: int, vocab: int) -> None:
    source = np.random.default_rng(seed)
    num = 9
    asked = np.array([rule(i, drawn_sampling(source)) for i in range(num)], RULE)
    logits, positions = drawn_logits(source, num, vocab), source.integers(0, 1000, num)
    alone = [sample(logits[i : i + 1], positions[i : i + 1], asked[i : i + 1]) for i in range(num)]
    for _ in range(3):
        batch = source.permutation(num)[: source.integers(1, num + 1)]
        drawn = sample(logits[batch], positions[batch], asked[batch])
        assert [bits(drawn, place) for place in range(len(batch))] == [bits(alone[i]) for i in batch]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (sampling(top_k=3), [0, 1, 2]),
        (sampling(top_p=0.5), [0, 1, 2, 3]),
        (sampling(top_k=6, top_p=0.5), [0, 1, 2]),
        (sampling(min_p=1.0), [0, 1, 2, 3, 4, 5, 6, 7]),
        (sampling(top_k=1), [0]),
        (sampling(top_p=1e-300), [0]),
        (sampling(temperature=0.0, top_k=5), [0]),
    ],
)
def test_of_equal_tokens_those_of_lower_id_are_kept(asked: Sampling, kept: list[int]) -> None:
    assert sorted(set(draw_often([1.0] * 8, asked).tokens.tolist())) == kept


def test_filters_that_keep_everything_change_no_draw() -> None:
    logits = drawn_logits(np.random.default_rng(2), 200, 50)
    positions = np.arange(200)
    free = sample(logits, positions, rules([sampling(0.9)] * 200))
    for asked in (sampling(0.9, top_k=50), sampling(0.9, top_k=2**31 - 1), sampling(0.9, min_p=1e-300)):
        kept = sample(logits, positions, rules([asked] * 200))
        assert [bits(kept, row) for row in range(200)] == [bits(free, row) for row in range(200)]


def test_greedy_rows_take_the_first_largest_logit_beside_sampled_ones() -> None:
    logits = np.array([[0.0, 5.0, 5.0], [1.0, 0.0, -1.0]], np.float32)
    asked, positions = rules([sampling(0.0, top_p=0.1), sampling()]), np.array([4, 4])
    drawn = sample(logits, positions, asked)
    assert drawn.tokens[0] == 1
    expected = float(torch.from_numpy(logits[0]).log_softmax(-1)[1])
    assert drawn.logprobs[0] == drawn.raw_logprobs[0] == pytest.approx(expected, abs=1e-6)
    assert drawn.tokens[1] == sample(logits[1:], positions[1:], asked[1:]).tokens[0]
