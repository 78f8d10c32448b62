"""A tiny model, and batches of samples for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout, initial_weights
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

CPU = torch.device("cpu")
TINY = ModelConfig(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)
SETTINGS = TrainerSettings(lr=1e-2, num_steps=4, warmup_steps=0, max_grad_norm=1e9)


def initial() -> Tensor:
    """The initial flat weights of `TINY`."""
    return initial_weights(TINY, seed=0, std=0.3)


def at_the_end(
    batch: Sequence[Sample], rewards: Sequence[float]
) -> tuple[list[list[Sample]], list[list[float]]]:
    """Each sample as a response whose last token has its reward, for `Critic.compute_advantages`."""
    by_token = [[*([0.0] * s.num_loss_tokens)[:-1], r] for s, r in zip(batch, rewards, strict=True)]
    return [[s] for s in batch], by_token


def samples(num: int = 12) -> list[Sample]:
    """Responses of 1 to 20 tokens with the initial policy's log-probs; every third has advantage 0."""
    source = random.Random(0)
    policy = Policy(TINY, WeightLayout(TINY).views(initial()))
    batch = []
    for i in range(num):
        prompt = [source.randrange(11) for _ in range(source.randint(1, 4))]
        response = [source.randrange(11) for _ in range(source.randint(1, 20))]
        logprobs, _ = policy.logprobs(pack([prompt], [response], CPU))
        advantage = 0.0 if i % 3 == 0 else source.choice([-1.0, 0.5, 2.0])
        batch.append(Sample(prompt, response, logprobs.tolist(), advantage))
    return batch


def stale(batch: list[Sample]) -> list[Sample]:
    """The samples as if older policies had sampled them: their ratios are not all 1."""
    shifts = [0.3, -0.2, 0.0, 0.1]
    return [
        replace(s, logprobs=[x + shifts[(i + k) % 4] for k, x in enumerate(s.logprobs)], staleness=i % 3)
        for i, s in enumerate(batch)
    ]


def without_gradient(batch: list[Sample]) -> list[Sample]:
    """The samples with advantage 0."""
    return [replace(s, advantage=0.0) for s in batch]


def with_nan(batch: list[Sample]) -> list[Sample]:
    """The samples with advantages that make the gradient nan."""
    return [replace(s, advantage=float("nan")) for s in batch]


def first_moment(trainer: Trainer) -> Tensor:
    """Adam's first moment; after one step the gradient times 1 - beta1."""
    moment: Tensor = trainer.state_dict()["optimizer"]["state"][0]["exp_avg"]
    return moment.clone()


def gradient(batch: list[Sample], settings: TrainerSettings) -> Tensor:
    """The gradient of one step, from Adam's first moment; in double precision."""
    trainer = Trainer(TINY, initial().double(), settings)
    trainer.step(batch)
    return first_moment(trainer) / (1.0 - settings.betas[0])


def relative_gap(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`."""
    return float((got - expected).norm() / expected.norm())
