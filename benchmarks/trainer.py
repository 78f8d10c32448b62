"""One training step on one CPU thread: DORA's trainer, a padded loop and TRL's trainer on the same samples.

Lengths have a heavy tail: the 99th percentile is 5.4 times the median, as in the demo's task. The padded loop
is transformers with AdamW and a fixed number of sequences per micro-batch. TRL's GRPOTrainer gets the samples
in place of generating them. DORA's micro-batches have as many tokens as those sequences have on average. Each
trainer is a process; they step in turn, and figures are medians. Ratios compare CPU time. `flop_share` is the
fraction of the machine's matrix-product throughput that goes into tokens, each computed once. Results are
published only if DORA's gradient norms equal those of the padded loop: to 1e-3 in fp32, to 0.05 in bf16. TRL
reports no norm.

    python benchmarks/trainer.py [--quick] [--json FILE] [--trl-python PYTHON]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from child import Child
from limits import Limits, measure_limits
from models import DEMO, SIXTY_MILLION, TEN_MILLION

from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import WeightLayout, initial_weights
from report import Row, make_parser, options_of, publish

MODELS = {"0.5M": DEMO, "10M": TEN_MILLION, "60M": SIXTY_MILLION}
NUM_GROUPS = {"0.5M": 16, "10M": 8, "60M": 4}
NUM_GROUPS_QUICK = {"0.5M": 4, "10M": 1}
GROUP_SIZE = 8  # also the sequences of a micro-batch
MEDIAN, SIGMA, LONGEST = 60, 0.72, 512  # response tokens: a lognormal distribution
PROMPT_TOKENS = 8, 24  # from, to
TINY = replace(DEMO, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dora": ("dora", {}),
    "dora, checkpointing": ("dora", {"activation_checkpointing": True}),
    "dora, bfloat16": ("dora", {"dtype": "bfloat16"}),
    "padded loop": ("plain", {}),
    "trl": ("trl", {}),
}
NORM_TOLERANCES = {"dora": 1e-3, "dora, checkpointing": 1e-3, "dora, bfloat16": 0.05}  # relative
QUICK_VARIANTS = {"0.5M": {"dora", "padded loop", "trl"}, "10M": {"dora", "padded loop"}}

Sample = tuple[list[int], list[int], float]


class Cost(NamedTuple):
    """Medians over the steps."""

    step_s: float
    step_cpu_s: float
    grad_norm: float
    peak_bytes: float


class Task(NamedTuple):
    """A batch for a model."""

    model: str
    samples: list[Sample]

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.model]

    @property
    def lengths(self) -> list[int]:
        return [len(prompt) + len(response) for prompt, response, _ in self.samples]

    @property
    def sizes(self) -> dict[str, int]:
        """Sequences and tokens of a micro-batch; the longest sequence fits."""
        tokens = max(*self.lengths, GROUP_SIZE * sum(self.lengths) // len(self.lengths))
        return {"sequences": GROUP_SIZE, "tokens": tokens}

    def flop_share(self, cost: Cost, limits: Limits) -> float:
        """6 FLOP per parameter and token: prompts once a group, the head for responses only; no attention."""
        head = self.config.vocab_size * self.config.hidden_size
        responses = sum(len(response) for _, response, _ in self.samples)
        prompts = (sum(self.lengths) - responses) / GROUP_SIZE
        flops = 6 * (WeightLayout(self.config).numel - head) * (responses + prompts) + 6 * head * responses
        return flops / cost.step_cpu_s / limits.flops


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--trl-python", type=Path, metavar="PYTHON", help="one that can import trl")
    args = parser.parse_args()
    options, limits = options_of(args), measure_limits()
    rows: list[Row] = [{"limit": "fp32 products, GFLOP/s", "one thread": limits.flops / 1e9}]
    ratios: dict[str, float] = {}
    for task in map(make_task, ("0.5M", "10M") if options.quick else MODELS, repeat(options.quick)):
        costs = measure(task, options.quick, args.trl_python)
        check_norms(costs)
        rows += [row_of(task, trainer, cost, limits) for trainer, cost in costs.items()]
        ratios |= ratios_of(task, costs, limits)
    if args.trl_python is None:
        rows.append({"trainer": "trl", "skipped": "all", "reason": "no --trl-python was given"})
    publish(options, rows, ratios)


def make_task(model: str, quick: bool) -> Task:
    """Groups of siblings, each with an advantage; a quarter of them or fewer with --quick."""
    source, vocab_size = random.Random(0), MODELS[model].vocab_size

    def ids(num: int) -> list[int]:
        return [source.randrange(vocab_size) for _ in range(num)]

    samples = []
    for _ in range(NUM_GROUPS_QUICK[model] if quick else NUM_GROUPS[model]):
        prompt = ids(source.randint(*PROMPT_TOKENS))
        for _ in range(GROUP_SIZE):
            length = min(LONGEST, max(4, round(MEDIAN * source.lognormvariate(0.0, SIGMA))))
            samples.append((prompt, ids(length), source.choice([-1.0, -0.5, 0.5, 1.0])))
    return Task(model, samples)


def measure(task: Task, quick: bool, trl_python: Path | None) -> dict[str, Cost]:
    """Medians of steps taken in turn, without the first; --quick leaves one step."""
    num_steps = 2 if quick else 3 if task.model == "60M" else 6
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for path, config in ((folder, task.config), (folder / "tiny", TINY)):
            save_pretrained(path, config, initial_weights(config, seed=0))
        children: dict[str, Child] = {}
        for trainer, (kind, settings) in VARIANTS.items():
            python = trl_python if kind == "trl" else Path(sys.executable)
            if python is None or (quick and trainer not in QUICK_VARIANTS[task.model]):
                continue
            children[trainer] = Child(
                python, "trainer_child.py", [kind, str(folder), json.dumps({**task.sizes, **settings})]
            )
            stack.callback(children[trainer].stop)
        costs: dict[str, list[Cost]] = {trainer: [] for trainer in children}
        for _ in range(num_steps):
            for trainer, child in children.items():
                costs[trainer].append(Cost(**child.request(task.samples)))
    return {
        trainer: Cost(*(statistics.median(column) for column in zip(*own[1:], strict=True)))
        for trainer, own in costs.items()
    }


def check_norms(costs: Mapping[str, Cost]) -> None:
    """Compare times only of trainers that compute the same gradient."""
    expected = costs["padded loop"].grad_norm
    for trainer, cost in costs.items():
        if trainer in NORM_TOLERANCES:
            gap = abs(cost.grad_norm / expected - 1)
            assert gap <= NORM_TOLERANCES[trainer], f"{trainer}: norm {cost.grad_norm}, not {expected}"


def row_of(task: Task, trainer: str, cost: Cost, limits: Limits) -> Row:
    num_tokens = sum(task.lengths)
    return {
        "model": task.model,
        "trainer": trainer,
        "tokens": num_tokens,
        "step_s": cost.step_s,
        "step_cpu_s": cost.step_cpu_s,
        "tokens_per_cpu_s": round(num_tokens / cost.step_cpu_s),
        "flop_share": task.flop_share(cost, limits),
        "peak_MB": cost.peak_bytes / 1e6,
        "grad_norm": cost.grad_norm,
    }


def ratios_of(task: Task, costs: Mapping[str, Cost], limits: Limits) -> dict[str, float]:
    """Keys of the 0.5M model have no suffix."""
    suffix = "" if task.model == "0.5M" else f"_{task.model}"
    own, padded = costs["dora"], costs["padded loop"]
    ratios = {
        f"vs_padded_loop{suffix}": padded.step_cpu_s / own.step_cpu_s,
        f"peak_memory_over_padded{suffix}": own.peak_bytes / padded.peak_bytes,
        f"flop_share{suffix}": task.flop_share(own, limits),
    }
    if "trl" in costs:
        ratios[f"vs_trl{suffix}"] = costs["trl"].step_cpu_s / own.step_cpu_s
    return ratios


if __name__ == "__main__":
    main()
