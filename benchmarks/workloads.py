"""The workloads on which update policies are compared: three length distributions, paced or unpaced engines.

`demo` is the unchanged example. `tail` forces lengths to the distribution of DORA's paper (max/mean about 10,
p99 over 10 times the median), with half of the log-variance common to a group. `light` forces almost equal
lengths, with which asynchrony gains little. A forced length depends on the request only, so all policies
generate the same lengths. Tokens, rewards, gradients and updates are real. P, G and, for paced engines, rows
are fixed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from dora.core.types import GroupId, RequestId
from dora.engine.request import SamplingParams
from dora.runtime.run_setup import RunSetup
from report import Row

EXAMPLE = Path(__file__).parent.parent / "examples" / "gcd.toml"
MEDIAN_TOKENS, SPREAD, SHARE_OF_GROUP, MAX_TOKENS = 20, 1.15, 0.5, 400
LIGHT_TOKENS = (36, 44)
SHARE_MIXED = 0.7  # of groups with different rewards, as in the first 100 steps of the demo
Changes = Mapping[str, object]


def tail_length(request: RequestId) -> int:
    """Tokens of an answer: log-normal, half of the log-variance drawn from the group."""
    own = Random(f"length {request}").gauss()
    spread = math.sqrt(SHARE_OF_GROUP) * _of_group(request.group) + math.sqrt(1 - SHARE_OF_GROUP) * own
    return min(MAX_TOKENS, max(1, round(MEDIAN_TOKENS * math.exp(SPREAD * spread))))


@cache
def _of_group(group: GroupId) -> float:
    """The part of the spread that a group's answers have in common."""
    return Random(f"length {group}").gauss()


def light_length(request: RequestId) -> int:
    """Tokens of an answer, uniform in a narrow range."""
    return Random(f"length {request}").randint(*LIGHT_TOKENS)


def differ(prompt: str, completion: str, **row: object) -> float:
    """A reward that differs among siblings, so that the trainer has every token to train."""
    return float(len(completion) % 2)


def differ_in_some(prompt: str, completion: str, **row: object) -> float:
    """As `differ` in some groups. In the others all rewards are 1 and there is nothing to train."""
    is_mixed = Random(f"mixed {prompt}").random() < SHARE_MIXED
    return differ(prompt, completion) if is_mixed else 1.0


class ForcedTail(RunSetup):
    """Answers end exactly at their `tail_length`."""

    def sampling_of(self, request: RequestId) -> SamplingParams:
        return SamplingParams(self.config.sampling.temperature, tail_length(request), ())


class ForcedLight(RunSetup):
    """Answers end exactly at their `light_length`."""

    def sampling_of(self, request: RequestId) -> SamplingParams:
        return SamplingParams(self.config.sampling.temperature, light_length(request), ())


@dataclass(frozen=True)
class Workload:
    """A length distribution at a pace, with the settings that all policies share."""

    name: str
    pace: str  # of a decode step; "none": as fast as the machine can
    setup_type: type[RunSetup]
    num_steps: int
    changes: Changes
    num_repeats: int = 1  # with seeds 0, 1, ...
    accuracy: float | None = None  # sampled accuracy, to which the time is measured

    @property
    def is_paced(self) -> bool:
        return self.pace != "none"

    @property
    def is_example(self) -> bool:
        """Whether the example's own settings are compared."""
        return not self.changes

    def settings(self) -> dict[str, object]:
        """Configuration keys and values, to which those of a policy are added."""
        paced = (
            {}
            if not self.is_paced
            else {"engine.min_step_time": self.pace, "orchestrator.prioritize_stragglers": "false"}
        )
        return {"run.steps": self.num_steps, "eval.num_prompts": 0, **self.changes, **paced}


def forced(reward: Callable[..., float], batch_size: int, **more: object) -> Changes:
    """Settings of a run with forced lengths."""
    named = {key.replace("__", "."): value for key, value in more.items()}
    return {
        "reward.function": f"{Path(__file__).resolve()}:{reward.__name__}",
        "trainer.batch_size": batch_size,
        "trainer.lr": 1e-6,
        "trainer.micro_batch_tokens": 2048,
        **named,
    }


# As large models are trained: log-probs recomputed by the current policy, a KL loss to the initial one,
# activation checkpointing. Pace and batch are such that the trainer is nearly as slow as all rows together,
# where asynchrony gains most, even with light tails. It gains least with `light` unpaced.
PACED = {
    "engine__num_engines": 4,
    "engine__max_num_seqs": 8,
    "correction__proximal": "recomputed",
    "correction__token": "tis",
    "algorithm__kl_loss_coef": 1e-3,
    "trainer__activation_checkpointing": "true",
}
DEMO = Workload("demo", "none", RunSetup, 100, {}, accuracy=0.75)
TAIL = Workload("tail", "none", ForcedTail, 50, forced(differ_in_some, 4), num_repeats=3)
LIGHT = Workload("light", "none", ForcedLight, 50, forced(differ_in_some, 4), num_repeats=3)
PACED_TAIL = Workload("tail", "9ms", ForcedTail, 20, forced(differ, 16, **PACED), num_repeats=3)
PACED_LIGHT = Workload("light", "9ms", ForcedLight, 20, forced(differ, 16, **PACED))
WORKLOADS = (DEMO, TAIL, LIGHT, PACED_TAIL, PACED_LIGHT)


def shape_of(workload: Workload) -> Row:
    """Statistics of the lengths of a forced workload."""
    draw = tail_length if workload.setup_type is ForcedTail else light_length
    lengths = sorted(draw(RequestId(0, row, k)) for row in range(2000) for k in range(8))
    mean = statistics.fmean(lengths)
    return {
        "lengths": workload.name,
        "mean": mean,
        "median": statistics.median(lengths),
        "p99_over_median": lengths[int(0.99 * len(lengths))] / statistics.median(lengths),
        "max_over_mean": lengths[-1] / mean,
    }
