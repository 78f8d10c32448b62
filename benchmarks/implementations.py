"""Each of DORA-RL's own model families learns the demo with both implementations of its forward pass.

The same run is trained with DORA-RL's decoder in the trainer (`dora`), with transformers' model in it
(`transformers`), and a second time with DORA-RL's decoder but gradients summed over other micro-batches
(`control`): so much do runs differ by rounding alone. DORA-RL's engines generate in all of them, policies are
`sync`, and gradients are summed in one order. All families start from the demo's model: experts are copies of
its MLP, and models without norms of queries and keys are fine-tuned on the demo's demonstrations.

`equal_steps` of a family is the number of steps until a response has other tokens, and `grad_norm_error` the
largest relative difference of the gradient's norm in these steps. `window_difference` is the largest
difference of the mean reward in a fifth of the run. --quick runs one family for a few steps, too few to
learn.

    python benchmarks/implementations.py [--quick] [--json FILE]
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import finished_run
from demo import CONFIG

from dora.data import gcd
from dora.data.tokenizer import Tokenizer, save_character_tokenizer
from dora.journal.reader import read_responses, read_samples
from dora.loading import load_attribute
from dora.model.pretrained import load_pretrained, save_pretrained
from dora.model.weights import WeightLayout, initial_weights
from dora.trainer.sft import train_sft
from report import Row, parse_options, publish

START = CONFIG.parent / "gcd-start"
FAMILIES: Mapping[str, Mapping[str, Any]] = {  # what differs from the demo's config
    "qwen3": {},
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 352,
        "norm_topk_prob": True,
    },
}
TRAINERS = {
    "dora": (),
    "transformers": ("trainer.model=transformers",),
    "control": ("trainer.micro_batch_tokens=768",),
}
NUM_STEPS, NUM_PROMPTS, NUM_WINDOWS = 40, 512, 5
NUM_SFT_STEPS, SFT_LR = 200, 1e-3


def make_start(family: str, folder: Path) -> int:
    """Write the initial model of a family; returns its number of parameters."""
    demo, trained = load_pretrained(START)
    config, given = replace(demo, **FAMILIES[family]), WeightLayout(demo).views(trained)
    flat = initial_weights(config, seed=0)
    for name, view in WeightLayout(config).views(flat).items():
        source = re.sub(r"experts\.\d+\.", "", name)
        if source in given:
            view.copy_(given[source])
    save_character_tokenizer(folder, gcd.ALPHABET)
    if not config.has_qk_norm:
        demonstrations = load_attribute(f"{START / 'make.py'}:demonstrations", "demonstrations")
        for _ in train_sft(config, flat, demonstrations(Tokenizer(folder), Random(0)), NUM_SFT_STEPS, SFT_LR):
            pass
    save_pretrained(folder, config, flat)
    return flat.numel()


@dataclass(frozen=True)
class Result:
    """The metrics of each step, the responses trained in it by their names, and the run's summary."""

    steps: Sequence[Mapping[str, float]]
    responses: Sequence[Mapping[object, Sequence[int]]]
    summary: Mapping[str, Any]


def train(model: Path, out: Path, num_steps: int, num_prompts: int, changes: Sequence[str]) -> Result:
    """A run of the demo with this model."""
    sets = (
        f"model.path={model}",
        f"run.steps={num_steps}",
        f"eval.num_prompts={num_prompts}",
        "orchestrator.update_policy=sync",
        "trainer.deterministic=true",
        *changes,
    )
    finished_run.train(CONFIG, out, sets)
    responses: list[dict[object, Sequence[int]]] = [{} for _ in range(num_steps)]
    samples = [*read_samples(out).values()]
    for sample, response in zip(samples, read_responses(out, samples), strict=True):
        if sample.trained_step is not None and response is not None:
            responses[sample.trained_step][sample.group, sample.sibling] = response.token_ids
    steps = [line for line in finished_run.metrics_of(out) if "reward/mean" in line]
    return Result(steps, responses, finished_run.summary_of(out))


def row_of(result: Result) -> dict[str, float]:
    """Mean rewards of a run by windows of steps, held-out rewards, and the log-prob mismatch."""
    summary = result.summary
    return {
        **{f"reward_window_{i + 1}": reward for i, reward in enumerate(windows(result))},
        "sampled_before": summary["eval_before"],
        "sampled_after": summary["eval_after"],
        "greedy_after": summary["eval_greedy_after"],
        "mismatch_max": summary["logprob_mismatch_max"],
        "mismatch_kl": fmean(step["mismatch/kl"] for step in result.steps),
    }


def windows(result: Result) -> list[float]:
    """The mean reward of the trained responses in each of NUM_WINDOWS parts of the run."""
    rewards = [step["reward/mean"] for step in result.steps]
    width = len(rewards) // NUM_WINDOWS
    return [fmean(rewards[i * width : (i + 1) * width]) for i in range(NUM_WINDOWS)]


def compare(one: Result, other: Result) -> dict[str, float]:
    """How far apart two runs are, by the names in the docstring of this file."""
    pairs = zip(one.responses, other.responses, strict=True)
    equal_steps = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    norms = [[step["actor/grad_norm"] for step in result.steps[:equal_steps]] for result in (one, other)]
    return {
        "equal_steps": equal_steps,
        "grad_norm_error": max((abs(x / y - 1) for x, y in zip(*norms, strict=True)), default=0.0),
        "window_difference": max(abs(x - y) for x, y in zip(windows(one), windows(other), strict=True)),
        "held_out_difference": abs(one.summary["eval_after"] - other.summary["eval_after"]),
    }


def main() -> None:
    options = parse_options(__doc__ or "")
    families = ["qwen3"] if options.quick else [*FAMILIES]
    num_steps, num_prompts = (NUM_WINDOWS, 16) if options.quick else (NUM_STEPS, NUM_PROMPTS)
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for family in families:
        with tempfile.TemporaryDirectory() as name:
            model = Path(name) / "start"
            num_parameters = make_start(family, model)
            results = {
                trainer: train(model, Path(name) / trainer, num_steps, num_prompts, changes)
                for trainer, changes in TRAINERS.items()
            }
        for trainer, result in results.items():
            named = {"family": family, "trainer": trainer, "parameters": num_parameters}
            rows.append({**named, "steps": num_steps, **row_of(result)})
        for trainer in ("transformers", "control"):
            found = compare(results["dora"], results[trainer])
            ratios |= {f"{key}_{family}_{trainer}": value for key, value in found.items()}
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
