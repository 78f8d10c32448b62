"""Supervised fine-tuning (SFT): a warm start on a teacher's responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout
from dora.trainer.optimizer import FlatAdamW, learning_rate
from dora.trainer.packing import balanced_micro_batches, pack
from dora.trainer.policy import Policy

SftExample = tuple[Sequence[int], Sequence[int]]


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

    An example is (prompt ids, response ids); the loss covers the response. The learning rate decays linearly
    to 0, so the last step leaves converged weights. The caller drives the steps and can show progress.
    """
    optimizer = FlatAdamW(WeightLayout(config), flat, weight_decay=0.0, betas=(0.9, 0.99))
    policy = Policy(config, optimizer.weights)
    for step, batch in enumerate(islice(batches, num_steps)):
        num_tokens = sum(len(response) for _, response in batch)
        lengths = [len(prompt) + len(response) for prompt, response in batch]
        total = 0.0
        for members in balanced_micro_batches([x for x, _ in batch], lengths, micro_batch_tokens):
            packed = pack([batch[i][0] for i in members], [batch[i][1] for i in members], flat.device)
            loss = -policy.logprobs(packed)[0].sum() / num_tokens
            torch.autograd.backward(loss)
            total += loss.item()
        optimizer.step(learning_rate(lr, step, warmup_steps, num_steps, "linear"), max_grad_norm=1.0)
        yield total
