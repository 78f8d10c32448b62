"""What a worker needs to start.

Paths are of the driver's machine; the launcher of another machine replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dora.core.types import GroupId, RequestId
from dora.engine.messages import ContinueEpisode as ContinueEpisode
from dora.engine.messages import EndEpisode as EndEpisode
from dora.engine.messages import ExportFailed as ExportFailed
from dora.engine.messages import ExportFinished as ExportFinished
from dora.engine.messages import ImportFailed as ImportFailed
from dora.engine.messages import ImportFinished as ImportFinished
from dora.engine.messages import MigrationReserved as MigrationReserved
from dora.engine.messages import ReserveMigration as ReserveMigration
from dora.engine.messages import StartExport as StartExport
from dora.engine.messages import TurnFinished
from dora.engine.request import Completion, Request
from dora.metrics.rollout import EngineUsage
from dora.runtime.process.rpc import ChannelAddress
from dora.trainer.advantage import AdvantageSettings

if TYPE_CHECKING:
    from dora.trainer.critic import CriticSettings
    from dora.trainer.trainer import TrainerSettings
    from dora.weights.store import RemoteVersionSource


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
    exact: bool = False
    reads_text: bool = False
    returns_routes: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    backend: str | None = None  # the class of another engine
    backend_options: Mapping[str, object] | None = None  # what that is made with beside these
    prefetches_weights: bool = False
    num_kv_blocks: int | None = None  # as many as all rows take
    inflight_update: str | None = None  # "partial" | "inflight": answers go on with newer versions
    host: str | None = None
    broker: ChannelAddress | None = None
    remote_weights: RemoteVersionSource | None = (
        None  # where its versions are, if `weights` is on another machine
    )


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
    advantage_settings: AdvantageSettings
    streams_gradients: bool
    max_staleness: int = 0
    exact_engine: EngineSpec | None = None
    checkpoint: Path | None = None
    device: str = "cpu"
    published_dtype: str = "float32"
    peak_tflops: float | None = None
    rank: int = 0
    num_ranks: int = 1
    rank_timeout_s: float = 600.0
    critic: CriticSpec | None = None
    columns: tuple[str, ...] = ()
    column_timeout_s: float | None = None
    backend: str | None = None  # the class of another trainer


@dataclass(frozen=True)
class AuxWorkerSpec:
    """A station beside the `trainer`, which makes one of its columns."""

    column: str
    trainer: TrainerSpec
    device: str = "cpu"


# === dora.runtime.process.messages: Messages between the driver and its workers.
#
# They carry identities and token ids. Weights and KV lie in files. The messages of a migration and of a turn are
# the engine's own: `dora.engine.messages`.

# to a worker


@dataclass(frozen=True)
class LoadWeights:
    version: int


@dataclass(frozen=True)
class PrefetchWeights:
    """A version is in the store: bring it near, for it may have to be loaded."""

    version: int


@dataclass(frozen=True)
class DropWeights:
    version: int


@dataclass(frozen=True)
class SubmitRequests:
    requests: list[Request]


@dataclass(frozen=True)
class AbortRequests:
    requests: tuple[RequestId, ...]


@dataclass(frozen=True)
class FailRequest:
    """The request has failed, though its engine could go on: it answers `Refused`."""

    request_id: RequestId
    reason: str


@dataclass(frozen=True)
class CancelMigration:
    """To either side: end the move if the request has not been taken yet."""

    migration_id: int


@dataclass(frozen=True)
class SetDecodeOnly:
    """Decode these requests only, the others stand still; none: decode all again."""

    requests: tuple[RequestId, ...]


@dataclass(frozen=True)
class PauseDecoding:
    """Decode nothing until `ResumeRows`; everything else goes on."""


@dataclass(frozen=True)
class ResumeDecoding:
    """Decode again."""


@dataclass(frozen=True)
class Shutdown:
    """End the process; no more is expected of it."""


@dataclass(frozen=True)
class AccumulateGroup:
    """A group has been committed to a step; a trainer that streams may begin with it."""

    step: int
    group: GroupId


@dataclass(frozen=True)
class TrainStep:
    step: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True)
class PublishWeights:
    version: int
    is_stored: bool = True  # else only its digest is told


@dataclass(frozen=True)
class InstallWeights:
    """To the stand-in of a trainer outside: the weights in `file` are this version, and end a step."""

    version: int
    file: Path
    metrics: dict[str, float]


@dataclass(frozen=True)
class SaveCheckpoint:
    """Write the checkpoint `folder`/step-N, where N is the trainer's own count of steps.

    `core` is what the orchestrator knew then, as JSON; `versions` is a folder with the older versions
    that may still be needed, which is removed. `keep_last` checkpoints are left.
    """

    folder: Path
    core: str
    versions: Path
    keep_last: int
    fsync: bool


# from a worker


@dataclass(frozen=True)
class WorkerReady:
    """The worker has started; `note` says what it runs on, `pool` is the file of an engine's KV, if any.

    Engines of other machines read it at the `door`. In the sample stream it is the `client` of this name.
    """

    note: str = ""
    pool: Path | None = None
    kv_address: ChannelAddress | None = None
    client_id: str = ""


@dataclass(frozen=True)
class StorageReady:
    """The storage of the sample stream is there: for other machines, at an endpoint, with a token."""

    remote: tuple[str, str] | None


@dataclass(frozen=True)
class WeightsLoaded:
    """A version is held; requests stood still for `stop_s` meanwhile."""

    version: int
    digest: str
    stop_s: float = 0.0


@dataclass(frozen=True)
class RequestsCompleted:
    completions: list[Completion]
    usage: EngineUsage


@dataclass(frozen=True)
class TurnsCompleted:
    turns: list[TurnFinished]


@dataclass(frozen=True)
class RequestsRejected:
    reasons: dict[RequestId, str]


@dataclass(frozen=True)
class RequestsAborted:
    num_tokens: dict[RequestId, int]


@dataclass(frozen=True)
class LoadRejected:
    """A version could not be loaded; its slot is free."""

    version: int
    reason: str


@dataclass(frozen=True)
class DecodingPaused:
    """The engine decodes no more until `ResumeRows`."""


@dataclass(frozen=True)
class EngineReport:
    """Once a second: a sign of life, and how the engine is doing.

    `row_tokens_per_s` is what one decoding row gained per second since the last beat (0: none
    decoded), `kv_share` the share of KV blocks in use. `num_recomputed` tokens so far had their KV computed
    again here, for newer weights or after a move that failed.
    """

    progress: dict[RequestId, int]
    usage: EngineUsage
    row_tokens_per_s: float
    kv_usage: float
    num_recomputed: int = 0


@dataclass(frozen=True)
class StepCompleted:
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class ColumnFilled:
    """A station beside the trainer has filled its column of a group."""

    column: str
    group: GroupId


@dataclass(frozen=True)
class CriticUpdated:
    """A critic beside the trainer has learnt from the step's batch."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class StepRejected:
    """A training step failed before it changed anything."""

    step: int
    reason: str


