"""What travels through the pipes between the driver and its worker processes.

Identities and token ids; weights and KV never do, they lie in files. The words of a move are the
engine's own: see `dora.engine.moves`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dora.core.records import GroupId, RequestId
from dora.engine.moves import Kept as Kept
from dora.engine.moves import NotReceived as NotReceived
from dora.engine.moves import Receive as Receive
from dora.engine.moves import Received as Received
from dora.engine.moves import Reserved as Reserved
from dora.engine.moves import Send as Send
from dora.engine.moves import Sent as Sent
from dora.engine.sequence import Completion, Request
from dora.rewards.base import Outcome

if TYPE_CHECKING:
    from dora.trainer.trainer import TrainerSettings  # brings torch, which a rewarder does not need

# specifications: everything a worker needs to start


@dataclass(frozen=True)
class EngineSpec:
    """A rollout engine; lengths in tokens. Its KV blocks lie in the file `pool`, which it makes."""

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


@dataclass(frozen=True)
class TrainerSpec:
    """The trainer."""

    model: Path
    weights: Path
    samples: Path
    settings: TrainerSettings


@dataclass(frozen=True)
class RewarderSpec:
    """A rewarder: the function's name, and the model folder whose tokenizer decodes responses."""

    function: str
    model: Path


# to a worker


@dataclass(frozen=True)
class LoadWeights:
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
class TrainStep:
    step: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True)
class PublishWeights:
    version: int


@dataclass(frozen=True)
class Save:
    """Write the checkpoint `folder`/step-N, where N is the trainer's own count of steps."""

    folder: Path


@dataclass(frozen=True)
class Judge:
    group: GroupId
    prompt: str
    fields: dict[str, object]
    responses: list[list[int]]


# from a worker


@dataclass(frozen=True)
class Ready:
    """The worker has started; `note` says what it runs on, `pool` is the file of an engine's KV blocks."""

    note: str = ""
    pool: Path | None = None


@dataclass(frozen=True)
class WeightsLoaded:
    version: int
    digest: str


@dataclass(frozen=True)
class Completed:
    completions: list[Completion]
    busy_row_s: float


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
    decoded), `kv_share` the share of KV blocks in use.
    """

    progress: dict[RequestId, int]
    busy_row_s: float
    row_tokens_per_s: float
    kv_share: float


@dataclass(frozen=True)
class StepDone:
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
class Saved:
    folder: Path


@dataclass(frozen=True)
class Judged:
    """One sibling has been judged."""

    group: GroupId
    sibling: int
    outcome: Outcome


@dataclass(frozen=True)
class Alive:
    """Once a second, from a thread of a worker whose main thread works in long pieces."""


@dataclass(frozen=True)
class Gone:
    """The driver's own note, after a worker's last word: its pipe has closed."""


@dataclass(frozen=True)
class Crashed:
    """The worker met an exception and ends."""

    traceback: str
