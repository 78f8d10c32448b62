from pathlib import Path

import pytest
import torch

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.weights import initial_weights
from dora.trainer.checkpoint import load_checkpoint, save_checkpoint
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

TINY = ModelConfig(
    vocab_size=7,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=32,
)
SETTINGS = TrainerSettings(lr=1e-2, num_steps=5, warmup_steps=1)
BATCH = [Sample([1, 2], [3, 4, 5], [-1.9, -1.9, -1.9], 1.0), Sample([1], [2], [-1.9], -1.0)]


def test_a_trainer_resumed_from_a_checkpoint_takes_the_same_next_step(tmp_path: Path) -> None:
    trainer = Trainer(TINY, initial_weights(TINY, seed=0), SETTINGS)
    trainer.step(BATCH)
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = tmp_path / "step-1"
    for _ in range(2):  # the second replaces the first
        save_checkpoint(folder, TINY, trainer.flat, trainer.state_dict(), step=1, source=tmp_path)

    config, flat, state, step = load_checkpoint(folder)
    resumed = Trainer(config, flat, SETTINGS)
    resumed.load_state_dict(state)
    assert (config, step) == (TINY, 1)
    assert trainer.step(BATCH) == resumed.step(BATCH)
    assert torch.equal(trainer.flat, resumed.flat)
    assert (folder / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "tokenizer.json"]


def test_a_plain_model_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", TINY, initial_weights(TINY, seed=0), {}, step=0, source=tmp_path)
    (tmp_path / "model" / "optimizer.pt").unlink()
    with pytest.raises(ModelError, match=r"no optimizer\.pt"):
        load_checkpoint(tmp_path / "model")
