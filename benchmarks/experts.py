"""Load imbalance of the experts of a tiny Qwen3-MoE over a run with routing replay.

A model with random weights learns to write many different characters. `load_imbalance` is the tokens of the
busiest expert over the mean of a layer, averaged over layers: 1 is perfect balance, 4 (experts / experts per
token) is the worst. No loss term balances the experts. --quick runs 20 steps.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from finished_run import metrics_of, train
from models import DEMO

from dora.data.tokenizer import Tokenizer
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights
from report import Row, parse_options, publish

EXAMPLES = Path(__file__).parent.parent / "examples"
MIXTURE = replace(
    DEMO, model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
    norm_topk_prob=True,
)  # fmt: skip
NUM_PARTS = 5  # of the run, with one row each
REWARD = """
def reward(prompt, completion, **row):
    return len(set(completion)) / 16
"""


def save_task(folder: Path) -> None:
    """Save a random mixture with the example's tokenizer, and the reward."""
    start = folder / "start"
    shutil.copytree(EXAMPLES / "gcd-start", start, ignore=shutil.ignore_patterns("model*", "config.json"))
    config = replace(MIXTURE, vocab_size=Tokenizer(start).vocab_size)
    save_pretrained(start, config, initial_weights(config, seed=0))
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def run(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """The metrics of each step of a training run."""
    out = folder / "run"
    changes = (
        f"model.path={folder / 'start'}",
        f"reward.function={folder / 'reward.py'}:reward",
        "trainer.lr=1e-3",
        "trainer.routing_replay=true",
        "eval.num_prompts=0",
    )
    train(EXAMPLES / "own_task" / "sevens.toml", out, changes, "--steps", str(num_steps))
    return metrics_of(out)


def rows_of(steps: list[dict[str, Any]]) -> list[Row]:
    """One row for each part of a run."""
    size = len(steps) // NUM_PARTS
    rows: list[Row] = []
    for first in range(0, size * NUM_PARTS, size):
        part = steps[first : first + size]
        imbalances = [step["moe/load_imbalance"] for step in part]
        rows.append(
            {
                "steps": f"{first}-{first + size - 1}",
                "reward": fmean(step["reward/mean"] for step in part),
                "load_imbalance": fmean(imbalances),
                "load_imbalance_least": min(imbalances),
                "load_imbalance_most": max(imbalances),
            }
        )
    return rows


def main() -> None:
    options = parse_options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        save_task(Path(folder))
        steps = run(Path(folder), 20 if options.quick else 100)
    imbalances = [step["moe/load_imbalance"] for step in steps]
    ratios = {
        "load_imbalance_first": imbalances[0],
        "load_imbalance_last": imbalances[-1],
        "load_imbalance_mean": fmean(imbalances),
        "load_imbalance_most": max(imbalances),
    }
    publish(options, rows_of(steps), ratios)


if __name__ == "__main__":
    main()
