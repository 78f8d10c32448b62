"""A run starts with another run's checkpoint only if weights and optimizer fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.batches import TINY
from tests.trainer.test_checkpoint import BATCH

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import WeightLayout, initial_weights
from dora.trainer.checkpoint import save_checkpoint
from dora.trainer.checkpoint_folders import write_manifest
from dora.trainer.continuation import check_start, load_start
from dora.trainer.critic import value_layout
from dora.trainer.lora import LoraSettings
from dora.trainer.trainer import Trainer, TrainerSettings

LORA = LoraSettings(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))
CRITIC = value_layout(TINY).numel


def save_model(folder: Path, config: ModelConfig = TINY, seed: int = 0) -> Path:
    save_pretrained(folder, config, initial_weights(config, seed=seed))
    return folder


def checkpoint(folder: Path, lora: LoraSettings | None = None, **changes: Any) -> Path:
    """The checkpoint of a run of one step; `changes` replace entries of the trainer's state."""
    settings = TrainerSettings(lr=1e-2, num_steps=5, warmup_steps=0, lora=lora)
    trainer = Trainer(TINY, initial_weights(TINY, seed=0), settings)
    trainer.step(BATCH)
    state = trainer.state_dict() | changes
    save_checkpoint(folder / "step-1", TINY, trainer.flat, state, step=1, source=folder)
    return folder / "step-1"


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_fitting_checkpoint_gives_its_weights_and_moments_and_no_steps(
    tmp_path: Path, lora: LoraSettings | None
) -> None:
    folder, model = checkpoint(tmp_path, lora), save_model(tmp_path / "model")
    check_start(folder, model, lora, 0)
    assert load_start(None, None) is None
    (flat, own, own_step), (same, state, step) = (
        load_start(*given) or pytest.fail("no start") for given in ((folder, folder), (None, folder))
    )
    assert (own["num_steps_done"], own_step, state["num_steps_done"], step) == (1, 1, 0, 0)
    assert torch.equal(flat, same)
    assert int(state["optimizer"]["state"][0]["step"]) == 1


def test_a_checkpoint_that_does_not_fit_is_refused_with_a_remedy(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    (tmp_path / "lora").mkdir()
    full, adapted = checkpoint(tmp_path), checkpoint(tmp_path / "lora", LORA)
    deeper = save_model(tmp_path / "deeper", replace(TINY, num_hidden_layers=3))
    wide = replace(LORA, rank=4)
    cases: list[tuple[Path, Path, LoraSettings | None, int, str]] = [
        (model, model, None, 0, "it has no optimizer.pt, so it is not a checkpoint of a run: name RUN/check"),
        (full, deeper, None, 0, "num_hidden_layers is 2 there and 3 here: set model.path to that of its run"),
        (
            full,
            model,
            LORA,
            0,
            "its run trained all weights, and this one trains LoRA adapters: set trainer.",
        ),
        (adapted, model, None, 0, "its run trained LoRA adapters, and this one trains all weights"),
        (adapted, model, wide, 0, "values, and this run needs"),
        (adapted, model, replace(LORA, alpha=400.0), 0, "are not those of model.path with its adapters"),
        (adapted, save_model(tmp_path / "other", seed=9), LORA, 0, "set model.path and trainer.lora_alpha"),
        (full, model, None, CRITIC, "its run had no critic, and algorithm.adv_estimator = gae needs one"),
    ]
    for folder, base, lora, num_critic_weights, reason in cases:
        with pytest.raises(ModelError) as refused:
            check_start(folder, base, lora, num_critic_weights)
        assert reason in str(refused.value)
        assert f"or start with its weights and a new optimizer: --set model.path={folder}" in str(
            refused.value
        )
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer": {"state": {}}}, ""),
        ({"optimizer": {}}, "its optimizer is not DORA-RL's AdamW: another trainer wrote it"),
        ({"optimizer": None}, "its optimizer is not DORA-RL's AdamW"),
        ({"optimizer": {"state": {0: {"momentum_buffer": torch.zeros(3)}}}}, "its optimizer is not"),
        (
            {"optimizer": {"state": {0: dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), torch.zeros(3))}}},
            f"its optimizer has 3 values, and this run needs {WeightLayout(TINY).numel}",
        ),
        ({"critic": {"flat": torch.zeros(3)}}, f"its critic has 3 weights, and this run's has {CRITIC}"),
        ({"critic": {"flat": torch.zeros(CRITIC)}}, ""),
    ],
)
def test_the_optimizer_must_be_of_the_same_kind_and_size(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    folder, model = checkpoint(tmp_path, **changes), save_model(tmp_path / "model")
    num_critic_weights = CRITIC if "critic" in changes else 0
    if not reason:
        return check_start(folder, model, None, num_critic_weights)
    with pytest.raises(ModelError, match=reason):
        check_start(folder, model, None, num_critic_weights)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder, model = checkpoint(tmp_path), save_model(tmp_path / "model")
    (folder / "optimizer.pt").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"damaged: optimizer\.pt differs from its digest.*: name another"):
        check_start(folder, model, None, 0)
    write_manifest(folder)
    with pytest.raises(ModelError, match=r"optimizer\.pt cannot be read"):
        check_start(folder, model, None, 0)
