"""The engine on a GPU at the shapes of Qwen3-0.6B, 4B and 8B, in bf16, with random weights.

`load`: load a version. `decode`: a step of many rows at one context, against the roofline (weights and KV
read once at the bandwidth of a copy); `host_ms` is the time beyond that of its graph replays; the KV is
noise. `versions`: such a step with one and with two versions. `nano`: 256 requests with prompts and outputs
of 100 to 1,024 tokens, prefill included. `unequal`: a step of one long row among many short ones, against one
without it. `prefill`: a prompt as rows of a replayed step, against one whose kernels are launched one by one.
`arrivals`: requests that arrive while others decode; `discarded` is the fraction of the started steps whose
tokens nobody read. `switch`: steps after another version was loaded into a slot.

    python benchmarks/gpu_engine.py [--quick] [--device cpu] [--only 0.6B 8B] [--json FILE]
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from gpu_timing import QWEN3_06B, QWEN3_4B, QWEN3_8B, TINY, Bench, parse_bench, wait_for
from torch import Tensor

from dora.core.types import GroupId, RequestId
from dora.engine.block_manager import num_blocks_for
from dora.engine.cuda_graphs import CUDAGraphRunner
from dora.engine.engine import Engine
from dora.engine.request import PrefillInput, Request, SamplingParams
from dora.engine.runner import ModelRunner
from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout, weight_digest
from report import Row, publish

MODELS = {"0.6B": QWEN3_06B, "4B": QWEN3_4B, "8B": QWEN3_8B}
CELLS = ((1, 1024), (64, 1024), (256, 1024), (64, 8192), (4, 32_768))  # rows, context
NUM_STEPS, NUM_FIRST_STEPS = 32, 6
PARTS = ("load", "decode", "versions", "unequal", "nano", "prefill", "arrivals", "switch")
FLOPS = 780e12  # dense bf16 products, as measured on an H200


class Subject:
    """An engine of a model with versions 0 and 1, and its requests."""

    def __init__(self, bench: Bench, name: str, config: ModelConfig) -> None:
        self.bench, self.name, self.config = bench, name, config
        self.cells = ((1, 20), (3, 24)) if bench.is_tiny else cells_that_fit(bench, config)
        self.num_steps, self.num_first_steps = (1, 2) if bench.is_tiny else (NUM_STEPS, NUM_FIRST_STEPS)
        self.num_nano, self.nano_lengths = (4, (3, 6)) if bench.is_tiny else (256, (100, 1024))
        self.num_tokens = self.num_first_steps + 2 * self.num_steps + 2
        extra = self.num_tokens + 16
        num_tokens = self.num_kv_tokens = max(rows * (context + extra) for rows, context in self.cells)
        max_context = max(context for _, context in self.cells) + extra
        self.engine = Engine(
            config,
            max_rows=max(self.num_nano, *(rows for rows, _ in self.cells)),
            max_context=max(max_context, 2 * self.nano_lengths[1]),
            version_slots=2,
            num_blocks=num_blocks_for(num_tokens) + 8 * self.num_nano,
            prefill_budget=8192,
            device=bench.device,
            dtype="bfloat16" if bench.dtype == torch.bfloat16 else "float32",
            kernels="triton",
        )
        self.engine._workspace.kv.normal_()
        self.weight_bytes = self.engine._workspace.layout.numel * bench.dtype.itemsize
        self._numbers = iter(range(10**9))

    def request(self, prompt_length: int, num_tokens: int, version: int = 0) -> Request:
        """A request with its own prompt and `num_tokens` output tokens."""
        number, vocab = next(self._numbers), self.config.vocab_size
        prompt = tuple((number * 31 + j * 7) % vocab for j in range(prompt_length))
        group, sampling = GroupId(0, number), SamplingParams(1.0, num_tokens)
        return Request(RequestId(0, number, 0), group, prompt, version, number, sampling)

    def roofline_s(self, num_rows: int, context: int, bandwidth: float, num_versions: int = 1) -> float:
        """max((weights + KV) / bandwidth, 2 * parameters * rows / FLOPS), without the embedding table."""
        config, size = self.config, self.bench.dtype.itemsize
        numel = WeightLayout(config).numel
        if not config.tie_word_embeddings:
            numel -= config.vocab_size * config.hidden_size
        kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
        num_bytes = num_versions * numel * size + num_rows * context * kv
        return float(max(num_bytes / bandwidth, 2 * numel * num_rows / FLOPS))

    def step_s(self, rows: tuple[int, ...], context: int) -> tuple[float, float]:
        """Wall time of a step with `rows` rows of each version, and of its graph replay alone."""
        versions = [version for version, num in enumerate(rows) for _ in range(num)]
        return self.requests_s([(context, version) for version in versions])

    def requests_s(self, contexts: list[tuple[int, int]]) -> tuple[float, float]:
        """As `step_s`, of rows with the given (context, version).

        All rows are admitted in one step, without computing their prompts.
        """
        runner, engine, scheduler = self.engine._runner, self.engine, self.engine._scheduler
        assert isinstance(runner, CUDAGraphRunner)
        requests = [
            self.request(max(1, context - self.num_tokens // 2), self.num_tokens, version)
            for context, version in contexts
        ]
        compute, budget = runner.prefill, scheduler._prefill_budget
        runner.prefill, scheduler._prefill_budget = lambda slot, prompts: 0, 10**9  # type: ignore[method-assign]
        engine.submit(requests)
        for _ in range(self.num_first_steps):
            engine.step()
        runner.prefill, scheduler._prefill_budget = compute, budget  # type: ignore[method-assign]
        assert engine.num_running == len(requests)
        wall_s = self.timed_s(engine.step)
        replay = runner._graphs[runner._shape, False, False]
        alone_s = self.timed_s(replay)
        engine.abort([request.id for request in requests])
        return wall_s, alone_s

    def timed_s(self, step: Callable[[], object]) -> float:
        wait_for(self.bench.device)
        started_s = time.perf_counter()
        for _ in range(self.num_steps):
            step()
        wait_for(self.bench.device)
        return (time.perf_counter() - started_s) / self.num_steps


def cells_that_fit(bench: Bench, config: ModelConfig) -> list[tuple[int, int]]:
    """The cells whose KV fits beside two versions of the weights, with a tenth of the memory to spare."""
    if bench.device == "cpu":
        return [*CELLS]
    free, _ = torch.cuda.mem_get_info()
    size = bench.dtype.itemsize
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    left = 0.9 * free - 2 * WeightLayout(config).numel * size
    return [(rows, context) for rows, context in CELLS if rows * (context + 100) * per_token < left]


def random_weights(bench: Bench, config: ModelConfig) -> Tensor:
    """Like `initial_weights`, but generated on the device."""
    layout = WeightLayout(config)
    flat = torch.empty(layout.numel, dtype=bench.dtype, device=bench.device).normal_(0, 0.02)
    for name, view in layout.views(flat).items():
        if name.endswith("norm.weight"):
            view.fill_(1.0)
    return flat


def load(subject: Subject) -> Iterator[Row]:
    """Load both versions from device memory."""
    for version in (0, 1):
        flat = random_weights(subject.bench, subject.config)
        wait_for(subject.bench.device)
        started_s = time.perf_counter()
        subject.engine.load(version, flat)
        loaded_s = time.perf_counter() - started_s
        del flat
    started_s = time.perf_counter()
    weight_digest(subject.engine._workspace.slot_weights(1))
    digest_s = time.perf_counter() - started_s
    yield {"part": "load", "model": subject.name, "gigabytes": subject.weight_bytes / 1e9,
           "load_s": loaded_s, "of_it_digest_s": digest_s}  # fmt: skip


def decode(subject: Subject, bandwidth: float) -> Iterator[Row]:
    for rows, context in subject.cells:
        yield _decoded(subject, "decode", (rows,), context, bandwidth)


def versions(subject: Subject, bandwidth: float) -> Iterator[Row]:
    """64 rows at 8k tokens, of one version and of two versions."""
    rows, context = (2, 20) if subject.bench.is_tiny else (64, 8192)
    for split in ((rows,), (rows // 2, rows - rows // 2), (rows - rows // 4, rows // 4 or 1)):
        yield _decoded(subject, "versions", split, context, bandwidth)


def _decoded(subject: Subject, part: str, rows: tuple[int, ...], context: int, bandwidth: float) -> Row:
    wall_s, alone_s = subject.step_s(rows, context)
    roofline_s = subject.roofline_s(sum(rows), context, bandwidth, len(rows))
    return {
        "part": part,
        "model": subject.name,
        "rows": " + ".join(map(str, rows)),
        "context": context,
        "step_ms": wall_s * 1e3,
        "roofline_ms": roofline_s * 1e3,
        "host_ms": (wall_s - alone_s) * 1e3,
        "tokens_per_s": sum(rows) / wall_s,
        "of_roofline": roofline_s / wall_s,
    }


def unequal(subject: Subject) -> Iterator[Row]:
    """One row at 32k tokens and 127 rows at 1k, over 128 rows at 1k; fewer where the KV has no room."""
    most, short, long = (3, 20, 24) if subject.bench.is_tiny else (128, 1024, 32_768)
    long = min(long, max(context for _, context in subject.cells))
    num = min(most, (subject.num_kv_tokens - long) // (short + subject.num_tokens))
    equal_s, _ = subject.requests_s([(short, 0)] * num)
    unequal_s, _ = subject.requests_s([(long, 0)] + [(short, 0)] * (num - 1))
    yield {
        "part": "unequal",
        "model": subject.name,
        "rows": f"1x{long} + {num - 1}x{short}",
        "equal_ms": equal_s * 1e3,
        "unequal_ms": unequal_s * 1e3,
        "long_row": unequal_s / equal_s,
    }


def nano(subject: Subject) -> Iterator[Row]:
    """Run the requests twice, because the first run captures graphs; reports the second."""
    shortest, longest = subject.nano_lengths
    for repeat in range(1 if subject.bench.is_tiny else 2):
        source = random.Random(repeat)
        lengths = [
            (source.randint(shortest, longest), source.randint(shortest, longest))
            for _ in range(subject.num_nano)
        ]
        engine, num_computed = subject.engine, subject.engine.num_prefilled
        engine.submit([subject.request(*pair) for pair in lengths])
        started_s, num_steps = time.perf_counter(), engine.num_steps
        while not engine.is_idle:
            engine.step()
        wall_s = time.perf_counter() - started_s
    num_tokens = sum(answer for _, answer in lengths)
    yield {"part": "nano", "model": subject.name, "requests": len(lengths),
           "steps": engine.num_steps - num_steps, "prompt_tokens": engine.num_prefilled - num_computed,
           "answer_tokens": num_tokens, "wall_s": wall_s, "tokens_per_s": num_tokens / wall_s}  # fmt: skip


def prefill(subject: Subject) -> Iterator[Row]:
    """Prompts of 100 and of 500 tokens, in an engine without requests."""
    runner = subject.engine._runner
    for num_tokens in (5,) if subject.bench.is_tiny else (100, 500):
        tokens = tuple(j % subject.config.vocab_size for j in range(num_tokens))
        prompt, times = PrefillInput(tokens, 0, [*range(num_blocks_for(num_tokens))]), list[float]()
        for run in (runner._prefill_packed, partial(ModelRunner._prefill_packed, runner)):
            for _ in range(3):
                run(0, [prompt])
            times.append(subject.timed_s(partial(run, 0, [prompt])))
        yield {"part": "prefill", "model": subject.name, "context": num_tokens,
               "replayed_ms": times[0] * 1e3, "launched_ms": times[1] * 1e3,
               "launched_over_replayed": times[1] / times[0]}  # fmt: skip


def arrivals(subject: Subject) -> Iterator[Row]:
    """One request every 4, 2 and 1 steps, each with so many tokens that 64 decode at once."""
    num_rows, num_requests = (2, 3) if subject.bench.is_tiny else (64, 128)
    engine, runner = subject.engine, subject.engine._runner
    assert isinstance(runner, CUDAGraphRunner)
    for interval in (2,) if subject.bench.is_tiny else (4, 2, 1):
        num_started, num_steps, num_decoded = runner.num_started, engine.num_steps, engine.num_decoded
        started_s = time.perf_counter()
        for _ in range(num_requests):
            engine.submit([subject.request(subject.nano_lengths[0], num_rows * interval)])
            for _ in range(interval):
                engine.step()
        while not engine.is_idle:
            engine.step()
        wall_s = time.perf_counter() - started_s
        num_started, num_steps = runner.num_started - num_started, engine.num_steps - num_steps
        yield {"part": "arrivals", "model": subject.name, "arrivals_per_step": 1 / interval,
               "steps": num_steps, "discarded": 1 - num_steps / num_started,
               "tokens_per_s": (engine.num_decoded - num_decoded) / wall_s}  # fmt: skip


def switch(subject: Subject) -> Iterator[Row]:
    """Replace version 1 by version 2: the next steps are replayed, and no graph is captured again."""
    engine, flat = subject.engine, random_weights(subject.bench, subject.config)
    runner = engine._runner
    assert isinstance(runner, CUDAGraphRunner)
    before = runner.num_captured
    engine.drop(1)
    engine.load(2, flat)
    engine.submit([subject.request(4, 3, version=2)])
    times = []
    while not engine.is_idle:
        started_s = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started_s)
    yield {"part": "switch", "model": subject.name, "slowest_step_ms": max(times) * 1e3,
           "graphs_before": before, "graphs_after": runner.num_captured}  # fmt: skip


def measure(bench: Bench, name: str, config: ModelConfig, parts: Collection[str] = PARTS) -> Iterator[Row]:
    """The rows of some parts, for one model; `load` comes first."""
    subject, bandwidth = Subject(bench, name, config), bench.bandwidth()
    measured: dict[str, Callable[[], Iterator[Row]]] = {
        "load": lambda: load(subject),
        "decode": lambda: decode(subject, bandwidth),
        "versions": lambda: versions(subject, bandwidth),
        "unequal": lambda: unequal(subject),
        "nano": lambda: nano(subject),
        "prefill": lambda: prefill(subject),
        "arrivals": lambda: arrivals(subject),
        "switch": lambda: switch(subject),
    }
    for part in PARTS:
        if part in parts:
            yield from measured[part]()


def main() -> None:
    bench = parse_bench(__doc__ or "")
    rows = list[Row]()
    models = {"tiny": TINY} if bench.is_tiny else {name: MODELS[name] for name in bench.only or MODELS}
    for name, config in models.items():
        started_s = time.perf_counter()
        rows += measure(bench, name, config)
        gc.collect()
        if bench.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{name} took {time.perf_counter() - started_s:.1f} s", flush=True)
    ratios: dict[str, float] = {"bandwidth_GB_per_s": bench.bandwidth() / 1e9}
    for name in models:
        own = [row for row in rows if row["model"] == name]
        for row in own:
            if row["part"] == "decode":
                ratios[f"of_roofline_{name}_{row['rows']}x{row['context']}"] = float(row["of_roofline"])
            if row["part"] == "arrivals":
                ratios[f"discarded_{name}_{row['arrivals_per_step']:.2f}_a_step"] = float(row["discarded"])
            if row["part"] == "nano":
                ratios[f"nano_tokens_per_s_{name}"] = float(row["tokens_per_s"])
        one, even, skewed = (float(row["step_ms"]) for row in own if row["part"] == "versions")
        ratios[f"cost_of_2_versions_even_{name}"] = even / one
        ratios[f"cost_of_2_versions_skewed_{name}"] = skewed / one
    publish(bench.options, rows, ratios)


if __name__ == "__main__":
    main()
