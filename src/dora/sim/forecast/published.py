"""What the papers print, as rows to hold a forecast against.

DORA: arXiv 2604.26256, dense 32B on H800s, 512 prompts x 16 answers a step, at most 30K tokens each. Minutes
of a step, tokens in a second, millions of tokens a step, and minutes of it that are not rollout waited for.
AsyncFlow: arXiv 2507.01663.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """One row of DORA's tables; None where nothing is printed or follows from what is."""

    policy: str
    gpus: int
    step_min: float
    tokens_per_s: float
    exposed_min: float | None = None

    @property
    def other_min(self) -> float:
        assert self.exposed_min is not None
        return self.step_min - self.exposed_min

    @property
    def mega_tokens(self) -> float:
        return self.step_min * 60 * self.tokens_per_s / 1e6


DORA = (
    Published("sync", 64, 22.91, 14_143, 14.9),
    Published("sync", 128, 20.23, 16_070, 14.8),
    Published("partial", 64, 17.38, 19_872, 8.0),
    Published("partial", 128, 13.95, 30_752, 7.3),
    Published("one_step", 64, 22.94, 14_141, 7.6),
    Published("one_step", 128, 14.0, 23_221),
    Published("dora", 64, 14.67, 23_327, 1.8),
    Published("dora", 128, 10.46, 34_135, 2.5),
)
FITTED_ON = ("sync", "partial")
KV_REUSE = 183 / 166  # time of rollout without, over with
OVERHEADS = {  # GPUs -> shares of the time: loading weights and what goes with it, requests on their way
    64: {"load_share": 0.00414, "copy_share": 0.03627},
    128: {"load_share": 0.01519, "copy_share": 0.02123},
}
Range = tuple[float, float]
# Over a tuned synchronous run on 4,096 accelerators, at most 64K tokens; steps, of all production jobs.
MOE: dict[str, float | Range] = {"reasoning": 3.6, "agents": 6.2, "step": (2.0, 4.0)}
ASYNCFLOW: dict[tuple[str, int], float | Range] = {  # (model, NPUs) -> times the colocated baseline's speed
    ("qwen2.5-7b", 32): 1.334,  # printed for 32 NPUs, without the model
    ("qwen2.5-7b", 256): 2.03,
    ("qwen2.5-7b", 512): 1.76,
    ("qwen2.5-32b", 512): 1.82,
}
ASYNCFLOW_MEAN = 1.59
ASYNCFLOW_LINEAR = {"qwen2.5-7b": 0.65, "qwen2.5-32b": 0.88}  # speed for 16 times the NPUs, over 16
ASYNCFLOW_PARTS = {"streamed": 2.01, "deferred": 2.74}  # 7B on 512 NPUs, over tasks one after the other


def row(policy: str, gpus: int) -> Published:
    return next(found for found in DORA if (found.policy, found.gpus) == (policy, gpus))
