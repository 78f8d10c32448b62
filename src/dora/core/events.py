"""The facts a station may tell, as past participles, in journey order.

They carry identities, lengths, versions and rewards; payloads lie in the sample store already.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora.core.records import Chunk, GroupId, RequestId


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """A rollout engine is ready; it holds no version yet."""

    engine: int
    rows: int
    slots: int


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine is gone, with every version and request it had."""

    engine: int
    reason: str


@dataclass(frozen=True, slots=True)
class PromptsFetched:
    """The dataset hands out groups; the first stands at position `first_index` of its order."""

    first_index: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class Progressed:
    """At most once a second: tokens so far of the unfinished requests of an engine."""

    engine: int
    lengths: tuple[tuple[RequestId, int], ...]


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request has its last token; its tokens are durable in the sample store."""

    engine: int
    request: RequestId
    version: int
    num_tokens: int
    chunks: tuple[Chunk, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """An engine refused a request; it no longer holds it."""

    engine: int
    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class RequestsAborted:
    """An engine gave up requests it was ordered to abort; finished ones are not among them."""

    engine: int
    requests: tuple[RequestId, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GroupScored:
    """Every sibling has a reward; all columns that the trainer needs are there."""

    group: GroupId
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GroupUnscorable:
    """One sibling could not be scored, which fails its group."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Trained:
    """Training step `step` has consumed its batch."""

    step: int


@dataclass(frozen=True, slots=True)
class Published:
    """The weights of `version` are in the weight store."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine holds `version`; the digest is of the bytes it holds."""

    engine: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Woken:
    """The time that `next_wakeup` asked for has come."""


Event = (
    EngineJoined
    | EngineLost
    | PromptsFetched
    | Progressed
    | RequestFinished
    | RequestFailed
    | RequestsAborted
    | GroupScored
    | GroupUnscorable
    | Trained
    | Published
    | Loaded
    | Woken
)
