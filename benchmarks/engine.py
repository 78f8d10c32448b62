"""Decoding on one CPU thread: the engine against a bare loop, transformers, vLLM and the machine's limits.

Prompt lengths are spread evenly up to the context, as in a rollout (`spread`), or all fill it (`equal`).
Decoders are measured in turn, setting by setting, so that load on the machine affects all; figures are
medians. Only steps in which all rows decode count for `tokens_per_s`; `mixed_tokens_per_s` includes prefill.
Ratios compare CPU time per step.

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
from torch import Tensor

from dora.core.types import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.request import Request, SamplingParams
from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights
from report import Row, make_parser, options_of, publish

MODELS = {"0.5M": DEMO, "2M": TWO_MILLION, "10M": TEN_MILLION}
BATCHES, CONTEXTS = (1, 8, 32, 128), (64, 256, 1024, 4096)
MAIN = (32, 256)  # batch and context of the ratios
NUM_TOKENS = 33  # per row and run: one from the prompt, and 32 steps
MANY_RUNS_TOKENS = 2**13  # batch times context up to which a setting has many runs
BASELINE_TOKENS = 2**15  # batch times context up to which all decoders run
MAX_TOKENS = {"engine": 2**17, "bare": 2**17, "engine, eager": MANY_RUNS_TOKENS}
NAMES = {
    "bare": "bare",
    "generate": "generate",
    "continuous batching": "continuous_batching",
    "vllm": "vllm_cpu",
}


class Setting(NamedTuple):
    """A model, a batch size, a context and the distribution of prompt lengths."""

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
        """Different prompts in each run, so that no decoder has them cached."""
        source = random.Random(run)
        return [[source.randrange(32) for _ in range(length)] for length in self.prompt_lengths()]


class OwnEngine:
    """DORA's engine with the given kernels."""

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
        sampling = SamplingParams(temperature=1.0, max_tokens=num_tokens)
        started = time.perf_counter(), time.process_time()
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
        while not engine.is_idle:
            engine.step()
            num_steps += 1
        done = time.perf_counter(), time.process_time()
        return Timing(
            *((end - start) / num_steps for start, end in zip(first, done, strict=True)),
            *(end - start for start, end in zip(started, done, strict=True)),
        )


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="a Python that can import vllm")
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
    """Yield the rows of all settings of a model; adds medians to `found`."""
    with ExitStack() as stack:
        settings = settings_of(model, quick)
        makers = decoders(stack, model, settings, python)
        if "vllm" not in makers:
            yield skipped(model, "vllm", "all", "--vllm-python is not given")
        for setting in settings:
            wanted = [name for name in makers if not quick or is_quick(setting, name)]
            small = [name for name in wanted if setting.num_tokens <= MAX_TOKENS.get(name, BASELINE_TOKENS)]
            for name in wanted:
                if name not in small:
                    where = f"batch {setting.batch}, context {setting.context}"
                    yield skipped(model, name, where, "prefill takes too long")
            runs = {name: makers[name](setting) for name in small}
            for name, timing in measure(runs, setting, quick).items():
                found[setting, name] = timing
                yield row_of(setting, name, timing, limits)


def decoders(
    stack: ExitStack, model: str, settings: list[Setting], python: Path | None
) -> dict[str, Callable[[Setting], Run]]:
    """Factories of decoders by name; all decoders have the same weights."""
    config = config_of(model)
    flat = initial_weights(config, seed=1, std=0.1)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    save_pretrained(folder, config, flat)
    bare, transformers = Bare(config, flat), Transformers(folder)
    makers: dict[str, Callable[[Setting], Run]] = {
        "engine": lambda setting: OwnEngine(config, flat, setting, "auto").run,
        "engine, eager": lambda setting: OwnEngine(config, flat, setting, "eager").run,
        "bare": lambda setting: bare.run,
        "generate": lambda setting: transformers.generate,
        "continuous batching": lambda setting: transformers.batch_continuously,
    }
    if python is not None:
        largest = [setting for setting in settings if setting.num_tokens <= BASELINE_TOKENS]
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
    """Whether --quick runs a decoder: all in the main setting of the smallest model, else two."""
    is_main = (setting.batch, setting.context, setting.lengths) == (*MAIN, "spread")
    if setting.model == "0.5M" and is_main:
        return True
    return decoder in ("engine", "bare")


def config_of(model: str) -> ModelConfig:
    return replace(MODELS[model], max_position_embeddings=max(CONTEXTS))


def settings_of(model: str, quick: bool) -> list[Setting]:
    """The main setting, the same with equal lengths, then the others."""
    first = [Setting(model, *MAIN), Setting(model, *MAIN, "equal")]
    if quick:
        return first[:1] if model == "10M" else [*first, Setting(model, 8, 1024)]
    others = [Setting(model, *sizes) for sizes in product(BATCHES, CONTEXTS) if sizes != MAIN]
    return first + others


def measure(decoders: dict[str, Run], setting: Setting, quick: bool) -> dict[str, Timing]:
    """Medians of interleaved runs after a warm-up; large settings have fewer runs."""
    num_runs = 4 if quick else 6 if setting.num_tokens <= MANY_RUNS_TOKENS else 3
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
    """The minimum time of a step over the measured one, at the contexts in the middle of the run."""
    lengths = [length + NUM_TOKENS // 2 for length in setting.prompt_lengths()]
    return roofline_s(config_of(setting.model), lengths, limits) / timing.step_cpu_s


def skipped(model: str, decoder: str, where: str, reason: str) -> Row:
    return {"model": model, "decoder": decoder, "skipped": where, "reason": reason}


def ratios_of(found: dict[tuple[Setting, str], Timing], limits: Limits) -> dict[str, float]:
    """Speed-ups of the engine at the main batch and context; keys of the 0.5M model have no suffix."""
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
