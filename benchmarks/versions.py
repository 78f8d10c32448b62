"""What a decode step of 32 rows costs when they belong to one, two, three or four versions.

Techniques: `shared`, the engine as it is, one pass with a matrix product per version; `separate`,
every version decoded by itself; `interleaved`, shared, but all versions but the newest only in
every fourth step, so that their rows are four times slower. Settings are measured in turn.

    python benchmarks/versions.py [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from models import DEMO, TEN_MILLION, TWO_MILLION
from report import Row, parse_options, publish

from dora.core.records import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.sequence import Request, Sampling
from dora.model.config import ModelConfig
from dora.model.weights import Layout, initial_weights

MODELS = {"0.5M": DEMO, "2M": TWO_MILLION, "10M": TEN_MILLION}
SPLITS = ((32,), (16, 16), (24, 8), (22, 7, 3), (8, 8, 8, 8), (18, 8, 4, 2))  # rows, newest first
CONTEXT, NUM_STEPS, EVERY = 256, 24, 4
Step = Callable[[], object]


def engine_of(model: ModelConfig, split: tuple[int, ...]) -> Engine:
    """An engine that decodes so many rows of each version, the newest first; all are prefilled."""
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
                sampling=Sampling(temperature=1.0, max_tokens=NUM_STEPS + 3),
            )
            for row, version in enumerate(versions)
        ]
    )
    while engine.num_waiting:
        engine.step()
    return engine


def shared(model: ModelConfig, split: tuple[int, ...]) -> Step:
    return engine_of(model, split).step


def separate(model: ModelConfig, split: tuple[int, ...]) -> Step:
    engines = [engine_of(model, (rows,)) for rows in split]
    return lambda: [engine.step() for engine in engines]


def interleaved(model: ModelConfig, split: tuple[int, ...]) -> Step:
    engine = engine_of(model, split)
    newest = [RequestId(0, row, 0) for row in range(split[0])]
    count = 0

    def step() -> None:
        nonlocal count
        if count % EVERY in (0, 1):  # arranging the rows is part of the cost
            engine.rush([] if count % EVERY == 0 else newest)
        engine.step()
        count += 1

    return step


TECHNIQUES = {"shared": shared, "separate": separate, "interleaved": interleaved}


def cpu_ms(step: Step) -> float:
    """Mean CPU time of a step."""
    step()
    began_s = time.process_time()
    for _ in range(NUM_STEPS):
        step()
    return (time.process_time() - began_s) / NUM_STEPS * 1e3


def main() -> None:
    options = parse_options(str(__doc__))
    settings = [
        (model, split, technique)
        for model in MODELS
        for split in SPLITS
        for technique in (TECHNIQUES if len(split) > 1 else ("shared",))
    ]
    times: dict[tuple[str, tuple[int, ...], str], list[float]] = {setting: [] for setting in settings}
    for _ in range(3 if options.quick else 15):
        for model, split, technique in settings:
            step = TECHNIQUES[technique](MODELS[model], split)
            times[model, split, technique].append(cpu_ms(step))
    step_ms = {setting: statistics.median(found) for setting, found in times.items()}
    rows: list[Row] = [
        {
            "model": model,
            "parameters": Layout(MODELS[model]).numel,
            "rows": "/".join(map(str, split)),
            "technique": technique,
            "step_cpu_ms": found,
            "over_one_version": found / step_ms[model, SPLITS[0], "shared"],
        }
        for (model, split, technique), found in step_ms.items()
    ]

    def one_over(model: str, split: tuple[int, ...]) -> float:
        best = min(step_ms[model, split, technique] for technique in ("shared", "separate"))
        return step_ms[model, SPLITS[0], "shared"] / best

    ratios = {"one_over_two_versions_skewed": one_over("0.5M", (24, 8))}
    ratios |= {f"one_over_two_versions_skewed_{model}": one_over(model, (24, 8)) for model in MODELS}
    ratios |= {f"one_over_four_versions_skewed_{model}": one_over(model, (18, 8, 4, 2)) for model in MODELS}
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
