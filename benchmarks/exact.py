"""The cost of exact mode: CPU time of engine and trainer with it, over that without.

Engines decode one token per row, or prefill; trainers compute the log-probs of a micro-batch, with and
without gradients. Both modes are measured in turn, so that load on the machine affects both.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from models import DEMO, TWO_MILLION

from dora.core.types import GroupId, RequestId
from dora.engine.batch_invariant import LogprobScorer, self_test
from dora.engine.engine import Engine
from dora.engine.request import Request, SamplingParams
from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout, initial_weights
from dora.trainer.packing import pack
from dora.trainer.policy import BatchLogprobs, Policy
from report import Row, parse_options, publish

SIZES = {"0.5M": DEMO, "2M": TWO_MILLION}
DTYPES = ("float32", "bfloat16")
BATCHES, CONTEXT, NUM_STEPS = (1, 8, 32), 256, 24
NUM_SEQUENCES, PROMPT_TOKENS, ANSWER_TOKENS = 8, 8, 120
Task = Callable[[], object]
Setting = tuple[str, str, str, int]  # what, size, dtype, batch


def request(number: int, length: int, max_tokens: int) -> Request:
    tokens = random.Random(number).choices(range(32), k=length)
    sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens)
    return Request(RequestId(0, number, 0), GroupId(0, number), tuple(tokens), 0, number, sampling)


def make_engine(config: ModelConfig, dtype: str, batch: int, exact: bool) -> Engine:
    engine = Engine(
        config,
        max_rows=batch,
        max_context=CONTEXT,
        version_slots=1,
        dtype=dtype,
        exact=exact,
        prefill_budget=4096,
    )
    engine.load(0, initial_weights(config, seed=1, std=0.1))
    return engine


def decoding(config: ModelConfig, dtype: str, batch: int, exact: bool) -> Task:
    """NUM_STEPS decode steps of rows whose lengths are spread evenly up to the context."""
    engine, longest = make_engine(config, dtype, batch, exact), CONTEXT - NUM_STEPS - 2
    lengths = [1 + (2 * i + 1) * longest // (2 * batch) for i in range(batch)]
    engine.submit([request(i, length, NUM_STEPS + 2) for i, length in enumerate(lengths)])
    while engine.num_waiting:
        engine.step()
    return lambda: [engine.step() for _ in range(NUM_STEPS)]


def prefilling(config: ModelConfig, dtype: str, batch: int, exact: bool) -> Task:
    """Prefill of prompts of half a context, and one decode step."""
    engine = make_engine(config, dtype, batch, exact)
    engine.submit([request(i, CONTEXT // 2, 2) for i in range(batch)])
    return engine.step


def training(config: ModelConfig, dtype: str, batch: int, exact: bool, with_gradient: bool) -> Task:
    """The log-probs of a micro-batch; without exact mode the trainer always computes in fp32."""
    flat = initial_weights(config, seed=1, std=0.1).requires_grad_(with_gradient)
    values: BatchLogprobs | None = None
    if exact:
        scorer = LogprobScorer(config, CONTEXT, 1.0, "auto", dtype)
        values = lambda batch: scorer(flat.detach(), batch.prompts, batch.responses)  # noqa: E731
    policy = Policy(config, WeightLayout(config).views(flat), 1.0, values)
    draw = random.Random(0)
    prompts, answers = (
        [draw.choices(range(32), k=length) for _ in range(batch)] for length in (PROMPT_TOKENS, ANSWER_TOKENS)
    )
    padded = pack(prompts, answers, torch.device("cpu"))

    def run() -> None:
        with torch.set_grad_enabled(with_gradient):
            logprobs, _ = policy.logprobs(padded)
        if with_gradient:
            torch.autograd.backward(logprobs.sum())

    run()
    return run


def cpu_ms(task: Task) -> float:
    started_s = time.process_time()
    task()
    return (time.process_time() - started_s) * 1e3


def makers() -> dict[Setting, Callable[[bool], Task]]:
    """Setting -> factory of the task to measure, given whether it is exact."""
    found: dict[Setting, Callable[[bool], Task]] = {}
    for size, config in SIZES.items():
        for dtype in DTYPES:
            for batch in BATCHES:
                found["decode", size, dtype, batch] = partial(decoding, config, dtype, batch)
            found["prefill", size, dtype, 8] = partial(prefilling, config, dtype, 8)
            for what, with_gradient in (("trainer forward", False), ("trainer forward and backward", True)):
                setting = (what, size, dtype, NUM_SEQUENCES)
                found[setting] = partial(training, config, dtype, NUM_SEQUENCES, with_gradient=with_gradient)
    return found


def main() -> None:
    options = parse_options(__doc__ or "")
    times: dict[Setting, tuple[list[float], list[float]]] = {}
    tasks = makers()
    for _ in range(3 if options.quick else 15):
        for setting, make in tasks.items():
            normal, exact = times.setdefault(setting, ([], []))
            normal.append(cpu_ms(make(False)))
            exact.append(cpu_ms(make(True)))
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for (what, size, dtype, batch), (normal, exact) in times.items():
        num_steps = NUM_STEPS if what == "decode" else 1
        row: dict[str, str | int | float] = {"what": what, "model": size, "dtype": dtype, "batch": batch}
        medians = {"normal_cpu_ms": statistics.median(normal), "exact_cpu_ms": statistics.median(exact)}
        rows.append({**row, **{name: ms / num_steps for name, ms in medians.items()}, "repeats": len(exact)})
        ratio = statistics.median(e / n for e, n in zip(exact, normal, strict=True))
        ratios[f"exact_over_normal_{what}_{size}_{dtype}_batch_{batch}".replace(" ", "_")] = ratio
    for size, config in SIZES.items():
        for dtype in DTYPES:
            rows.append(
                {
                    "self-test": size,
                    "dtype": dtype,
                    "cpu_ms": cpu_ms(partial(self_test, config, "auto", dtype)),
                }
            )
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
