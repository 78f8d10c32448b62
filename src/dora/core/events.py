"""Events that workers report to the orchestrator, as past participles, in the order of a prompt's journey.

They carry identities, lengths, versions and rewards. Token data is in the sample stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora.core.types import BatchMember, Chunk, GroupId, RequestId


class Event:
    """What a worker, or the timer, reports."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class EngineJoined(Event):
    """A rollout engine is ready; it holds no version yet.

    A colocated engine shares the trainer's device and decodes only while the trainer is idle. `replaces`
    names the lost engine that this one was started for.
    """

    engine: int
    max_num_seqs: int
    version_slots: int
    is_colocated: bool = False
    replaces: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLost(Event):
    """An engine has crashed or timed out; its versions are lost, and its requests start again.

    `kept_tokens` are numbers of tokens of their responses that are durable: they continue after these,
    unless `OutputsLost` follows.
    """

    engine: int
    reason: str
    kept_tokens: tuple[tuple[RequestId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class DrainRequested(Event):
    """An operator or the autoscaler requests the removal of an engine once it has no requests."""

    engine: int


@dataclass(frozen=True, slots=True)
class EngineRemoved(Event):
    """An engine has exited after `RemoveEngine`; it had no requests."""

    engine: int


@dataclass(frozen=True, slots=True)
class EnginePaused(Event):
    """An engine has stopped decoding after `PauseEngine`; it keeps its versions, requests and KV."""

    engine: int


@dataclass(frozen=True, slots=True)
class PromptsFetched(Event):
    """The dataset has delivered prompts; the first has position `first_index` in its order."""

    first_index: int
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class ProgressReported(Event):
    """An engine reports the tokens so far of its unfinished requests, at most once a second.

    `row_tokens_per_s` is the throughput per row since the last report (0: no row ran), `kv_usage` the
    fraction of its KV blocks in use.
    """

    engine: int
    lengths: tuple[tuple[RequestId, int], ...]
    row_tokens_per_s: float = 0.0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    """A request has its last token; its tokens are durable in the sample stream.

    `payload` is the digest of its row in the sample store; "" if it is not stored.
    """

    engine: int
    request: RequestId
    version: int
    num_tokens: int
    chunks: tuple[Chunk, ...]
    finish_reason: str
    payload: str = ""


@dataclass(frozen=True, slots=True)
class RequestFailed(Event):
    """A request has failed, and its engine has freed its row."""

    engine: int
    request: RequestId
    reason: str
    cause: str = "engine"  # or "environment", which may also be an agent outside


@dataclass(frozen=True, slots=True)
class RequestsAborted(Event):
    """An engine has aborted requests after `Abort`; those that finished first are not among them."""

    engine: int
    requests: tuple[RequestId, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Migrated(Event):
    """A running request has moved with its KV; from now on only `destination` owns it.

    `num_tokens` of its response moved. `num_bytes` of KV were copied in `copy_s`; the request was paused for
    `stop_s`. Between engines with incompatible KV no bytes are copied, and the destination prefills
    `num_prefilled` tokens of prompt and response again.
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
class OutputsLost(Event):
    """Requests restart from their prompts whose tokens `EngineLost` or `Resumed` had counted as kept.

    For example the next engine cannot continue outputs. `RequestFailed` has the same effect for its request.
    Without effect for other requests.
    """

    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class MigrationFailed(Event):
    """A request stays with `source`; `destination` has freed the row reserved for it."""

    request: RequestId
    source: int
    destination: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupScored(Event):
    """Every sibling has a reward, and all columns that the trainer needs are stored."""

    group: GroupId
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ScoringFailed(Event):
    """A sibling could not be scored, which fails its group."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class Trained(Event):
    """Training step `step` has consumed its batch.

    `ess` (fraction of the tokens) and `kl` (nats per token) measure how far the policy in training was from
    the policies that sampled the batch; None if not measured. `kls` has the same KL per version: (version,
    KL).
    """

    step: int
    ess: float | None = None
    kl: float | None = None
    kls: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """Training step `step` has failed without changing the weights."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Published(Event):
    """The weights of `version` are in the weight store."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class TrainerLost(Event):
    """The trainer is lost, and a running step with it; published versions remain.

    The event repeats if a replacement is lost before it was ready.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class TrainerReplaced(Event):
    """A new trainer has loaded the checkpoint of `from_step` trained steps; the engines kept running.

    `redone` are the batches of the later steps that had been trained, in order, as they were committed.
    """

    from_step: int
    redone: tuple[tuple[GroupId, ...], ...]


@dataclass(frozen=True, slots=True)
class DigestReported(Event):
    """A new trainer has reached `version` again, with this digest; the published weights stay as they are."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """An engine has loaded `version`; the digest is that of the bytes in its memory.

    Its requests were paused for `stop_s`.
    """

    engine: int
    version: int
    digest: str
    stop_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadFailed(Event):
    """An engine could not load `version`; the slot is empty."""

    engine: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """All processes of the run were replaced; training resumes at the checkpoint of `from_step` trained
    steps.

    `kept_versions` (version, digest) are older than the checkpoint and still in the weight store. Later steps
    are void; `redone` are their batches, in order. From here on the run has `num_steps` steps, if that is
    set, and the learning rate of the steps that were never trained decays by `lr_decay` to a fraction
    `min_lr_ratio` of its peak. `kept_tokens` as in `EngineLost`.
    """

    from_step: int
    kept_versions: tuple[tuple[int, str], ...]
    redone: tuple[tuple[BatchMember, ...], ...]
    num_steps: int | None = None  # more than before; None: as before
    lr_decay: str | None = None  # set with `num_steps`; of no effect on actions
    kept_tokens: tuple[tuple[RequestId, int], ...] = ()
    min_lr_ratio: float = 0.0  # as `lr_decay`


@dataclass(frozen=True, slots=True)
class TimerFired(Event):
    """The time returned by `Orchestrator.next_wakeup` has come."""
