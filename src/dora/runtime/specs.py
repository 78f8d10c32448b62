"""Everything that a worker needs to start, wherever that is; what it is told later are messages.

Paths are of the driver's machine; on another one, who starts it there replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dora.runtime.sealed import Address
from dora.trainer.scoring import Scoring

if TYPE_CHECKING:  # they bring torch, which a rewarder does not need
    from dora.trainer.critic import CriticSettings
    from dora.trainer.trainer import TrainerSettings
    from dora.weights.brought import Brought


@dataclass(frozen=True)
class EngineSpec:
    """A rollout engine; lengths in tokens. Its KV blocks lie in the file `pool`, which it makes; on a GPU
    they lie there, and there is none. Where a run is on several machines, engines of others read its KV at
    `host`, and one that is not beside the driver asks at its `desk`.

    One that `reads_text` knows stop strings, one that `returns_routes` tells the experts of each token.
    """

    model: Path
    weights: Path
    pool: Path
    max_rows: int
    max_context: int
    version_slots: int
    kernels: str
    pace_s: float
    tail_interval: int
    max_staleness: int
    exact: bool = False
    reads_text: bool = False
    returns_routes: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    adapter: str | None = None  # the class of another engine
    options: Mapping[str, object] | None = None  # what that is made with beside these
    loads_deferred: bool = False
    kv_blocks: int | None = None  # as many as all rows take
    renewal: str | None = None  # "partial" | "inflight": answers go on with newer versions
    host: str | None = None
    desk: Address | None = None
    brought: Brought | None = None  # where its versions are, if `weights` is on another machine


@dataclass(frozen=True)
class CriticSpec:
    """A critic, which begins as the decoder in the folder `model`."""

    model: Path
    settings: CriticSettings


@dataclass(frozen=True)
class TrainerSpec:
    """The trainer. It begins at `model`, or goes on from `checkpoint`.

    One that `streams` works on committed groups before their batch is complete. In exact mode it computes
    log-probs as an engine of `exact` does. Of `num_ranks` processes rank 0 is the one that is spoken to; none
    waits longer than `rank_timeout_s` for another. Stations beside it make `columns`, each group's within
    `column_wait_s`.
    """

    model: Path
    weights: Path
    stream: Path
    settings: TrainerSettings
    scoring: Scoring
    streams: bool
    max_staleness: int = 0
    exact: EngineSpec | None = None
    checkpoint: Path | None = None
    device: str = "cpu"
    published_dtype: str = "float32"
    peak_tflops: float | None = None
    rank: int = 0
    num_ranks: int = 1
    rank_timeout_s: float = 600.0
    critic: CriticSpec | None = None
    columns: tuple[str, ...] = ()
    column_wait_s: float | None = None
    adapter: str | None = None  # the class of another trainer


@dataclass(frozen=True)
class StationSpec:
    """A station beside the `trainer`, which makes one of its columns."""

    column: str
    trainer: TrainerSpec
    device: str = "cpu"
