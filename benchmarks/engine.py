"""Decoding on one CPU thread: the engine against a bare loop, transformers, vLLM and the machine's limits.

Rows are at different places of a context, as in a rollout: prompts are evenly spread up to it (`spread`),
or all of its length (`equal`). Decoders are measured in turn, setting by setting, so that a busy machine
disturbs all alike; figures are medians. A step counts while all rows decode; `tokens_per_s` is that of such
steps, `mixed_tokens_per_s` that of the whole, prompts included. Ratios compare CPU time per step.

    python benchmarks/engine.py [--quick] [--json FILE] [--vllm-python PYTHON]
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from baselines import Bare, Prompts, Run, Timing, Transformers, VllmChild
from limits import Limits, measure_limits, roofline_s
from models import DEMO, TEN_MILLION, TWO_MILLION
from report import Row, make_parser, options_of, publish
from torch import Tensor

from dora.core.records import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.sequence import Request, Sampling
from dora.model.config import ModelConfig
from dora.model.folder import save_folder
from dora.model.weights import initial_weights

MODELS = {"0.5M": DEMO, "2M": TWO_MILLION, "10M": TEN_MILLION}
BATCHES, CONTEXTS = (1, 8, 32, 128), (64, 256, 1024, 4096)
MAIN = (32, 256)  # batch and context of the ratios
NUM_TOKENS = 33  # per row and run: one from the prompt, and 32 steps
MANY_TOKENS, FEWER_TOKENS = 2**13, 2**15  # batch times context; others than these up to the latter
MOST_TOKENS = {"engine": 2**17, "bare": 2**17, "engine, eager": MANY_TOKENS}
NAMES = {
    "bare": "bare",
    "generate": "generate",
    "continuous batching": "continuous_batching",
    "vllm": "vllm_cpu",
}


class Setting(NamedTuple):
    """What is decoded."""

    model: str
    batch: int
    context: int
    lengths: str = "spread"

    @property
    def num_tokens(self) -> int:
        return self.batch * self.context

    def prompt_lengths(self) -> list[int]:
        longest = self.context - NUM_TOKENS
        if self.lengths == "equal":
            return [longest] * self.batch
        spread = [1 + (2 * i + 1) * (longest - 1) // (2 * self.batch) for i in range(self.batch)]
        return random.Random(0).sample(spread, self.batch)

    def prompts(self, run: int) -> Prompts:
        """Others in every run, so that no decoder knows them already."""
        source = random.Random(run)
        return [[source.randrange(32) for _ in range(length)] for length in self.prompt_lengths()]


class OwnEngine:
    """The engine, with kernels by name."""

    def __init__(self, config: ModelConfig, flat: Tensor, setting: Setting, kernels: str) -> None:
        self._engine = Engine(
            config,
            max_rows=setting.batch,
            max_context=setting.context,
            version_slots=1,
            prefill_budget=setting.num_tokens,
            kernels=kernels,
        )
        self._engine.load(0, flat)
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> Timing:
        engine, self._num_runs = self._engine, self._num_runs + 1
        sampling = Sampling(temperature=1.0, max_tokens=num_tokens)
        began = time.perf_counter(), time.process_time()
        engine.submit(
            [
                Request(
                    RequestId(self._num_runs, i, 0), GroupId(self._num_runs, i), tuple(prompt), 0, i, sampling
                )
                for i, prompt in enumerate(prompts)
            ]
        )
        while engine.num_waiting:
            engine.step()
        first = time.perf_counter(), time.process_time()
        num_steps = 0
        while not engine.idle:
            engine.step()
            num_steps += 1
        done = time.perf_counter(), time.process_time()
        return Timing(
            *((end - start) / num_steps for start, end in zip(first, done, strict=True)),
            *(end - start for start, end in zip(began, done, strict=True)),
        )


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="one that can import vllm")
    given = parser.parse_args()
    options, limits = options_of(given), measure_limits()
    rows: list[Row] = [
        {"limit": "memory, GB/s", "one thread": limits.bandwidth / 1e9},
        {"limit": "fp32 products, GFLOP/s", "one thread": limits.flops / 1e9},
    ]
    found: dict[tuple[Setting, str], Timing] = {}
    for model in ("0.5M", "10M") if options.quick else MODELS:
        rows += measure_model(model, options.quick, given.vllm_python, limits, found)
    publish(options, rows, ratios_of(found, limits))


def measure_model(
    model: str, quick: bool, python: Path | None, limits: Limits, found: dict[tuple[Setting, str], Timing]
) -> Iterator[Row]:
    """Rows of all settings of a model; medians go to `found`."""
    with ExitStack() as stack:
        settings = settings_of(model, quick)
        makers = decoders(stack, model, settings, python)
        if "vllm" not in makers:
            yield skipped(model, "vllm", "all", "there is no --vllm-python")
        for setting in settings:
            wanted = [name for name in makers if not quick or is_quick(setting, name)]
            small = [name for name in wanted if setting.num_tokens <= MOST_TOKENS.get(name, FEWER_TOKENS)]
            for name in wanted:
                if name not in small:
                    where = f"batch {setting.batch}, context {setting.context}"
                    yield skipped(model, name, where, "so many tokens of prompts take too long")
            runs = {name: makers[name](setting) for name in small}
            for name, timing in measure(runs, setting, quick).items():
                found[setting, name] = timing
                yield row_of(setting, name, timing, limits)


def decoders(
    stack: ExitStack, model: str, settings: list[Setting], python: Path | None
) -> dict[str, Callable[[Setting], Run]]:
    """By name, what makes one for a setting; all of them have the same weights."""
    config = config_of(model)
    flat = initial_weights(config, seed=1, std=0.1)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    save_folder(folder, config, flat)
    bare, transformers = Bare(config, flat), Transformers(folder)
    makers: dict[str, Callable[[Setting], Run]] = {
        "engine": lambda setting: OwnEngine(config, flat, setting, "auto").run,
        "engine, eager": lambda setting: OwnEngine(config, flat, setting, "eager").run,
        "bare": lambda setting: bare.run,
        "generate": lambda setting: transformers.generate,
        "continuous batching": lambda setting: transformers.batch_continuously,
    }
    if python is not None:
        largest = [setting for setting in settings if setting.num_tokens <= FEWER_TOKENS]
        sizes = (
            max(setting.context for setting in largest),
            max(setting.batch for setting in largest),
            max(sum(setting.prompt_lengths()) for setting in largest),
        )
        child = VllmChild(python, folder, *sizes)
        stack.callback(child.stop)
        makers["vllm"] = lambda setting: child.run
    return makers


def is_quick(setting: Setting, decoder: str) -> bool:
    """Whether --quick has time for it: all in the main setting of the smallest model, else few."""
    is_main = (setting.batch, setting.context, setting.lengths) == (*MAIN, "spread")
    if setting.model == "0.5M" and is_main:
        return True
    return decoder in ("engine", "bare")


def config_of(model: str) -> ModelConfig:
    return replace(MODELS[model], max_position_embeddings=max(CONTEXTS))


def settings_of(model: str, quick: bool) -> list[Setting]:
    """The main one first, and the same with equal lengths."""
    first = [Setting(model, *MAIN), Setting(model, *MAIN, "equal")]
    if quick:
        return first[:1] if model == "10M" else [*first, Setting(model, 8, 1024)]
    others = [Setting(model, *sizes) for sizes in product(BATCHES, CONTEXTS) if sizes != MAIN]
    return first + others


def measure(decoders: dict[str, Run], setting: Setting, quick: bool) -> dict[str, Timing]:
    """Medians of interleaved runs, the first of which does not count; large ones are few."""
    num_runs = 4 if quick else 6 if setting.num_tokens <= MANY_TOKENS else 3
    timings: dict[str, list[Timing]] = {name: [] for name in decoders}
    for number in range(num_runs):
        for name, run in decoders.items():
            timings[name].append(run(setting.prompts(number), NUM_TOKENS))
    return {
        name: Timing(
            statistics.median(timing.step_s for timing in own),
            statistics.median(timing.step_cpu_s for timing in own),
            statistics.median(timing.whole_s for timing in own),
            statistics.median(timing.whole_cpu_s for timing in own),
        )
        for name, (_, *own) in timings.items()
    }


def row_of(setting: Setting, decoder: str, timing: Timing, limits: Limits) -> Row:
    num_tokens = setting.batch * NUM_TOKENS
    return {
        **setting._asdict(),
        "decoder": decoder,
        "step_ms": timing.step_s * 1e3,
        "step_cpu_ms": timing.step_cpu_s * 1e3,
        "tokens_per_s": round(setting.batch / timing.step_s),
        "mixed_tokens_per_s": round(num_tokens / timing.whole_s) if timing.whole_s else "-",
        "roofline_share": roofline_share(setting, timing, limits),
    }


def roofline_share(setting: Setting, timing: Timing, limits: Limits) -> float:
    """Least time of a step over that it took, for the contexts in the middle of the run."""
    lengths = [length + NUM_TOKENS // 2 for length in setting.prompt_lengths()]
    return roofline_s(config_of(setting.model), lengths, limits) / timing.step_cpu_s


def skipped(model: str, decoder: str, where: str, reason: str) -> Row:
    return {"model": model, "decoder": decoder, "skipped": where, "reason": reason}


def ratios_of(found: dict[tuple[Setting, str], Timing], limits: Limits) -> dict[str, float]:
    """By how much the engine is faster, at the main batch and context; the 0.5M model has no suffix."""
    ratios = {}
    for (setting, name), timing in found.items():
        if (setting.batch, setting.context) != MAIN:
            continue
        suffix = "" if setting.model == "0.5M" else f"_{setting.model}"
        suffix += "_equal_lengths" if setting.lengths == "equal" else ""
        if name in NAMES:
            ratios[f"vs_{NAMES[name]}{suffix}"] = timing.step_cpu_s / found[setting, "engine"].step_cpu_s
        elif name == "engine":
            ratios[f"roofline_share{suffix}"] = roofline_share(setting, timing, limits)
    return ratios


if __name__ == "__main__":
    main()
