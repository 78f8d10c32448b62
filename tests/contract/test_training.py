"""DORA's own trainer keeps the contract of a training engine, and so does one that it has not written."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dora.contract.training import TrainingContract
from dora.loading import load_attribute
from dora.model.config import ModelConfig
from dora.runtime.stations import TrainingEngine
from dora.trainer.settings import TrainerSettings
from dora.trainer.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"


def native(*, config: ModelConfig, flat: Tensor, settings: TrainerSettings, device: str) -> TrainingEngine:
    """Made as an adapter is."""
    return Trainer(config, flat.to(device), settings)


class TestNative(TrainingContract):
    factory = staticmethod(native)


class TestTransformers(TrainingContract):
    """The adapter among the examples keeps it, too."""

    factory = load_attribute(f"{EXAMPLES / 'transformers_trainer.py'}:Transformers", "factory")
