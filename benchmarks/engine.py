"""CPU time of a decode step: the engine's numba and eager kernels against a naive loop.

The naive loop is what one writes first: padded static cache, one SDPA over it, one sampling
call, one Python append per row. All three draw one token per row at the same positions,
uniform in the context. Settings are measured in turn, so a busy machine disturbs all alike.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from models import DEMO
from report import Row, parse_options, publish
from torch import Tensor
from torch.nn import functional as F

from dora.core.records import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.sequence import Request, Sampling
from dora.model.decoder import forward, logits, rope_tables
from dora.model.weights import Layout, initial_weights

NUM_STEPS = 24  # per repeat
BATCHES, CONTEXTS = (1, 8, 32), (64, 256)
KERNELS = ("numba", "eager")
Step = Callable[[], object]


def lengths(batch: int, context: int) -> list[int]:
    """Prompt lengths, evenly spread so that the context is never exceeded."""
    longest = context - NUM_STEPS - 2
    return [1 + (2 * i + 1) * longest // (2 * batch) for i in range(batch)]


def engine_step(kernels: str, batch: int, context: int, num_old: int = 0) -> Step:
    """Step of an engine whose rows are prefilled; the first `num_old` rows run an older version."""
    engine = Engine(DEMO, max_rows=batch, max_context=context, version_slots=2, kernels=kernels)
    for version in (0, 1):
        engine.load(version, initial_weights(DEMO, seed=version, std=0.1))
    source = random.Random(0)
    requests = [
        Request(
            id=RequestId(0, row, 0),
            group=GroupId(0, row),
            prompt_ids=tuple(source.randrange(32) for _ in range(length)),
            version=0 if row < num_old else 1,
            seed=row,
            sampling=Sampling(temperature=1.0, max_tokens=NUM_STEPS + 2),
        )
        for row, length in enumerate(source.sample(lengths(batch, context), batch))
    ]
    engine.submit(requests)
    engine.step()
    return engine.step


def naive_step(batch: int, context: int) -> Step:
    """Step of the loop with a padded static cache."""
    weights = Layout(DEMO).views(initial_weights(DEMO, seed=1, std=0.1))
    cos, sin = rope_tables(DEMO, context)
    shape = (DEMO.num_hidden_layers, batch, DEMO.num_key_value_heads, context, DEMO.head_dim)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    positions, rows = torch.tensor(lengths(batch, context)), torch.arange(batch)
    answers: list[list[int]] = [[0] for _ in range(batch)]

    def step() -> None:
        mask = torch.arange(context) <= positions[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[layer, rows, :, positions] = k
            values[layer, rows, :, positions] = v
            out = F.scaled_dot_product_attention(
                q[:, :, None], keys[layer], values[layer], mask[:, None, None], enable_gqa=True
            )
            return out[:, :, 0]

        tokens = torch.tensor([answer[-1] for answer in answers])
        hidden = forward(weights, DEMO, tokens, cos[positions], sin[positions], attend)
        drawn = torch.multinomial(logits(weights, hidden).softmax(-1), 1)
        for answer, token in zip(answers, drawn[:, 0].tolist(), strict=True):
            answer.append(token)
        positions.add_(1)

    step()
    return step


def cpu_ms(step: Step) -> float:
    """Mean CPU time of a step."""
    started_s = time.process_time()
    for _ in range(NUM_STEPS):
        step()
    return (time.process_time() - started_s) / NUM_STEPS * 1e3


def medians(makers: dict[tuple[str, int, int], Callable[[], Step]], repeats: int) -> list[Row]:
    """One row per setting: the median, least and largest of `repeats` interleaved measurements."""
    times: dict[tuple[str, int, int], list[float]] = {setting: [] for setting in makers}
    for _ in range(repeats):
        for setting, make in makers.items():
            times[setting].append(cpu_ms(make()))
    return [
        {
            "decoder": name,
            "batch": batch,
            "context": context,
            "step_cpu_ms": statistics.median(found),
            "min_ms": min(found),
            "max_ms": max(found),
            "tokens_per_cpu_s": round(batch / statistics.median(found) * 1e3),
            "repeats": repeats,
        }
        for (name, batch, context), found in times.items()
    ]


def compile_times() -> list[Row]:
    """CPU seconds to import the numba kernels in a fresh process, without and with the cache."""
    code = (
        "import time, numba, dora.engine.workspace; t = time.process_time();"
        "import dora.engine.kernels.fused; print(time.process_time() - t)"
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        for state in ("compiled", "from cache"):
            command = [sys.executable, "-c", code]
            found = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True, cwd=Path(cache)
            )
            rows.append({"numba kernels": state, "cpu_s": float(found.stdout)})
    return rows


def main() -> None:
    options = parse_options(__doc__ or "")
    makers: dict[tuple[str, int, int], Callable[[], Step]] = {}
    for batch in BATCHES:
        for context in CONTEXTS:
            for name in KERNELS:
                makers[name, batch, context] = partial(engine_step, name, batch, context)
            makers["naive", batch, context] = partial(naive_step, batch, context)
    for name in KERNELS:
        makers[f"{name} 24+8 rows of 2 versions", 32, 256] = partial(engine_step, name, 32, 256, num_old=8)
    rows = medians(makers, repeats=5 if options.quick else 21)
    step_ms = {(row["decoder"], row["batch"], row["context"]): float(row["step_cpu_ms"]) for row in rows}
    ratios = {
        f"{name}_speedup_over_naive_batch_{batch}_context_{context}": step_ms["naive", batch, context]
        / step_ms[name, batch, context]
        for name in KERNELS
        for batch in BATCHES
        for context in CONTEXTS
    }
    for name in KERNELS:
        both = step_ms[f"{name} 24+8 rows of 2 versions", 32, 256]
        ratios[f"{name}_cost_of_2_versions_24_8"] = both / step_ms[name, 32, 256]
    publish(options, [*rows, *compile_times()], ratios)


if __name__ == "__main__":
    main()
