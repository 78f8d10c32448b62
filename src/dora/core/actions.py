"""The orders the orchestrator gives, as imperatives, in journey order.

Each names the station that carries it out; what comes of it is told later, as a fact.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora.core.records import GroupId, RequestId


@dataclass(frozen=True, slots=True)
class Fetch:
    """Dataset: hand out the next `count` groups."""

    count: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Sample store: open a group; it is generated at `version` and trained by step `deadline`."""

    group: GroupId
    index: int
    version: int
    deadline: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Engine: generate these requests on this version."""

    engine: int
    version: int
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Engine: give these requests up; their group has failed."""

    engine: int
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Migrate:
    """Engines: move a running request with its KV; `Migrated` or `MigrationFailed` is told of it."""

    request: RequestId
    source: int
    destination: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rush:
    """Engine: decode these requests only, the others stand still; none: decode all again."""

    engine: int
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """Engine: decode nothing until `Resume`, for the trainer needs the device; then tell `Paused`."""

    engine: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Engine: decode again."""

    engine: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Engine: end; it has no requests. `EngineLeft` is told of it."""

    engine: int


@dataclass(frozen=True, slots=True)
class RefuseDrain:
    """Log: the engine stays, for a reason."""

    engine: int
    reason: str


@dataclass(frozen=True, slots=True)
class Score:
    """Rewarder: score every sibling of a group."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class Filter:
    """Sample store: the group ends untrained because it cannot teach anything."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Sample store: the group ends untrained because a sibling failed."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Sample store: the group belongs to the batch of `step`."""

    group: GroupId
    step: int


@dataclass(frozen=True, slots=True)
class Train:
    """Trainer: run step `step` on these groups, which turns version `step` into `step + 1`."""

    step: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Trainer: put the weights of `version` into the weight store."""

    version: int


@dataclass(frozen=True, slots=True)
class Attest:
    """Trainer: say the digest of `version`, made again; the weight store keeps what it has of it."""

    version: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Engine: free the slot of `version`."""

    engine: int
    version: int


@dataclass(frozen=True, slots=True)
class Load:
    """Engine: take `version` from the weight store into a free slot."""

    engine: int
    version: int


@dataclass(frozen=True, slots=True)
class Skip:
    """Log: the engine does without `version`, for its own says nearly the same; the bound may still ask."""

    engine: int
    version: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Weight store: nobody needs `version` any more."""

    version: int


@dataclass(frozen=True, slots=True)
class BeginEvaluation:
    """Log: from now on `version` answers the held-out prompts, beside the training."""

    version: int


@dataclass(frozen=True, slots=True)
class SkipEvaluation:
    """Log: `version` was due for an evaluation, and that of version `under_way` is not over."""

    version: int
    under_way: int


@dataclass(frozen=True, slots=True)
class EndEvaluation:
    """Log: every held-out prompt that `version` answered is judged, or has failed."""

    version: int


@dataclass(frozen=True, slots=True)
class ReportStall:
    """Log: step `step` waits for `group`, which has reached its deadline, since `since_s`."""

    step: int
    group: GroupId
    requests: tuple[RequestId, ...]
    since_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Everyone: the last step is trained and published."""


Action = (
    Fetch
    | Admit
    | Generate
    | Abort
    | Migrate
    | Rush
    | Pause
    | Resume
    | Dismiss
    | RefuseDrain
    | Score
    | Filter
    | Fail
    | Commit
    | Train
    | Publish
    | Attest
    | Drop
    | Load
    | Skip
    | Retire
    | BeginEvaluation
    | SkipEvaluation
    | EndEvaluation
    | ReportStall
    | Stop
)
