"""What a decode step of 32 rows costs when they belong to one, two, three or four versions.

Techniques: `shared`, the engine as it is, one pass with a matrix product per version; `separate`,
every version decoded by itself; `interleaved`, shared, but small old versions decode in every fourth
step only, so that each step has fewer rows: its cost counts per row. A last table says what it would
cost to keep old versions as patches: which weights differ after a real training step, and how long it
takes to turn one version into the other in place. Settings are measured in turn.

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
from report import Row, parse_options, publish
from torch import Tensor

from dora.core.records import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.interleaving import NEVER, Interleaving
from dora.engine.sequence import Request, Sampling
from dora.model.config import ModelConfig
from dora.model.folder import load_folder
from dora.model.weights import Layout, initial_weights
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

START = Path(__file__).parents[1] / "examples" / "gcd-start"
MODELS = {"0.5M": DEMO, "2M": TWO_MILLION, "10M": TEN_MILLION}
SPLITS = ((32,), (16, 16), (24, 8), (22, 7, 3), (8, 8, 8, 8), (18, 8, 4, 2))  # rows, newest first
TECHNIQUES = ("shared", "separate", "interleaved")
CONTEXT, NUM_STEPS, EVERY = 256, 24, 4
Split = tuple[int, ...]
Setting = tuple[str, Split, str]  # size, rows of each version, technique


def engine_of(model: ModelConfig, split: Split, interleaving: Interleaving = NEVER) -> Engine:
    """An engine that decodes so many rows of each version, the newest first; all are prefilled."""
    num_versions, source = len(split), random.Random(0)
    engine = Engine(
        model,
        max_rows=sum(split),
        max_context=CONTEXT,
        version_slots=num_versions,
        interleaving=interleaving,
    )
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
                sampling=Sampling(temperature=1.0, max_tokens=NUM_STEPS + 3),
            )
            for row, version in enumerate(versions)
        ]
    )
    while engine.num_waiting:
        engine.step()
    return engine


def engines_of(technique: str, model: ModelConfig, split: Split) -> list[Engine]:
    """What decodes these rows; one engine, or one for each version."""
    if technique == "separate":
        return [engine_of(model, (num_rows,)) for num_rows in split]
    never_urgent = Interleaving(interval=EVERY, urgent_age=len(split))
    return [engine_of(model, split, never_urgent if technique == "interleaved" else NEVER)]


def us_per_token(engines: list[Engine]) -> float:
    """CPU time of a token, over steps in which no row begins or ends."""

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
    """Flat weights of the demo's policy after two training steps, and after a third."""
    config, flat = load_folder(START)
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
    """What a patch between two versions weighs, and how long applying it takes beside a plain copy."""
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
    cost = {setting: statistics.median(found) for setting, found in times.items()}
    rows: list[Row] = [
        {
            "model": model,
            "parameters": Layout(MODELS[model]).numel,
            "rows": "/".join(map(str, split)),
            "technique": technique,
            "token_cpu_us": found,
            "over_one_version": found / cost[model, SPLITS[0], "shared"],
        }
        for (model, split, technique), found in cost.items()
    ]
    rows += [patch_row(lr, dtype) for dtype in (torch.float32, torch.bfloat16) for lr in (2e-4, 1e-6)]

    def one_over(model: str, split: Split) -> float:
        """Both decode all rows in every step."""
        best = min(cost[model, split, technique] for technique in ("shared", "separate"))
        return cost[model, SPLITS[0], "shared"] / best

    ratios = {"one_over_two_versions_skewed": one_over("0.5M", (24, 8))}
    for split in splits[1:]:
        name = "_".join(map(str, split))
        ratios |= {f"one_over_{name}_rows_{model}": one_over(model, split) for model in models}
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
