"""Figures that the papers print, to compare forecasts with.

DORA: arXiv 2604.26256, dense 32B on H800s, 512 prompts x 16 answers a step, at most 30K tokens each.
AsyncFlow: arXiv 2507.01663.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One row of DORA's tables."""

    policy: str
    num_gpus: int
    step_min: float
    tokens_per_s: float
    exposed_min: float | None = None  # of a step, in which the trainer waits for rollout; None: not printed

    @property
    def other_min(self) -> float:
        """Minutes of a step beside exposed rollout."""
        assert self.exposed_min is not None
        return self.step_min - self.exposed_min

    @property
    def mega_tokens(self) -> float:
        """Millions of tokens of a step."""
        return self.step_min * 60 * self.tokens_per_s / 1e6


DORA = (
    PublishedRow("sync", 64, 22.91, 14_143, 14.9),
    PublishedRow("sync", 128, 20.23, 16_070, 14.8),
    PublishedRow("partial", 64, 17.38, 19_872, 8.0),
    PublishedRow("partial", 128, 13.95, 30_752, 7.3),
    PublishedRow("one_step", 64, 22.94, 14_141, 7.6),
    PublishedRow("one_step", 128, 14.0, 23_221),
    PublishedRow("dora", 64, 14.67, 23_327, 1.8),
    PublishedRow("dora", 128, 10.46, 34_135, 2.5),
)
FITTED_POLICIES = ("sync", "partial")  # whose rows the unknown inputs are fitted to
KV_REUSE = 183 / 166  # time of rollout without KV reuse, over with it
OVERHEADS = {  # GPUs -> fractions of the time: loads of weights, and copies of migrating requests
    64: {"load_share": 0.00414, "copy_share": 0.03627},
    128: {"load_share": 0.01519, "copy_share": 0.02123},
}
Range = tuple[float, float]
# Speedup over a tuned synchronous run on 4,096 accelerators, at most 64K tokens; "step": all production jobs.
MOE: dict[str, float | Range] = {"reasoning": 3.6, "agents": 6.2, "step": (2.0, 4.0)}
ASYNCFLOW: dict[tuple[str, int], float | Range] = {  # (model, NPUs) -> speedup over the colocated baseline
    ("qwen2.5-7b", 32): 1.334,  # printed for 32 NPUs, without the model
    ("qwen2.5-7b", 256): 2.03,
    ("qwen2.5-7b", 512): 1.76,
    ("qwen2.5-32b", 512): 1.82,
}
ASYNCFLOW_MEAN = 1.59
ASYNCFLOW_LINEARITY = {"qwen2.5-7b": 0.65, "qwen2.5-32b": 0.88}  # speedup by 16 times the NPUs, over 16
ASYNCFLOW_PARTS = {"streamed": 2.01, "deferred": 2.74}  # 7B on 512 NPUs: speedup over sequential tasks


def published_row(policy: str, num_gpus: int) -> PublishedRow:
    return next(row for row in DORA if (row.policy, row.num_gpus) == (policy, num_gpus))
