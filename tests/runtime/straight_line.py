"""Reinforcement learning in a straight line: sample a batch, judge it, take one step, begin again.

One process, one policy, nobody to wait for, and no part of DORA that decides anything: no orchestrator,
no trainer. The loss is REINFORCE's, written out: for fresh samples it has the gradient of PPO's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from dora.core.records import GroupId, RequestId
from dora.data.dataset import Cursor, Dataset
from dora.data.tokenizer import Tokenizer
from dora.engine.engine import Engine
from dora.engine.sequence import Request, Sampling
from dora.model.folder import load_folder
from dora.model.weights import Layout
from dora.trainer.packing import balanced_micro_batches, pack
from dora.trainer.policy import Policy

Ids = Sequence[int]
Sample = tuple[Ids, Ids, float]  # prompt, answer, advantage


@dataclass(frozen=True)
class Task:
    """What to train and how; what is not here is as the configuration's defaults have it."""

    model: Path
    prompts: Path
    reward: Callable[[str, str], float]
    steps: int
    batch_size: int
    group_size: int
    max_tokens: int
    lr: float
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    micro_batch_tokens: int


@dataclass
class Result:
    """The last weights [numel], and the tokens of every answer on the way there."""

    flat: Tensor
    answers: dict[str, list[int]]  # by the names of requests


def train(task: Task) -> Result:
    """All steps. Prompts whose answers are all equally good teach nothing, so the next one takes its turn."""
    config, flat = load_folder(task.model)
    engine = Engine(config, max_rows=16, max_context=64, version_slots=1, kernels="eager", exact=True)
    tokenizer, dataset, told = Tokenizer(task.model), Dataset.from_path(task.prompts), Result(flat, {})
    cursor, gradient = Cursor(len(dataset), seed=0), torch.zeros_like(flat)
    whole = flat.detach().requires_grad_()  # the same memory: one step of AdamW is one operation
    whole.grad = gradient
    adamw = torch.optim.AdamW([whole], weight_decay=task.weight_decay, fused=True)
    policy = Policy(config, {n: v.requires_grad_() for n, v in Layout(config).views(flat.detach()).items()})
    for name, view in Layout(config).views(gradient).items():
        policy.weights[name].grad = view
    for step in range(task.steps):
        engine.load(step, flat)
        batch: dict[GroupId, list[Sample]] = {}
        while len(batch) < task.batch_size:
            group = GroupId(*cursor.take())
            text = str(dataset.prompt(group.row))
            prompt = tokenizer.encode(text)
            found = _sample(engine, task, group, step, prompt, tokenizer.stop_ids)
            told.answers |= {f"{group}/{k}": ids for k, ids in enumerate(found)}
            rewards = [task.reward(text, tokenizer.decode(ids)) for ids in found]
            if len({*rewards}) > 1:
                batch[group] = [(prompt, *pair) for pair in zip(found, _advantages(rewards), strict=True)]
        engine.drop(step)
        samples = [sample for group in sorted(batch) for sample in batch[group]]
        for part in _micro_batches([sample for sample in samples if sample[-1]], task.micro_batch_tokens):
            prompts, answers, advantages = zip(*part, strict=True)
            logprobs, _ = policy.logprobs(pack(prompts, answers, flat.device))
            weights = [a for answer, a in zip(answers, advantages, strict=True) for _ in answer]
            torch.autograd.backward(-(torch.tensor(weights) * logprobs).sum())
        gradient /= sum(len(answer) for _, answer, _ in samples)
        gradient *= min(1.0, task.max_grad_norm / _norm(gradient))
        adamw.param_groups[0]["lr"] = _learning_rate(task, step)
        adamw.step()
        gradient.zero_()
    return told


def _sample(
    engine: Engine, task: Task, group: GroupId, version: int, prompt: Ids, stop_ids: tuple[int, ...]
) -> list[list[int]]:
    """Answers of all siblings of a group."""
    sampling = Sampling(1.0, task.max_tokens, stop_ids)
    found: dict[RequestId, list[int]] = {}
    names = [RequestId(*group, k) for k in range(task.group_size)]
    seeds = [int.from_bytes(blake2b(f"0/{n}".encode(), digest_size=8).digest(), "little") for n in names]
    engine.submit(
        [Request(n, group, tuple(prompt), version, s, sampling) for n, s in zip(names, seeds, strict=True)]
    )
    while not engine.idle:
        found |= {done.id: done.token_ids for done in engine.step()}
    return [found[name] for name in names]


def _advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO's: rewards of one prompt less their mean, in deviations."""
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (deviation + 1e-6) for r in rewards]


def _norm(gradient: Tensor) -> float:
    """In fp64, where it sums over more than a piece; the trainer has the same pieces."""
    norms = torch.stack([piece.norm() for piece in gradient.split(2**16)])
    return math.sqrt(norms.double().square().sum())


def _learning_rate(task: Task, step: int) -> float:
    """Up to the peak in equal steps, then down to 0 at the end."""
    if step < task.warmup_steps:
        return task.lr * (step + 1) / (task.warmup_steps + 1)
    return task.lr * ((task.steps - step) / (task.steps - task.warmup_steps))


def _micro_batches(samples: Sequence[Sample], num_tokens: int) -> list[list[Sample]]:
    """Which share a forward pass: gradients are rounded as they are summed, so the order matters."""
    prompts, lengths = [s[0] for s in samples], [len(s[0]) + len(s[1]) for s in samples]
    return [[samples[i] for i in part] for part in balanced_micro_batches(prompts, lengths, num_tokens)]
