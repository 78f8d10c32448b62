"""Engines in bf16 with a LoRA trainer in fp32: one run that is killed and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.running import Run, journal, metrics, summary

from dora.audit.logprob_recheck import check
from dora.metrics.catalog import SECTIONS, MetricDoc, MetricSection
from dora.model.pretrained import load_pretrained
from dora.model.weights import WeightLayout, weight_digest
from dora.trainer.checkpoint import VERSIONS_FOLDER

CHANGES: dict[str, object] = {
    "run__steps": 6,
    "engine__dtype": "bfloat16",
    "engine__exact_logprobs": "true",
    "algorithm__kl_loss_coef": 0.01,
    "metrics__peak_tflops": 0.05,
    "trainer__lora_rank": 2,
    "trainer__save_freq": 1,
    "trainer__keep_last": 6,
}


@pytest.fixture(scope="module")
def out(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the run, at its end."""
    folder = tmp_path_factory.mktemp("bfloat16") / "run"
    runs = [Run(task, folder, **CHANGES)]  # type: ignore[arg-type]
    try:
        runs[0].wait_for_steps(3)
        runs[0].kill()
        runs.append(Run(None, folder))
        runs[1].succeed()
        yield folder
    finally:
        for run in runs:
            run.kill_all()


def test_the_guarantees_hold_over_both_parts(out: Path) -> None:
    s = summary(out)
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    assert (s["trained_groups"], s["attempts"]) == (12, 2)


def test_engine_logprobs_equal_those_of_the_rounded_weights_bit_for_bit(out: Path) -> None:
    found = [step.get("mismatch/logprob_abs_diff_max") for step in metrics(out)]
    assert set(found) <= {0.0, None}  # a resumed trainer may not have the weights of finished samples
    assert found[0] == 0.0


def test_logprobs_are_reproduced_from_stored_versions_bit_for_bit(out: Path) -> None:
    audit = check(out, 24)
    assert audit.findings == []
    assert len(audit.versions) >= 2
    assert {float(version.abs_diffs.max()) for version in audit.versions} == {0.0}


def test_published_weights_are_the_trainers_rounded(out: Path) -> None:
    digests = {line["version"]: line["digest"] for line in journal(out) if line["kind"] == "published"}
    loaded = {line["version"]: line["digest"] for line in journal(out) if line["kind"] == "loaded"}
    assert loaded.items() <= digests.items()
    _, flat = load_pretrained(out / "checkpoints" / "step-6")
    assert digests[6] == weight_digest(flat.bfloat16())
    kept = [path for path in out.glob(f"checkpoints/*/{VERSIONS_FOLDER}/*")]
    assert {path.suffix for path in kept} == {".safetensors"}
    assert {load_file(path)["model.norm.weight"].dtype for path in kept} == {torch.bfloat16}


def test_a_checkpoint_has_the_adapters_that_give_its_weights(task: Path, out: Path) -> None:
    _, base = load_pretrained(task.parent / "start")
    config, flat = load_pretrained(out / "checkpoints" / "step-6")
    layout, found = WeightLayout(config), out / "checkpoints" / "step-6" / "adapter"
    factors = load_file(found / "adapter_model.safetensors")
    scale = json.loads((found / "adapter_config.json").read_text())["lora_alpha"] / 2
    before, after = layout.views(base), layout.views(flat)
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.up_proj"):
        b, a = (factors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "BA")
        torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] + scale * b @ a)
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_exactly_the_documented_metrics_are_written(out: Path) -> None:
    written = {"summary": {*summary(out)}, "step": {name for step in metrics(out) for name in step}}
    documented = {kind: [m for part in parts_of(kind) for m in part.metrics] for kind in written}
    for kind, names in written.items():
        assert {name for name in names if not any(m.matches(name) for m in documented[kind])} == set()
        always = {name: m for m in documented[kind] if not m.only for name in m.names}
        assert {
            name for name, m in always.items() if not any(map(MetricDoc((name,), "", "").matches, names))
        } == set()


def parts_of(kind: str) -> list[MetricSection]:
    """Sections of the metrics catalog for summary.json or for the lines of steps."""
    return [p for p in SECTIONS if (p.key == "summary") == (kind == "summary") and p.key != "evaluation"]
