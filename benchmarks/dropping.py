"""A trainer that leaves out what is old, as systems do that drop stale samples; for comparison only.

    dora train examples/verifiable/chains.toml --set trainer.adapter=benchmarks/dropping.py:Dropping

What is older than `OLDEST` versions when its batch is trained has been generated for nothing; a step then
learns from fewer samples. DORA itself has no such mode, and its record says "trained" of these too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

OLDEST = 2  # versions


class Dropping(Trainer):
    """DORA's trainer, blind to stale samples."""

    def __init__(
        self, config: ModelConfig, flat: Tensor, settings: TrainerSettings, device: torch.device
    ) -> None:
        super().__init__(config, flat.to(device), settings)

    def put(self, samples: Sequence[Sample], is_whole: bool = False) -> None:
        super().put([sample for sample in samples if sample.staleness <= OLDEST], is_whole)
