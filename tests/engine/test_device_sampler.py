"""The torch sampler, for logits on a GPU, draws what the NumPy one does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.test_sampler import drawn_logits, drawn_sampling

from dora.engine.device_sampler import draw, rules_for, uniform
from dora.engine.sampler import RULE, rule, sample, stream_of
from dora.engine.sampler import uniform as expected_uniform
from dora.engine.sequence import Sampling


def test_random_numbers_are_the_same_bits() -> None:
    streams = np.array([stream_of(seed) for seed in range(200)], np.uint64)
    positions = np.arange(200) * 7919
    found = uniform(torch.from_numpy(streams.view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(found.numpy(), expected_uniform(streams, positions))


@pytest.mark.parametrize("vocab", [29, 128, 1000])
@pytest.mark.parametrize("kind", ["all at temperature 1", "temperatures", "filters"])
def test_tokens_and_log_probs_are_those_of_the_numpy_sampler(kind: str, vocab: int) -> None:
    source = np.random.default_rng(vocab)
    num_rows = 200
    logits, positions = drawn_logits(source, num_rows, vocab), np.arange(num_rows) * 3
    samplings = {
        "all at temperature 1": lambda: Sampling(1.0, 1),
        "temperatures": lambda: Sampling(float(source.choice([0, 0.5, 1.7])), 1),
        "filters": lambda: drawn_sampling(source),
    }
    rules = np.array([rule(seed, samplings[kind]()) for seed in range(num_rows)], RULE)
    # Rows that nobody asked for come to no harm.
    device_rules = rules_for(rules, np.arange(num_rows), num_rows + 3, vocab)
    padded = torch.nn.functional.pad(torch.from_numpy(logits), (0, 0, 0, 3))
    found = draw(
        padded,
        torch.nn.functional.pad(torch.from_numpy(positions), (0, 3)),
        device_rules,
        is_changed=bool(rules["is_changed"].any()),
        has_filters=bool(rules["is_filtered"].any()),
    )
    expected = sample(logits, positions, rules)
    assert np.array_equal(found.tokens[:num_rows].numpy(), expected.tokens)
    np.testing.assert_allclose(found.logprobs[:, :num_rows].numpy(), np.stack(expected[1:]), atol=3e-6)
