"""DORA's own trainer and the example backend pass the contract of a training engine."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dora.engine.interface import TrainingEngine
from dora.loading import load_attribute
from dora.model.config import ModelConfig
from dora.testing.trainer_contract import TrainingContract
from dora.trainer.settings import TrainerSettings
from dora.trainer.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"


def native_trainer(
    *, config: ModelConfig, flat: Tensor, settings: TrainerSettings, device: str
) -> TrainingEngine:
    """DORA's own trainer, with the signature of a backend."""
    return Trainer(config, flat.to(device), settings)


class TestNative(TrainingContract):
    factory = staticmethod(native_trainer)


class TestTransformers(TrainingContract):
    factory = load_attribute(f"{EXAMPLES / 'transformers_trainer.py'}:Transformers", "factory")
