"""Samples follow the requested distribution and depend on their own row alone."""

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

from dora.engine.kernels.sampler import (
    SAMPLING_DTYPE,
    Float32s,
    SamplerOutput,
    SamplingMetadata,
    rng_stream,
    sample,
    sampling_metadata,
    uniform,
)
from dora.engine.request import SamplingParams

NUM = 50_000


def metadata_of(samplings: list[SamplingParams], seed: int = 3) -> SamplingMetadata:
    return np.array([sampling_metadata(seed, sampling) for sampling in samplings], SAMPLING_DTYPE)


def params(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> SamplingParams:
    return SamplingParams(temperature, 1, (), top_p, top_k, min_p)


def sample_often(logits: list[float], sampling: SamplingParams) -> SamplerOutput:
    """NUM samples from the same logits, at positions 0, 1, 2, ..."""
    row = metadata_of([sampling])
    return sample(np.tile(np.array(logits, np.float32), (NUM, 1)), np.arange(NUM), np.repeat(row, NUM))


def bits(sampled: SamplerOutput, row: int = 0) -> tuple[int, bytes, bytes]:
    """The bits of a row's output."""
    return int(sampled.tokens[row]), sampled.logprobs[row].tobytes(), sampled.raw_logprobs[row].tobytes()


def random_logits(source: np.random.Generator, num_rows: int, vocab: int) -> Float32s:
    """Logits from almost uniform to almost certain, with many ties in every other row."""
    logits = source.normal(size=(num_rows, vocab)) * source.uniform(0.1, 8, (num_rows, 1))
    logits[::2] = logits[::2].round()
    return logits.astype(np.float32)


def random_params(source: np.random.Generator) -> SamplingParams:
    """Parameters that enable each filter in half of the cases."""
    return params(
        temperature=float(source.choice([0.0, 0.5, 1.0, 1.0, 1.7])),
        top_p=float(source.choice([1.0, source.uniform(0.01, 1)])),
        top_k=int(source.choice([0, int(source.integers(1, 400))])),
        min_p=float(source.choice([0.0, source.uniform(0, 0.3)])),
    )


def naive_logprobs(logits: Float32s, sampling: SamplingParams) -> NDArray[np.float64]:
    """Log-probs [vocab] by the definition in `SamplingParams`: sort, then apply one filter after another."""
    odds = np.exp((logits.astype(np.float64) - logits.max()) / (sampling.temperature or 1.0))
    order = np.lexsort((np.arange(len(odds)), -odds))
    if sampling.temperature > 0:
        order = order[: sampling.top_k or None]
        probs = odds[order] / odds[order].sum()
        if sampling.top_p < 1:
            order = order[: 1 + int((probs.cumsum() < sampling.top_p).sum())]
        order = order[odds[order] >= sampling.min_p]
    logprobs, order = np.full(len(odds), -np.inf), order[odds[order] > 0]
    logprobs[order] = np.log(odds[order] / odds[order].sum())
    return logprobs


def test_random_numbers_are_uniform_and_uncorrelated_over_positions_and_seeds() -> None:
    stream, counter = np.full(NUM, rng_stream(1), np.uint64), np.arange(NUM)
    streams = np.array([rng_stream(seed) for seed in range(NUM)], np.uint64)
    for numbers in (uniform(stream, counter), uniform(streams, np.ones(NUM, np.int64))):
        assert (numbers >= 0).all()
        assert (numbers < 1).all()
        assert abs(numbers.mean() - 1 / 2) < 0.005
        assert abs(numbers.var() - 1 / 12) < 0.002
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


def test_a_random_number_depends_only_on_its_stream_and_position() -> None:
    streams, positions = np.arange(9, dtype=np.uint64), np.arange(9) * 3
    whole = uniform(streams, positions)
    assert [float(uniform(streams[i : i + 1], positions[i : i + 1])[0]) for i in range(9)] == whole.tolist()
    assert len(set(whole.tolist())) == 9


def test_only_the_low_64_bits_of_a_seed_matter() -> None:
    assert rng_stream(-1) == rng_stream(2**64 - 1) != rng_stream(1)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (params(), {0, 1, 2, 3, 5}),
        (params(temperature=0.7), {0, 1, 2, 3, 5}),
        (params(top_k=3), {0, 1, 3}),
        (params(temperature=1.5, top_p=0.9), {0, 1, 2, 3}),
        (params(min_p=0.1), {0, 1, 3}),
        (params(top_k=4, top_p=0.8, min_p=0.3), {1, 3}),
    ],
)
def test_tokens_are_sampled_with_their_probability(sampling: SamplingParams, kept: set[int]) -> None:
    logits = [0.0, 1.0, -1.0, 2.0, -np.inf, -2.0]
    sampled = sample_often(logits, sampling)
    assert set(sampled.tokens.tolist()) == kept
    expected = naive_logprobs(np.array(logits, np.float32), sampling)
    np.testing.assert_allclose(sampled.logprobs, expected[sampled.tokens], atol=1e-6)
    ids = sorted(kept)
    wanted = NUM * np.exp(expected[ids])
    chi_square = ((np.bincount(sampled.tokens, minlength=6)[ids] - wanted) ** 2 / wanted).sum()
    assert chi_square < 25  # 5 degrees of freedom at most: p > 0.0001


