"""What travels through the pipes between the driver and its worker processes.

Identities and token ids; weights and KV never do, they lie in files. The words of a move are the
engine's own: see `dora.handover.moves`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dora.core.records import GroupId, RequestId
from dora.engine.sequence import Completion, Request
from dora.handover.moves import Kept as Kept
from dora.handover.moves import NotReceived as NotReceived
from dora.handover.moves import Receive as Receive
from dora.handover.moves import Received as Received
from dora.handover.moves import Reserved as Reserved
from dora.handover.moves import Send as Send
from dora.handover.moves import Sent as Sent
from dora.runtime.occupancy import Use
from dora.runtime.sealed import Address
from dora.runtime.specs import CriticSpec as CriticSpec
from dora.runtime.specs import EngineSpec as EngineSpec
from dora.runtime.specs import StationSpec as StationSpec
from dora.runtime.specs import TrainerSpec as TrainerSpec
from dora.turns.words import Finish as Finish
from dora.turns.words import Observe as Observe
from dora.turns.words import TurnEnded

# to a worker


@dataclass(frozen=True)
class LoadWeights:
    version: int


@dataclass(frozen=True)
class StageWeights:
    """A version is in the store: bring it near, for it may have to be loaded."""

    version: int


@dataclass(frozen=True)
class DropWeights:
    version: int


@dataclass(frozen=True)
class Submit:
    requests: list[Request]


@dataclass(frozen=True)
class GiveUp:
    requests: tuple[RequestId, ...]


@dataclass(frozen=True)
class Break:
    """The request has failed, though its engine could go on: it answers `Refused`."""

    request: RequestId
    reason: str


@dataclass(frozen=True)
class CancelMove:
    """To either side: end the move if the request has not been taken yet."""

    move: int


@dataclass(frozen=True)
class RushRows:
    """Decode these requests only, the others stand still; none: decode all again."""

    requests: tuple[RequestId, ...]


@dataclass(frozen=True)
class PauseRows:
    """Decode nothing until `ResumeRows`; everything else goes on."""


@dataclass(frozen=True)
class ResumeRows:
    """Decode again."""


@dataclass(frozen=True)
class Leave:
    """End the process; no more is expected of it."""


@dataclass(frozen=True)
class Accumulate:
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
class TakeWeights:
    """To the stand-in of a trainer outside: the weights in `file` are this version, and end a step."""

    version: int
    file: Path
    metrics: dict[str, float]


@dataclass(frozen=True)
class Save:
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
class Ready:
    """The worker has started; `note` says what it runs on, `pool` is the file of an engine's KV, if any.

    Engines of other machines read it at the `door`. In the sample stream it is the `client` of this name.
    """

    note: str = ""
    pool: Path | None = None
    door: Address | None = None
    client: str = ""


@dataclass(frozen=True)
class Serving:
    """The storage of the sample stream is there: for other machines, at an endpoint, with a token."""

    far: tuple[str, str] | None


@dataclass(frozen=True)
class WeightsLoaded:
    """A version is held; requests stood still for `stop_s` meanwhile."""

    version: int
    digest: str
    stop_s: float = 0.0


@dataclass(frozen=True)
class Completed:
    completions: list[Completion]
    use: Use


@dataclass(frozen=True)
class TurnsEnded:
    turns: list[TurnEnded]


@dataclass(frozen=True)
class Refused:
    reasons: dict[RequestId, str]


@dataclass(frozen=True)
class GivenUp:
    num_tokens: dict[RequestId, int]


@dataclass(frozen=True)
class LoadRefused:
    """A version could not be loaded; its slot is free."""

    version: int
    reason: str


@dataclass(frozen=True)
class RowsPaused:
    """The engine decodes no more until `ResumeRows`."""


@dataclass(frozen=True)
class Beat:
    """Once a second: a sign of life, and how the engine is doing.

    `row_tokens_per_s` is what one decoding row gained per second since the last beat (0: none
    decoded), `kv_share` the share of KV blocks in use. `num_recomputed` tokens so far had their KV computed
    again here, for newer weights or after a move that failed.
    """

    progress: dict[RequestId, int]
    use: Use
    row_tokens_per_s: float
    kv_share: float
    num_recomputed: int = 0


@dataclass(frozen=True)
class StepDone:
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Filled:
    """A station beside the trainer has filled its column of a group."""

    column: str
    group: GroupId


@dataclass(frozen=True)
class Learnt:
    """A critic beside the trainer has learnt from the step's batch."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class StepRefused:
    """A training step failed before it changed anything."""

    step: int
    reason: str


@dataclass(frozen=True)
class WeightsPublished:
    version: int
    digest: str


@dataclass(frozen=True)
class WeightsRefused:
    """Weights from outside do not fit the model; the step is due as before."""

    version: int
    reason: str


@dataclass(frozen=True)
class Saved:
    folder: Path


@dataclass(frozen=True)
class SaveRefused:
    """A checkpoint could not be written; the ones before are as they were."""

    step: int
    reason: str


@dataclass(frozen=True)
class Working:
    """A worker is at these groups; none: it waits for rows. The time of a call begins."""

    groups: tuple[GroupId, ...]


@dataclass(frozen=True)
class Unable:
    """A task cannot do these groups."""

    groups: tuple[GroupId, ...]
    reason: str
    detail: str


@dataclass(frozen=True)
class NoRoom:
    """A worker ends, for the stream had no room for what it has made; it is somebody else's to do again."""

    reason: str


@dataclass(frozen=True)
class Judgement:
    """The collector's word, from a thread of the driver: all reward tasks are done with a group.

    `rewards` has those of each task, sibling by sibling.
    """

    group: GroupId
    rewards: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Alive:
    """Once a second, from a thread of a worker whose main thread works in long pieces."""


@dataclass(frozen=True)
class Gone:
    """The driver's own note, after a worker's last word: its pipe has closed."""


@dataclass(frozen=True)
class Crashed:
    """The worker met an exception and ends; `refusal` is what was wrong with what it was given."""

    traceback: str
    refusal: str = ""
