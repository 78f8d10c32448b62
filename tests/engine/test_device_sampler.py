"""The device sampler, in torch, samples the same tokens as the one in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.test_sampler import random_logits, random_params

from dora.engine.kernels.device_sampler import device_metadata, device_uniform, sample_on_device
from dora.engine.kernels.sampler import SAMPLING_DTYPE, rng_stream, sample, sampling_metadata
from dora.engine.kernels.sampler import uniform as expected_uniform
from dora.engine.request import SamplingParams


def test_random_numbers_are_the_same_bits() -> None:
    streams = np.array([rng_stream(seed) for seed in range(200)], np.uint64)
    positions = np.arange(200) * 7919
    found = device_uniform(torch.from_numpy(streams.view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(found.numpy(), expected_uniform(streams, positions))


@pytest.mark.parametrize("vocab", [29, 128, 1000])
@pytest.mark.parametrize("kind", ["all at temperature 1", "temperatures", "filters"])
def test_tokens_and_log_probs_are_those_of_the_numpy_sampler(kind: str, vocab: int) -> None:
    source = np.random.default_rng(vocab)
    num_rows = 200
    logits, positions = random_logits(source, num_rows, vocab), np.arange(num_rows) * 3
    samplings = {
        "all at temperature 1": lambda: SamplingParams(1.0, 1),
        "temperatures": lambda: SamplingParams(float(source.choice([0, 0.5, 1.7])), 1),
        "filters": lambda: random_params(source),
    }
    metadata = np.array(
        [sampling_metadata(seed, samplings[kind]()) for seed in range(num_rows)], SAMPLING_DTYPE
    )
    # Rows without a request do not matter.
    metadata_on_device = device_metadata(metadata, np.arange(num_rows), num_rows + 3, vocab)
    padded = torch.nn.functional.pad(torch.from_numpy(logits), (0, 0, 0, 3))
    found = sample_on_device(
        padded,
        torch.nn.functional.pad(torch.from_numpy(positions), (0, 3)),
        metadata_on_device,
        is_modified=bool(metadata["is_modified"].any()),
        has_filters=bool(metadata["is_filtered"].any()),
    )
    expected = sample(logits, positions, metadata)
    assert np.array_equal(found.tokens[:num_rows].numpy(), expected.tokens)
    np.testing.assert_allclose(found.logprobs[:, :num_rows].numpy(), np.stack(expected[1:]), atol=3e-6)
