"""Where a run still has the weights of its versions.

Version 0 is the model that it began with, version N its checkpoint of N steps. A checkpoint keeps older
versions beside it that unfinished requests needed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dora.config import Config
from dora.engine.workspace import DTYPES
from dora.errors import ModelError
from dora.model.folder import load_folder
from dora.model.weights import weight_digest
from dora.trainer.checkpoint import VERSIONS, whole_checkpoints
from dora.weights.store import WeightStore


@dataclass(frozen=True)
class Place:
    """A model folder, or a file of a weight store; a step that was redone may have left other bytes there."""

    version: int
    path: Path

    def read(self, dtype: str) -> Tensor | None:
        """The weights [numel] as engines of this dtype hold them; None if they cannot be read."""
        try:
            if self.path.is_dir():
                return load_folder(self.path)[1].to(DTYPES[dtype])
            return WeightStore(self.path.parent, dtype).fetch(self.version)
        except (ModelError, OSError, RuntimeError):  # torch cannot map a damaged file
            return None


def places(run: Path, config: Config) -> dict[int, list[Place]]:
    """Version -> where it may be."""
    start = Path(config.model.path)
    found: dict[int, list[Place]] = {}
    for step, folder in whole_checkpoints(run / "checkpoints").items():
        found.setdefault(step, []).append(Place(step, folder))
        older = WeightStore(folder / VERSIONS, config.engine.dtype)
        for version in older.versions():
            found.setdefault(version, []).append(Place(version, older.folder / older.name_of(version)))
    if start.is_dir():
        found.setdefault(0, []).append(Place(0, start))
    return found


def read_version(places: Sequence[Place], digest: str, dtype: str) -> tuple[Place, Tensor] | None:
    """The first of several places whose bytes have this digest, with its weights [numel]."""
    for place in places:
        flat = place.read(dtype)
        if flat is not None and weight_digest(flat) == digest:
            return place, flat
    return None
