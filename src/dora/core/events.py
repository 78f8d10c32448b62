"""The facts a station may tell, as past participles, in journey order.

They carry identities, lengths, versions and rewards; payloads lie in the sample store already.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora.core.records import Chunk, GroupId, Member, RequestId


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """A rollout engine is ready; it holds no version yet.

    One that shares its device with the trainer (`is_colocated`) decodes only while the trainer rests. It may
    have been started because the engine that it `replaces` was lost.
    """

    engine: int
    rows: int
    slots: int
    is_colocated: bool = False
    replaces: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine is gone, with every version and request it had."""

    engine: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Somebody wants an engine to leave once it has no request any more."""

    engine: int


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """An engine that was dismissed has ended; it had no requests."""

    engine: int


@dataclass(frozen=True, slots=True)
class Paused:
    """An engine that was ordered to pause decodes no more; it keeps its versions, requests and KV."""

    engine: int


@dataclass(frozen=True, slots=True)
class PromptsFetched:
    """The dataset hands out groups; the first stands at position `first_index` of its order."""

    first_index: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class Progressed:
    """At most once a second: tokens so far of the unfinished requests of an engine, and its pace.

    `row_tokens_per_s` is what one row gained per second since the last report (0: no row ran),
    `kv_share` the share of its KV blocks in use.
    """

    engine: int
    lengths: tuple[tuple[RequestId, int], ...]
    row_tokens_per_s: float = 0.0
    kv_share: float = 0.0


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
class Migrated:
    """`destination` has taken a running request with its KV, and alone owns it from now on.

    `num_tokens` of its answer came along; `num_bytes` of KV took `copy_s` to copy, while the
    request stood still for `stop_s`. Between engines that cannot read each other's KV it came without, and
    that of `num_prefilled` tokens, of prompt and answer, is computed again.
    """

    request: RequestId
    source: int
    destination: int
    num_tokens: int
    num_bytes: int
    copy_s: float
    stop_s: float
    num_prefilled: int = 0


@dataclass(frozen=True, slots=True)
class MigrationFailed:
    """A request that was ordered to move stays with `source`; `destination` has freed its place."""

    request: RequestId
    source: int
    destination: int
    reason: str


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
    """Training step `step` has consumed its batch.

    `ess` (share of the tokens) and `kl` (nats per token) say how far the policy in training was from those
    that sampled the batch; None where nothing was measured. `kls` has the same KL of each version's samples.
    """

    step: int
    ess: float | None = None
    kl: float | None = None
    kls: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Training step `step` has failed and changed nothing."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """The weights of `version` are in the weight store."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class TrainerLost:
    """The trainer is gone, with the step it was in. What it has published stays."""

    reason: str


@dataclass(frozen=True, slots=True)
class TrainerReplaced:
    """A new trainer is ready, with the checkpoint of `from_step` trained steps; engines have gone on.

    `redone` are the batches of the later steps that were trained, in order, each as it was committed.
    """

    from_step: int
    redone: tuple[tuple[GroupId, ...], ...]


@dataclass(frozen=True, slots=True)
class Attested:
    """A new trainer has come to `version`, with bytes of this digest; what was published stays as it is."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine holds `version`; the digest is of the bytes it holds.

    Its requests stood still for `stop_s` meanwhile.
    """

    engine: int
    version: int
    digest: str
    stop_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """An engine could not take `version`; its slot is empty."""

    engine: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """All processes had died; new ones go on from the checkpoint of `from_step` trained steps.

    Versions in `kept` (version, digest) are older and still in the weight store. The later steps that
    were trained are void; `redone` are their batches, in order.
    """

    from_step: int
    kept: tuple[tuple[int, str], ...]
    redone: tuple[tuple[Member, ...], ...]


@dataclass(frozen=True, slots=True)
class Woken:
    """The time that `next_wakeup` asked for has come."""


Event = (
    EngineJoined
    | EngineLost
    | DrainAsked
    | EngineLeft
    | Paused
    | PromptsFetched
    | Progressed
    | RequestFinished
    | RequestFailed
    | RequestsAborted
    | Migrated
    | MigrationFailed
    | GroupScored
    | GroupUnscorable
    | Trained
    | StepFailed
    | Published
    | TrainerLost
    | TrainerReplaced
    | Attested
    | Loaded
    | LoadFailed
    | Resumed
    | Woken
)
