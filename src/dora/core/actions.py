"""Actions that the orchestrator orders, as imperatives, in the order of a prompt's journey.

The first word of a docstring is the component that executes the action; it reports the outcome as an event.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora.core.types import GroupId, RequestId


class Action:
    """What the orchestrator orders."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FetchPrompts(Action):
    """Dataset: deliver the next `count` prompts."""

    count: int


@dataclass(frozen=True, slots=True)
class SkipPrompts(Action):
    """Log: these fetched prompts are not admitted: an earlier group of each was easy or hard."""

    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class Admit(Action):
    """Sample stream: open a group that is generated at `version` and trained by step `deadline`."""

    group: GroupId
    index: int
    version: int
    deadline: int


@dataclass(frozen=True, slots=True)
class Generate(Action):
    """Engine: generate these requests on `version`."""

    engine: int
    version: int
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Abort(Action):
    """Engine: abort these requests; their group has failed."""

    engine: int
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Migrate(Action):
    """Engines: move a running request with its KV; report `Migrated` or `MigrationFailed`."""

    request: RequestId
    source: int
    destination: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class DecodeOnly(Action):
    """Engine: decode these requests and preempt all others; if empty, decode all again."""

    engine: int
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class PauseEngine(Action):
    """Engine: stop decoding until `ResumeEngine`, and report `EnginePaused`; the trainer needs the device."""

    engine: int


@dataclass(frozen=True, slots=True)
class ResumeEngine(Action):
    """Engine: decode again."""

    engine: int


@dataclass(frozen=True, slots=True)
class RemoveEngine(Action):
    """Engine: exit; it has no requests. Report `EngineRemoved`."""

    engine: int


@dataclass(frozen=True, slots=True)
class RejectDrain(Action):
    """Log: the engine is not drained, for this reason."""

    engine: int
    reason: str


@dataclass(frozen=True, slots=True)
class Score(Action):
    """Reward worker: score every sibling of a group."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class Filter(Action):
    """Sample stream: end the group untrained, because its rewards carry no signal."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Fail(Action):
    """Sample stream: end the group untrained, because a sibling failed."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Commit(Action):
    """Sample stream: assign the group to the batch of `step`."""

    group: GroupId
    step: int


@dataclass(frozen=True, slots=True)
class Train(Action):
    """Trainer: run step `step` on these groups, which turns version `step` into `step + 1`."""

    step: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class Publish(Action):
    """Trainer: write the weights of `version` to the weight store."""

    version: int


@dataclass(frozen=True, slots=True)
class ReportDigest(Action):
    """Trainer: report the digest of `version`, computed again; the published weights stay as they are."""

    version: int


@dataclass(frozen=True, slots=True)
class Drop(Action):
    """Engine: free the slot of `version`."""

    engine: int
    version: int


@dataclass(frozen=True, slots=True)
class Load(Action):
    """Engine: load `version` from the weight store into a free slot."""

    engine: int
    version: int


@dataclass(frozen=True, slots=True)
class SkipLoad(Action):
    """Log: the engine does not load `version`, which hardly differs from its own."""

    engine: int
    version: int


@dataclass(frozen=True, slots=True)
class Retire(Action):
    """Weight store: delete `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class StartEvaluation(Action):
    """Log: the evaluation of `version` on the held-out prompts starts."""

    version: int


@dataclass(frozen=True, slots=True)
class SkipEvaluation(Action):
    """Log: `version` was due for an evaluation, while that of `running_version` is not finished."""

    version: int
    running_version: int


@dataclass(frozen=True, slots=True)
class FinishEvaluation(Action):
    """Log: every held-out prompt of `version` is scored or has failed."""

    version: int


@dataclass(frozen=True, slots=True)
class ReportStall(Action):
    """Log: step `step` has waited since `since_s` for `requests` of `group`, which is at its deadline."""

    step: int
    group: GroupId
    requests: tuple[RequestId, ...]
    since_s: float


@dataclass(frozen=True, slots=True)
class Stop(Action):
    """All: the last version is published and its evaluation, if there is one, has finished."""
