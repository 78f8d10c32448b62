"""Supervised fine-tuning of a tiny model."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.trainer.batches import TINY

from dora.model.weights import initial_weights
from dora.trainer.sft import SftExample, train_sft

EXAMPLES = [([1, 2], [3, 4, 5]), ([2, 1], [4, 5])]


def test_sft_learns_its_examples_and_yields_the_loss_of_every_step() -> None:
    flat = initial_weights(TINY, seed=0)
    losses = list(train_sft(TINY, flat, itertools.repeat(EXAMPLES), num_steps=60, lr=1e-2, warmup_steps=5))
    assert len(losses) == 60
    assert losses[0] == pytest.approx(math.log(TINY.vocab_size), abs=0.3)
    assert losses[-1] < 0.2
    assert not torch.equal(flat, initial_weights(TINY, seed=0))


def test_masked_tokens_are_read_and_not_learned() -> None:
    def loss(example: SftExample) -> float:
        return next(train_sft(TINY, initial_weights(TINY, seed=0), [[example]], num_steps=1))

    alone = loss(([1, 2], [5]))
    assert loss(([1, 2], [5, 3], [1, 0])) == pytest.approx(alone, rel=1e-5)
    assert loss(([1, 2], [5, 3])) != pytest.approx(alone, rel=1e-5)
    assert loss(([1, 2], [5, 3, 1], [0, 0, 1])) != loss(([1, 2], [5, 4, 1], [0, 0, 1]))
