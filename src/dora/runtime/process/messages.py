"""Specs of workers, and the messages between workers and the driver.

Messages carry identities and token ids; weights and KV lie in files. The messages of a migration and of an
episode's turns are the engine's own (`dora.engine.messages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dora.core.types import GroupId, RequestId
from dora.curve import CurveAddress
from dora.engine.interface import KVTransfer
from dora.engine.messages import ContinueEpisode as ContinueEpisode
from dora.engine.messages import EndEpisode as EndEpisode
from dora.engine.messages import ExportFailed as ExportFailed
from dora.engine.messages import ExportFinished as ExportFinished
from dora.engine.messages import ImportFailed as ImportFailed
from dora.engine.messages import ImportFinished as ImportFinished
from dora.engine.messages import OutputPart as OutputPart
from dora.engine.messages import ReserveMigration as ReserveMigration
from dora.engine.messages import StartExport as StartExport
from dora.engine.messages import TurnFinished
from dora.engine.request import Completion, Request
from dora.metrics.rollout import EngineUsage
from dora.trainer.advantage import AdvantageSettings
from dora.trainer.checkpoint_folders import KeptCheckpoints

if TYPE_CHECKING:
    from dora.engine.decode_batch import PartialOutput
    from dora.stream.metadata import BatchRequest
    from dora.trainer.critic import CriticSettings
    from dora.trainer.trainer import TrainerSettings
    from dora.weights.store import RemoteVersionSource


@dataclass(frozen=True)
class EngineSpec:
    """A rollout engine; lengths in tokens.

    Paths are of the driver's machine; an actor on another one replaces them. The engine creates the file
    `pool`, from which other engines copy KV.
    """

    model: Path
    weights: Path
    pool: Path | None  # None: requests migrate without KV
    max_rows: int
    max_context: int
    version_slots: int
    kernels: str
    pace_s: float  # minimum time of a decode step
    exact: bool = False
    reads_text: bool = False  # for stop strings
    returns_routes: bool = False  # the experts of each token
    device: str = "cpu"  # or the first of `num_gpus` GPUs
    num_gpus: int = 1
    dtype: str = "float32"
    backend: str | None = None  # None: DORA-RL's own engine
    backend_options: Mapping[str, object] | None = None
    prefetches_weights: bool = False
    images: Path | None = None  # the run's images, for backends that read them
    num_kv_blocks: int | None = None  # None: as many as `max_rows` full rows need
    prefill_budget: int = 512  # prompt tokens per step
    kv_transfer: KVTransfer = "shared"  # through `pool`
    inflight_update: str | None = None  # "partial" | "inflight": requests continue with newer versions
    output_interval_s: float = 0.5  # between reports of unfinished outputs; 0: none
    host: str | None = None  # where engines of other machines read this engine's KV; None: there are none
    broker: CurveAddress | None = None  # see `remote_kv`; None: on the driver's machine
    remote_weights: RemoteVersionSource | None = None  # None: `weights` is on this machine


@dataclass(frozen=True)
class CriticSpec:
    """A critic, initialised with the decoder in the folder `model`."""

    model: Path
    settings: CriticSettings


@dataclass(frozen=True)
class TeacherSpec:
    """Teachers of a distillation: model folders, and URLs of servers with the time limit of a request."""

    folders: tuple[Path, ...]
    servers: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True)
class TrainerSpec:
    """One rank of the trainer, which starts with `checkpoint`, else with `continued`, else with `model`.

    `continued` is a checkpoint of another run, whose steps do not count. The driver sends messages to rank 0
    only.
    """

    model: Path
    weights: Path
    stream: Path
    settings: TrainerSettings
    advantage_settings: AdvantageSettings
    streams_gradients: bool  # accumulates gradients of committed groups before their batch is complete
    masks_truncated: bool = False  # responses that ended at their maximum length have no loss
    max_staleness: int = 0
    exact_engine: EngineSpec | None = None  # exact mode: log-probs are computed as this engine does
    checkpoint: Path | None = None
    continued: Path | None = None
    device: str = "cpu"
    published_dtype: str = "float32"
    peak_tflops: float | None = None
    rank: int = 0
    num_ranks: int = 1
    rank_address: str = ""  # host:port where rank 0 awaits ranks of other nodes; "": all are on one node
    rank_timeout_s: float = 600.0  # for the other ranks
    critic: CriticSpec | None = None
    columns: tuple[str, ...] = ()  # those that auxiliary workers fill
    teachers: TeacherSpec | None = None  # whose log-probs are the column "reference"
    column_timeout_s: float | None = None  # for one group's columns
    backend: str | None = None  # None: DORA-RL's own trainer


@dataclass(frozen=True)
class AuxWorkerSpec:
    """An auxiliary worker, which fills one column of the trainer's samples."""

    column: str
    trainer: TrainerSpec
    device: str = "cpu"


@dataclass(frozen=True)
class RewardSpec:
    """A reward function or class: the value `function` of the setting `key`, with `options` for a class.

    The tokenizer of the folder `model` decodes responses. `columns` are those of all datasets; None: unknown.
    `missing` maps each other column to a dataset without it.
    """

    name: str  # of the reward task
    function: str
    key: str
    model: Path
    options: Mapping[str, object] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardWorkerSpec:
    """A reward worker, which scores groups of the sample stream."""

    reward: RewardSpec
    stream: Path
    batch_request: BatchRequest
    remote: CurveAddress | None = None  # of a stream on another machine


# Messages to a worker


@dataclass(frozen=True)
class LoadWeights:
    version: int


@dataclass(frozen=True)
class PrefetchWeights:
    """The store has a version that may have to be loaded: copy it to host memory."""

    version: int


@dataclass(frozen=True)
class DropWeights:
    version: int


