"""The cost of a decode step of 32 rows of one, two, three or four versions.

`shared` is the engine: one pass, with a linear layer per version. `separate` decodes each version by itself.
A last table has the cost of keeping old versions as patches: the fraction of weights that differ after a real
training step, and the time to turn one version into the other in place. Settings are measured in turn.

    python benchmarks/versions.py [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from models import DEMO, TEN_MILLION, TWO_MILLION
from torch import Tensor

from dora.core.types import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.request import Request, SamplingParams
from dora.model.config import ModelConfig
from dora.model.pretrained import load_pretrained
from dora.model.weights import WeightLayout, initial_weights
from dora.trainer.trainer import Sample, Trainer, TrainerSettings
from report import Row, parse_options, publish

START = Path(__file__).parents[1] / "examples" / "gcd-start"
MODELS = {"0.5M": DEMO, "2M": TWO_MILLION, "10M": TEN_MILLION}
SPLITS = ((32,), (16, 16), (24, 8), (22, 7, 3), (8, 8, 8, 8), (18, 8, 4, 2))  # rows, newest first
TECHNIQUES = ("shared", "separate")
CONTEXT, NUM_STEPS = 256, 24
Split = tuple[int, ...]
Setting = tuple[str, Split, str]  # size, rows of each version, technique


def engine_of(model: ModelConfig, split: Split) -> Engine:
    """An engine that decodes `split` rows of each version, newest first; all rows are prefilled."""
    num_versions, source = len(split), random.Random(0)
    engine = Engine(model, max_rows=sum(split), max_context=CONTEXT, version_slots=num_versions)
    versions = [
        version
        for version, rows in zip(reversed(range(num_versions)), split, strict=True)
        for _ in range(rows)
    ]
    for version in range(num_versions):
        engine.load(version, initial_weights(model, seed=version, std=0.1))
    longest = CONTEXT - NUM_STEPS - 4
    engine.submit(
        [
            Request(
                id=RequestId(0, row, 0),
                group=GroupId(0, row),
                prompt_ids=tuple(source.randrange(32) for _ in range(source.randrange(1, longest))),
                version=version,
                seed=row,
                sampling=SamplingParams(temperature=1.0, max_tokens=NUM_STEPS + 3),
            )
            for row, version in enumerate(versions)
        ]
    )
    while engine.num_waiting:
        engine.step()
    return engine


def engines_of(technique: str, model: ModelConfig, split: Split) -> list[Engine]:
    """One engine that decodes these rows, or one for each version."""
    if technique == "separate":
        return [engine_of(model, (num_rows,)) for num_rows in split]
    return [engine_of(model, split)]


def us_per_token(engines: list[Engine]) -> float:
    """CPU time per token, over steps in which no row starts or finishes."""

    def step() -> None:
        for engine in engines:
            engine.step()

    step()
    num_before = sum(engine.num_decoded for engine in engines)
    began_s = time.process_time()
    for _ in range(NUM_STEPS):
        step()
    spent_s = time.process_time() - began_s
    return spent_s / (sum(engine.num_decoded for engine in engines) - num_before) * 1e6


def versions_of(lr: float) -> tuple[Tensor, Tensor]:
    """Flat weights of the demo policy after two training steps and after a third."""
    config, flat = load_pretrained(START)
    trainer = Trainer(config, flat, TrainerSettings(lr=lr, num_steps=100, warmup_steps=0))
    source, before = random.Random(0), flat
    for _ in range(3):
        before = flat.clone()
        answers = [[source.randrange(config.vocab_size) for _ in range(64)] for _ in range(16)]
        advantages = [-1.0, 1.0] * 8
        samples = [Sample(a[:8], a[8:], [-1.0] * 56, g) for a, g in zip(answers, advantages, strict=True)]
        trainer.step(samples)
    return before, flat


def patch_row(lr: float, dtype: torch.dtype) -> Row:
    """The size of a patch between two versions, and the time to apply it compared with a copy."""
    word = torch.int32 if dtype == torch.float32 else torch.int16
    old, new = (flat.to(dtype).view(word) for flat in versions_of(lr))
    at = (old != new).nonzero().flatten()
    patch, slot = old[at] ^ new[at], new.clone()
    flip = statistics.median(cpu_ms(lambda: slot.index_copy_(0, at, slot[at] ^ patch)) for _ in range(11))
    copy = statistics.median(cpu_ms(lambda: slot.copy_(old)) for _ in range(11))
    return {
        "weights": str(dtype).removeprefix("torch."),
        "lr": f"{lr:g}",
        "changed_share": len(at) / len(old),
        "patch_over_copy_bytes": len(at) * (4 + old.itemsize) / old.nbytes,
        "flip_cpu_ms": flip,
        "copy_cpu_ms": copy,
    }


def cpu_ms(action: Callable[[], object]) -> float:
    began_s = time.process_time()
    for _ in range(10):
        action()
    return (time.process_time() - began_s) / 10 * 1e3


def main() -> None:
    options = parse_options(str(__doc__))
    models, splits = (("0.5M", "10M"), (SPLITS[0], SPLITS[2])) if options.quick else (tuple(MODELS), SPLITS)
    settings = [
        (model, split, technique)
        for model in models
        for split in splits
        for technique in (TECHNIQUES if len(split) > 1 else ("shared",))
    ]
    times: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for _ in range(3 if options.quick else 7):
        for model, split, technique in settings:
            engines = engines_of(technique, MODELS[model], split)
            times[model, split, technique].append(us_per_token(engines))
    cost = {setting: statistics.median(median_us) for setting, median_us in times.items()}
    rows: list[Row] = [
        {
            "model": model,
            "parameters": WeightLayout(MODELS[model]).numel,
            "rows": "/".join(map(str, split)),
            "technique": technique,
            "token_cpu_us": median_us,
            "over_one_version": median_us / cost[model, SPLITS[0], "shared"],
        }
        for (model, split, technique), median_us in cost.items()
    ]
    rows += [patch_row(lr, dtype) for dtype in (torch.float32, torch.bfloat16) for lr in (2e-4, 1e-6)]

    def one_over(model: str, split: Split) -> float:
        """The cost of one version over that of the better technique."""
        best = min(cost[model, split, technique] for technique in ("shared", "separate"))
        return cost[model, SPLITS[0], "shared"] / best

    ratios = {"one_over_two_versions_skewed": one_over("0.5M", (24, 8))}
    for split in splits[1:]:
        name = "_".join(map(str, split))
        ratios |= {f"one_over_{name}_rows_{model}": one_over(model, split) for model in models}
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
