"""Synchronous RL in one process: sample, score, compute advantages, update the weights, repeat.

    python examples/synchronous.py

A tiny model writes out greatest common divisors by subtraction ("48,36:" -> "12,36;12,24;12,12=12") and makes
mistakes. The reward checks every step. About a minute on one CPU core raises the accuracy from 33 % to 80 %.

`dora train` runs the same algorithm in many processes, where engines sample later batches while the trainer
works. With orchestrator.max_staleness = 0 and engine.exact_logprobs = true it computes the bits of this loop,
which tests/runs/test_equality.py verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from dora.core.types import GroupId, RequestId
from dora.data import gcd
from dora.data.dataset import Cursor, Dataset
from dora.data.tokenizer import Tokenizer
from dora.engine.batch_invariant import LogprobScorer
from dora.engine.engine import Engine
from dora.engine.request import Completion, Request, SamplingParams
from dora.model.pretrained import load_pretrained
from dora.rewards.gcd import reward
from dora.trainer.advantage import grpo_advantages
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

Sampled = dict[GroupId, list[Completion]]  # the responses to each prompt


@dataclass(frozen=True)
class Task:
    """What to train, and the sizes of a step."""

    model: Path  # a Hugging Face folder
    dataset: Dataset
    reward: Callable[[str, str], float]  # of a prompt and a response
    settings: TrainerSettings
    batch_size: int  # prompts per step
    group_size: int  # responses per prompt
    max_response_length: int  # tokens
    kernels: str = "auto"  # of the engine

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.model)


@dataclass(frozen=True)
class Step:
    """The weights [numel] after a step, its responses, and their mean reward."""

    flat: Tensor
    responses: Sampled
    mean_reward: float


def train(task: Task, trainer_class: type[Trainer] = Trainer) -> Iterator[Step]:
    """Train and yield after every step. Tests pass a `trainer_class` with its arithmetic written out."""
    config, flat = load_pretrained(task.model)
    context = config.max_position_embeddings

    # The engine generates tokens with a KV cache and continuous batching. With `exact`, the log-probs of a
    # token do not depend on the rest of the batch, and the scorer gives the trainer the same bits. The
    # importance ratio of a fresh sample is then exactly 1; otherwise it differs from 1 by rounding.
    engine = Engine(
        config, max_rows=64, max_context=context, version_slots=1, kernels=task.kernels, exact=True
    )
    scorer = LogprobScorer(config, context, task.settings.temperature, engine.kernels)
    trainer = trainer_class(config, flat, task.settings, exact_logprobs=scorer)

    cursor = Cursor(len(task.dataset), seed=0)  # shuffled prompts, epoch after epoch
    for version in range(task.settings.num_steps):
        # Weight sync: the engine samples with the weights that the last step left.
        engine.load(version, trainer.flat)

        # Sample until the batch has enough groups. Responses to one prompt with equal rewards have no
        # advantage over each other and no gradient, so other prompts replace them (DAPO's dynamic sampling).
        batch: dict[GroupId, list[Sample]] = {}
        responses: Sampled = {}
        rewards: list[float] = []
        while len(batch) < task.batch_size:
            groups = [GroupId(*cursor.next_group()) for _ in range(task.batch_size - len(batch))]
            prompts = {group: str(task.dataset.prompt(group.row)) for group in groups}
            responses |= sample(task, engine, prompts, task.group_size, version)
            for group, prompt in prompts.items():
                completions = responses[group]
                scores = [task.reward(prompt, task.tokenizer.decode(c.token_ids)) for c in completions]
                rewards += scores
                if len(set(scores)) > 1:
                    pairs = zip(completions, grpo_advantages(scores), strict=True)
                    batch[group] = [
                        Sample(c.prompt_ids.tolist(), c.token_ids.tolist(), c.logprobs.tolist(), a)
                        for c, a in pairs
                    ]
        engine.drop(version)

        # One update: PPO's clipped loss, gradients accumulated over micro-batches, clipping, AdamW.
        trainer.step([s for group in sorted(batch) for s in batch[group]])
        yield Step(trainer.flat, responses, fmean(rewards))


def sample(
    task: Task, engine: Engine, prompts: Mapping[GroupId, str], num_responses: int, version: int
) -> Sampled:
    """`num_responses` responses to each prompt, from the weights of `version`."""
    params = SamplingParams(task.settings.temperature, task.max_response_length, task.tokenizer.stop_ids)
    requests = [
        Request(name, group, tuple(task.tokenizer.encode(prompt)), version, seed_of(name), params)
        for group, prompt in prompts.items()
        for name in (RequestId(*group, sibling) for sibling in range(num_responses))
    ]
    engine.submit(requests)
    completions: dict[RequestId, Completion] = {}
    while not engine.is_idle:  # each engine step decodes a token for every running request
        completions |= {completion.id: completion for completion in engine.step()}
    return {group: [completions[r.id] for r in requests if r.group == group] for group in prompts}


def seed_of(request: RequestId) -> int:
    """A seed that depends on the request alone, so that a repeated run samples the same tokens."""
    return int.from_bytes(blake2b(f"0/{request}".encode(), digest_size=8).digest(), "little")


def accuracy(task: Task, flat: Tensor, dataset: Dataset) -> float:
    """The mean reward of one response to each prompt of `dataset`."""
    config, _ = load_pretrained(task.model)
    engine = Engine(config, max_rows=64, max_context=config.max_position_embeddings, version_slots=1)
    engine.load(0, flat)
    prompts = {GroupId(-1, row): str(dataset.prompt(row)) for row in range(len(dataset))}
    responses = sample(task, engine, prompts, num_responses=1, version=0)
    return fmean(task.reward(prompts[g], task.tokenizer.decode(c.token_ids)) for g, [c] in responses.items())


def main(num_steps: int = 40, num_held_out: int = 256) -> None:
    """Train the demo's model; print the reward of every step, and the accuracy before and after."""
    torch.set_num_threads(1)
    model, dataset = Path(__file__).parent / "gcd-start", Dataset(gcd.training_rows())
    settings = TrainerSettings(lr=1e-3, num_steps=num_steps, warmup_steps=5)
    task = Task(model, dataset, reward, settings, batch_size=8, group_size=8, max_response_length=400)
    held_out, (_, flat) = Dataset(gcd.held_out_rows()).head(num_held_out), load_pretrained(model)
    print(f"accuracy before training: {accuracy(task, flat, held_out):.0%}")
    for number, step in enumerate(train(task), start=1):
        print(f"step {number:2}/{num_steps}  reward {step.mean_reward:.2f}")
        flat = step.flat
    print(f"accuracy after training: {accuracy(task, flat, held_out):.0%}")


if __name__ == "__main__":
    main()
