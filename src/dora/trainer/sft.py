"""Supervised fine-tuning (SFT): a warm start on a teacher's responses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout
from dora.trainer.optimizer import FlatAdamW
from dora.trainer.packing import balanced_micro_batches, pack
from dora.trainer.policy import Policy
from dora.trainer.recipe import LearningRateSchedule
from dora.trainer.transformers_policy import policy_class

SftExample = tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[int]]


def train_sft(
    config: ModelConfig,
    flat: Tensor,
    batches: Iterable[Sequence[SftExample]],
    num_steps: int,
    lr: float = 2e-3,
    warmup_steps: int = 20,
    micro_batch_tokens: int = 1024,
) -> Iterator[float]:
    """Train `flat` in place on `num_steps` batches; yields the loss of each step (nats per token).

    An example is (prompt ids, response ids), or for several turns also a loss mask of the response: 0 for
    tokens that are not the model's, such as results of tools. The loss covers the other response tokens. The
    learning rate decays linearly to 0, so the last step leaves converged weights. The caller drives the steps
    and can show progress.
    """
    optimizer = FlatAdamW(WeightLayout(config), flat, weight_decay=0.0, betas=(0.9, 0.99))
    schedule = LearningRateSchedule(lr, num_steps, warmup_steps)
    policy = policy_class(config)(config, optimizer.weights)
    for step, batch in enumerate(islice(batches, num_steps)):
        total = 0.0
        for loss in _losses(policy, batch, micro_batch_tokens):
            torch.autograd.backward(loss)
            total += loss.item()
        optimizer.step(schedule.lr_of(step), max_grad_norm=1.0)
        yield total


def mean_loss(
    config: ModelConfig, flat: Tensor, examples: Sequence[SftExample], micro_batch_tokens: int
) -> float:
    """The loss of the weights `flat` on examples (nats per token); nan without examples."""
    policy = policy_class(config)(config, WeightLayout(config).views(flat))
    with torch.no_grad():
        losses = [loss.item() for loss in _losses(policy, examples, micro_batch_tokens)]
    return math.fsum(losses) if examples else math.nan


def _losses(policy: Policy, batch: Sequence[SftExample], micro_batch_tokens: int) -> Iterator[Tensor]:
    """The loss of each micro-batch; their sum is the mean over the batch's tokens of the loss."""
    prompts, responses = [example[0] for example in batch], [example[1] for example in batch]
    masks = [example[2] if len(example) == 3 else [1] * len(example[1]) for example in batch]
    num_tokens = sum(map(sum, masks))
    lengths = [len(prompt) + len(response) for prompt, response, *_ in batch]
    for members in balanced_micro_batches(prompts, lengths, micro_batch_tokens):
        own = [[column[i] for i in members] for column in (prompts, responses, masks)]
        packed = pack(own[0], own[1], policy.device, masks=own[2])
        yield -policy.logprobs(packed)[0].sum() / num_tokens
