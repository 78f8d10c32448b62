"""A trainer that drops stale samples, as some systems do; for comparison only.

    dora train examples/verifiable/chains.toml --set trainer.backend=benchmarks/dropping.py:Dropping

Samples with a staleness above `MAX_STALENESS` when their batch is trained are dropped, so a step trains on
fewer samples. DORA itself has no such mode, and its journal counts the dropped samples as trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

MAX_STALENESS = 2  # versions


class Dropping(Trainer):
    """DORA's trainer without stale samples."""

    def __init__(
        self, config: ModelConfig, flat: Tensor, settings: TrainerSettings, device: torch.device
    ) -> None:
        super().__init__(config, flat.to(device), settings)

    def add_samples(self, samples: Sequence[Sample], is_whole_batch: bool = False) -> None:
        super().add_samples(
            [sample for sample in samples if sample.staleness <= MAX_STALENESS], is_whole_batch
        )
