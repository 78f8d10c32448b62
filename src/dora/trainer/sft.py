"""Supervised warm start: imitate a teacher's responses.

One step at a time, so that a caller can show how far it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.optimizer import FlatAdamW, learning_rate
from dora.trainer.packing import balanced_micro_batches, pack
from dora.trainer.policy import Policy

Example = tuple[Sequence[int], Sequence[int]]


def imitate(
    config: ModelConfig,
    flat: Tensor,
    batches: Iterable[Sequence[Example]],
    num_steps: int,
    lr: float = 2e-3,
    warmup_steps: int = 20,
    micro_batch_tokens: int = 1024,
) -> Iterator[float]:
    """Train `flat` in place on `num_steps` batches; yields the loss of each step (nats per token).

    An example is (prompt ids, response ids); only response tokens count. The rate decays linearly
    to 0, so what is left after the last step is a finished model, not a snapshot of a noisy one.
    """
    optimizer = FlatAdamW(Layout(config), flat, weight_decay=0.0, betas=(0.9, 0.99))
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