@dataclass(frozen=True)
class SubmitRequests:
    """`outputs` are what lost engines had generated of these requests, which continue there."""

    requests: list[Request]
    outputs: Mapping[RequestId, PartialOutput] = field(default_factory=dict)


@dataclass(frozen=True)
class AbortRequests:
    requests: tuple[RequestId, ...]


@dataclass(frozen=True)
class FailRequest:
    """Abort a request that cannot continue; the engine replies with `RequestsRejected`."""

    request_id: RequestId
    reason: str


@dataclass(frozen=True)
class CancelMigration:
    """To either engine: cancel the migration unless the destination has imported the request."""

    migration_id: int


@dataclass(frozen=True)
class SetDecodeOnly:
    """Decode these requests only; an empty tuple: decode all."""

    requests: tuple[RequestId, ...]


@dataclass(frozen=True)
class PauseDecoding:
    """Stop decoding until `ResumeDecoding`; loads and migrations continue."""


@dataclass(frozen=True)
class ResumeDecoding:
    """Continue decoding after `PauseDecoding`."""


@dataclass(frozen=True)
class Shutdown:
    """Exit; the driver expects no reply."""


@dataclass(frozen=True)
class AccumulateGroup:
    """A group was committed to a step: a trainer that streams gradients may start with it."""

    step: int
    group: GroupId


@dataclass(frozen=True)
class TrainStep:
    step: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True)
class PublishWeights:
    version: int
    is_stored: bool = True  # False: only report the digest


@dataclass(frozen=True)
class InstallWeights:
    """To the placeholder of an external trainer: `file` has the weights of this version, which end a step."""

    version: int
    file: Path
    metrics: dict[str, float]


@dataclass(frozen=True)
class SaveCheckpoint:
    """Write the checkpoint `folder`/step-N, where N is the trainer's own count of steps.

    `core` is the state of the orchestrator, as JSON. The files of the folder `versions`, older versions
    that are still needed, are moved into the checkpoint. Other checkpoints than `kept` are removed.
    """

    folder: Path
    core: str
    versions: Path
    kept: KeptCheckpoints
    fsync: bool


# Messages from a worker


@dataclass(frozen=True)
class WorkerReady:
    """The worker has started."""

    note: str = ""  # the kernels or server that it uses, for the log
    pool: Path | None = None  # the file of an engine's KV
    kv_address: CurveAddress | str | None = None  # where engines of other machines read that KV
    client_id: str = ""  # of a reward worker in the sample stream
    remote: CurveAddress | None = None  # where other machines reach the sample stream
    continues_outputs: bool = False  # an engine continues the outputs of lost ones


@dataclass(frozen=True)
class WeightsLoaded:
    """A version is loaded; decoding stopped for `stop_s` meanwhile."""

    version: int
    digest: str
    stop_s: float = 0.0


@dataclass(frozen=True)
class RequestsCompleted:
    """Requests are finished; see `Completion.without_filtered_logprobs`."""

    completions: list[Completion]
    usage: EngineUsage


@dataclass(frozen=True)
class TurnsCompleted:
    turns: list[TurnFinished]


@dataclass(frozen=True)
class RequestsRejected:
    reasons: dict[RequestId, str]


@dataclass(frozen=True)
class AbortsCompleted:
    """The reply to `AbortRequests`."""

    num_tokens: dict[RequestId, int]  # generated tokens that are discarded


@dataclass(frozen=True)
class LoadRejected:
    """A version could not be loaded; its slot is free."""

    version: int
    reason: str


@dataclass(frozen=True)
class DecodingPaused:
    """The reply to `PauseDecoding`."""


@dataclass(frozen=True)
class OutputsReported:
    """New tokens of unfinished requests, from time to time, and of an episode at the end of each turn."""

    parts: list[OutputPart]


@dataclass(frozen=True)
class EngineReport:
    """An engine's heartbeat, once a second."""

    progress: dict[RequestId, int]
    usage: EngineUsage
    row_tokens_per_s: float  # tokens per second of one decoding row since the last report; 0: none decoded
    kv_usage: float  # share of KV blocks in use
    num_recomputed: int = 0  # tokens so far whose KV was recomputed, for newer weights or after a migration


@dataclass(frozen=True)
class StepCompleted:
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class ColumnFilled:
    """An auxiliary worker has filled its column of a group."""

    column: str
    group: GroupId


@dataclass(frozen=True)
class CriticUpdated:
    """The critic of an auxiliary worker was trained on the step's batch."""

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
    """External weights do not fit the model; the step is still due."""

    version: int
    reason: str


@dataclass(frozen=True)
class CheckpointSaved:
    folder: Path


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written; earlier ones are unchanged."""

    step: int
    reason: str
    is_disk_full: bool = False


@dataclass(frozen=True)
class TaskStarted:
    """A reward worker scores these groups (none: it waits for rows); its call's timeout starts again."""

    groups: tuple[GroupId, ...]


@dataclass(frozen=True)
class TaskFailed:
    """These groups cannot be scored by a task; `detail` is for the user."""

    groups: tuple[GroupId, ...]
    reason: str
    detail: str


@dataclass(frozen=True)
class TaskCompleted:
    """These groups are scored by a task; the reward worker waits for rows."""

    values: Mapping[GroupId, tuple[float, ...]]  # sibling by sibling


@dataclass(frozen=True)
class Heartbeat:
    """Once a second, from a thread of a worker whose main thread is busy for long stretches."""


@dataclass(frozen=True)
class WorkerExited:
    """From the driver's reader thread, after a worker's last message: its channel has closed."""


@dataclass(frozen=True)
class WorkerCrashed:
    """The worker exits because of an exception."""

    traceback: str
    input_error: str = ""  # the message, if the exception is an InputError