@dataclass(frozen=True)
class WeightsPublished:
    version: int
    digest: str


@dataclass(frozen=True)
class WeightsRejected:
    """Weights from outside do not fit the model; the step is due as before."""

    version: int
    reason: str


@dataclass(frozen=True)
class CheckpointSaved:
    folder: Path


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written; the ones before are as they were."""

    step: int
    reason: str


@dataclass(frozen=True)
class TaskStarted:
    """A worker is at these groups; none: it waits for rows. The time of a call begins."""

    groups: tuple[GroupId, ...]


@dataclass(frozen=True)
class TaskFailed:
    """A task cannot do these groups."""

    groups: tuple[GroupId, ...]
    reason: str
    detail: str


@dataclass(frozen=True)
class StreamFull:
    """A worker ends, for the stream had no room for what it has made; it is somebody else's to do again."""

    reason: str


@dataclass(frozen=True)
class GroupRewards:
    """The collector's word, from a thread of the driver: all reward tasks are done with a group.

    `rewards` has those of each task, sibling by sibling.
    """

    group: GroupId
    rewards: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Heartbeat:
    """Once a second, from a thread of a worker whose main thread works in long pieces."""


@dataclass(frozen=True)
class WorkerExited:
    """The driver's own note, after a worker's last word: its pipe has closed."""


@dataclass(frozen=True)
class WorkerCrashed:
    """The worker met an exception and ends; `refusal` is what was wrong with what it was given."""

    traceback: str
    input_error: str = ""
