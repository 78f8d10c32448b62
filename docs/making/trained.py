"""Tables about training: implementations of a model, distillation beside GRPO, formulas beside peers'."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.making import markdown

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
METHODS = {
    "grpo": "GRPO, with rewards",
    "distillation": "distillation, without rewards",
    "both": "both (`reward_coef = 1.0`)",
}


def tables() -> dict[str, Callable[[], str]]:
    """Table name -> function that writes it."""
    functions = trained_implementations, trained_distillation, formulas
    return {function.__name__: function for function in functions}


def trained_implementations() -> str:
    """Each family with DORA-RL's decoder in the trainer, with transformers' model, and the control run."""
    content, rows = _read("implementations"), []
    ratios = content["ratios"]
    runs = {(row["family"], row["trainer"]): row for row in content["rows"]}
    for family in dict.fromkeys(row["family"] for row in content["rows"]):
        own, foreign, control = (runs[family, name] for name in ("dora", "transformers", "control"))

        def pair(key: str, form: str, family: str = family) -> str:
            return ", ".join(
                f"{ratios[f'{key}_{family}_{name}']:{form}}" for name in ("transformers", "control")
            )

        rows.append(
            (
                f"`{family}`",
                f"{own['sampled_before']:.3f}",
                ", ".join(f"{row['sampled_after']:.3f}" for row in (own, foreign, control)),
                pair("equal_steps", ".0f"),
                pair("grad_norm_error", ".0e"),
                pair("window_difference", ".3f"),
                f"{foreign['mismatch_max']:.0e}",
            )
        )
    columns = (
        *("model_type", "held-out reward before", "after: own, transformers, control"),
        *("steps with equal responses", "error of the gradient norm in them"),
        *("largest difference of mean rewards", "log-prob mismatch (nats)"),
    )
    return markdown.table(columns, rows)


def trained_distillation() -> str:
    """Samples until the policy is as good as asked, for each seed."""
    rows = _read("distillation")["rows"]
    shares = [key for key in rows[0] if key.startswith("samples_to_")]
    lines = []
    for method, name in METHODS.items():
        own = [row for row in rows if row["method"] == method]
        samples = ["; ".join(_count(row[share]) for row in own) for share in shares]
        lines.append((name, *samples, f"{fmean(row['accuracy'] for row in own):.3f}"))
    gains = [f"{float(share.removeprefix('samples_to_')):.0%} of the gain" for share in shares]
    return markdown.table(("the policy learns from", *gains, "accuracy at the end"), lines)


def formulas() -> str:
    """Each formula beside a peer's, with the largest relative difference of values and gradients."""
    losses = [
        (row["loss"], row["peer"], max(float(row["value_gap"]), float(row["gradient_gap"])))
        for row in _read("losses")["rows"]
    ]
    others = [(row["what"], row["peer"], float(row["relative_gap"])) for row in _read("advantages")["rows"]]
    rows = [(name, peer, f"{gap:.0e}") for name, peer, gap in losses + others]
    return markdown.table(("formula", "compared with", "largest relative difference"), rows)


def _count(samples: int | str) -> str:
    return f"{samples:,}" if isinstance(samples, int) else "not reached"


def _read(name: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content