def test_filtered_distributions_are_those_of_transformers() -> None:
    source = np.random.default_rng(0)
    no_tokens: Any = torch.zeros(1, 0, dtype=torch.int64)  # transformers annotates its own class
    for vocab in (7, 300, 5000):
        samplings = [params(0.8, 0.9), params(1.3, top_k=5), params(1.0, min_p=0.02)]
        samplings += [params(float(t), float(p), 20, 0.01) for t, p in source.uniform(0.4, 1, (40, 2))]
        logits = (source.normal(size=(len(samplings), vocab)) * 3).astype(np.float32)
        sampled = sample(logits, np.arange(len(samplings)), metadata_of(samplings))
        for i, (scores, sampling) in enumerate(zip(torch.from_numpy(logits), samplings, strict=True)):
            warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
            if sampling.top_k:
                warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                warpers.append(TopPLogitsWarper(sampling.top_p))
            if sampling.min_p:
                warpers.append(MinPLogitsWarper(sampling.min_p))
            expected = warpers(no_tokens, scores[None])[0].log_softmax(-1)
            assert sampled.logprobs[i] == pytest.approx(float(expected[sampled.tokens[i]]), abs=2e-6)
            tempered = (scores.double() / sampling.temperature).log_softmax(-1)[sampled.tokens[i]]
            assert sampled.unfiltered_logprobs[i] == pytest.approx(float(tempered), abs=3e-6)


def test_all_logprobs_are_those_of_a_log_softmax() -> None:
    source = np.random.default_rng(1)
    temperatures = [1.0, 0.6, 1.8, 0.0, 1.0, 0.3]
    samplings = [params(temperature) for temperature in temperatures]
    for vocab in (3, 4000, 60_000):
        logits = (source.normal(size=(6, vocab)) * 3).astype(np.float32)
        sampled = sample(logits, np.arange(6), metadata_of(samplings))
        for i, temperature in enumerate(temperatures):
            scores, token = torch.from_numpy(logits[i]).double(), sampled.tokens[i]
            raw = scores.log_softmax(-1)[token]
            expected = (scores / (temperature or 1.0)).log_softmax(-1)[token]
            assert sampled.raw_logprobs[i] == pytest.approx(float(raw), abs=3e-6)
            assert (
                sampled.logprobs[i]
                == sampled.unfiltered_logprobs[i]
                == pytest.approx(float(expected), abs=3e-6)
            )
        plain = [0, 3, 4]
        assert sampled.logprobs[plain].tobytes() == sampled.raw_logprobs[plain].tobytes()


@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([1, 2, 33, 700]))
@settings(max_examples=60)
def test_sorting_only_candidates_gives_the_naive_distribution(seed: int, vocab: int) -> None:
    source = np.random.default_rng(seed)
    samplings = [random_params(source) for _ in range(12)]
    logits = random_logits(source, 12, vocab)
    sampled = sample(logits, source.integers(0, 1000, 12), metadata_of(samplings))
    for i, sampling in enumerate(samplings):
        expected = naive_logprobs(logits[i], sampling)[sampled.tokens[i]]
        assert sampled.logprobs[i] == pytest.approx(expected, abs=5e-6)


@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([2, 15, 1000, 40_000]))
@settings(max_examples=40)
def test_a_row_samples_the_same_bits_alone_and_in_any_batch(seed: int, vocab: int) -> None:
    source = np.random.default_rng(seed)
    num = 9
    metadata = np.array([sampling_metadata(i, random_params(source)) for i in range(num)], SAMPLING_DTYPE)
    logits, positions = random_logits(source, num, vocab), source.integers(0, 1000, num)
    alone = [sample(logits[i : i + 1], positions[i : i + 1], metadata[i : i + 1]) for i in range(num)]
    for _ in range(3):
        batch = source.permutation(num)[: source.integers(1, num + 1)]
        sampled = sample(logits[batch], positions[batch], metadata[batch])
        assert [bits(sampled, place) for place in range(len(batch))] == [bits(alone[i]) for i in batch]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (params(top_k=3), [0, 1, 2]),
        (params(top_p=0.5), [0, 1, 2, 3]),
        (params(top_k=6, top_p=0.5), [0, 1, 2]),
        (params(min_p=1.0), [0, 1, 2, 3, 4, 5, 6, 7]),
        (params(top_k=1), [0]),
        (params(top_p=1e-300), [0]),
        (params(temperature=0.0, top_k=5), [0]),
    ],
)
def test_of_tied_tokens_those_with_lower_ids_are_kept(sampling: SamplingParams, kept: list[int]) -> None:
    assert sorted(set(sample_often([1.0] * 8, sampling).tokens.tolist())) == kept


def test_filters_that_keep_all_tokens_change_no_sample() -> None:
    logits = random_logits(np.random.default_rng(2), 200, 50)
    positions = np.arange(200)
    free = sample(logits, positions, metadata_of([params(0.9)] * 200))
    for sampling in (params(0.9, top_k=50), params(0.9, top_k=2**31 - 1), params(0.9, min_p=1e-300)):
        kept = sample(logits, positions, metadata_of([sampling] * 200))
        assert [bits(kept, row) for row in range(200)] == [bits(free, row) for row in range(200)]


def test_greedy_rows_take_the_first_largest_logit_beside_sampled_ones() -> None:
    logits = np.array([[0.0, 5.0, 5.0], [1.0, 0.0, -1.0]], np.float32)
    metadata, positions = metadata_of([params(0.0, top_p=0.1), params()]), np.array([4, 4])
    sampled = sample(logits, positions, metadata)
    assert sampled.tokens[0] == 1
    expected = float(torch.from_numpy(logits[0]).log_softmax(-1)[1])
    assert sampled.logprobs[0] == sampled.raw_logprobs[0] == pytest.approx(expected, abs=1e-6)
    assert sampled.tokens[1] == sample(logits[1:], positions[1:], metadata[1:]).tokens[0]
