"""The protocols of inference engines and training engines.

`dora.engine.engine.Engine` and `dora.trainer.trainer.Trainer` implement them, and so may other classes,
which `engine.backend` and `trainer.backend` name. `dora.testing` has contract tests for them;
docs/backends.md is the guide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from dora.core.types import RequestId
from dora.engine.request import Completion, Request

if TYPE_CHECKING:
    from torch import Tensor

    from dora.model.config import ModelConfig
    from dora.trainer.settings import Sample, TrainerSettings


@dataclass(frozen=True)
class Capabilities:
    """What an inference engine supports beyond `InferenceEngine`'s required behaviour.

    A run whose configuration needs a missing capability is rejected before it starts. Exact log-probs are
    rejected with every backend but DORA-RL's own engine.
    """

    max_versions: int | None = 1  # loaded at once; None: `version_slots`
    versions_are_lora: bool = False  # versions are LoRA adapters of the run's first model
    is_seeded: bool = False  # a request's tokens depend on its seed alone, not on other requests
    filters: bool = False  # top_k, top_p, min_p
    eval_filters: bool = False  # without `filters`: in evaluations, with log-probs after the filters
    stop_strings: bool = False
    pauses: bool = False  # `pause` and `resume`
    decode_only: int = 0  # least `version_slots` with which it has `decode_only`; 0: never
    migrates_without_kv: bool = False  # running requests migrate as tokens; see `SupportsMigration`
    kv_transfer: bool = False  # also with their KV, between engines of one backend; takes the keyword `pool`
    episodes: bool = False  # multi-turn requests; see `SupportsEpisodes`
    tensor_parallel: bool = False  # divides the model among several GPUs; takes the keyword `num_gpus`
    inflight_update: bool = False  # running requests continue with newer versions; takes this keyword
    routes: bool = False  # completions contain the experts of each token; takes `returns_routes`
    images: bool = False  # prompts with images, see `dora.model.images`; takes the keyword `images`
    dtypes: tuple[str, ...] = ("float32",)
    devices: tuple[str, ...] = ("cpu",)


KVTransfer = Literal["shared", "staged", "ipc"]  # of DORA-RL's own engine; see `Engine`

NATIVE = Capabilities(
    max_versions=None,
    is_seeded=True,
    filters=True,
    stop_strings=True,
    pauses=True,
    decode_only=1,
    migrates_without_kv=True,
    kv_transfer=True,
    episodes=True,
    inflight_update=True,
    routes=True,
    dtypes=("float32", "bfloat16"),
    devices=("cpu", "cuda"),
)


class InferenceEngine(Protocol):
    """Generates completions. It belongs to one thread and never blocks.

    Its class has an attribute `capabilities` and takes the keywords of `InferenceFactory`. A call that the
    engine cannot serve raises `dora.engine.request.EngineError` and changes nothing.
    """

    busy_row_s: float  # decoding requests times wall time, summed over steps
    num_decoded: int  # output tokens so far

    @property
    def kernels(self) -> str:
        """What computes here, for the log."""

    @property
    def versions(self) -> Mapping[int, str]:
        """Loaded versions and the digests of their bytes in the engine's memory."""

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV memory in use, 0 to 1."""

    @property
    def can_step(self) -> bool:
        """Whether `step` has anything to do."""

    def load(self, version: int, source: Tensor) -> str:
        """Copy the weights of a version from a flat buffer [numel]; returns the digest of the loaded bytes.

        The caller reuses the buffer, so an engine that keeps views of it would break C1.
        `dora.model.weights.WeightLayout` has the offset of each Hugging Face parameter. Raises EngineError
        if the version is loaded already, no slot is free, or the buffer does not fit the model.
        """

    def drop(self, version: int) -> None:
        """Unload a version. Raises EngineError if it is unknown or has unfinished requests."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue any number of requests; each is completed by its own version.

        Raises EngineError with `rejected` for those that cannot run; all others are queued.
        """

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        """Abort requests, ignoring unknown ids; returns the output tokens lost for each."""

    def progress(self) -> dict[RequestId, int]:
        """Output tokens so far of each unfinished request."""

    def step(self) -> list[Completion]:
        """Do a short piece of work, ideally one token per row; returns new completions."""

    def decode_only(self, ids: Iterable[RequestId]) -> None:
        """Decode only these requests until none of them is running; no ids: decode all.

        Called with ids only if the capability `decode_only` says so. Every engine accepts no ids, because an
        evaluation makes all engines decode everything.
        """

    def pause(self) -> None:
        """Make `step` do nothing until `resume`. Called only if the capability `pauses` is set."""

    def resume(self) -> None:
        """Decode again. Every engine accepts it, also if it is not paused."""


@runtime_checkable
class RecomputesKV(Protocol):
    """What an engine implements beside `InferenceEngine` if it recomputes KV of its own requests."""

    num_recomputed: int  # tokens so far


@runtime_checkable
class SupportsWarmUp(Protocol):
    """What an engine implements beside `InferenceEngine` if its first requests would be slow."""

    def warm_up(self) -> None:
        """Compile what the first requests need. The engine is ready afterwards; it has no version yet."""


@runtime_checkable
class LoadsFiles(Protocol):
    """What an engine implements beside `InferenceEngine` if it reads a version where it is published.

    Other versions generate meanwhile.
    """

    def start_load(self, version: int, path: Path) -> Future[str]:
        """Begin to load a version's file of a weight store, which may be deleted afterwards.

        The future has the digest of what was read, or an EngineError. Raises EngineError as `load`.
        """

    def activate(self, version: int, digest: str) -> str:
        """Accept requests of a version that was read, with the digest of its future; returns it."""


class InferenceFactory(Protocol):
    """The class of an engine. `model` is a Hugging Face folder; `max_context` is in tokens.

    With the capability `inflight_update` it also takes this keyword: "partial" or "inflight", as
    `orchestrator.update_policy`. It is not given under other policies, where requests keep their version.
    With `kv_transfer` it takes `pool`, a path in memory that other engines on the machine can read, or None.
    If it takes `host`, it gets the machine's address if the run has several, else None.
    With `images` it takes `images`, the path of the run's `ImageFolder`. With `routes` it takes
    `returns_routes` in runs that need them.
    """

    capabilities: Capabilities

    def __call__(
        self, *, model: str, max_rows: int, max_context: int, version_slots: int, device: str, dtype: str
    ) -> InferenceEngine:
        """An engine without any version."""


class TrainingEngine(Protocol):
    """Trains one policy. The samples of a batch arrive in pieces, in the order of its groups."""

    num_steps_done: int

    @property
    def flat(self) -> Tensor:
        """The current weights [numel], fp32, in the order of `dora.model.weights.WeightLayout`."""

    @property
    def can_accumulate(self) -> bool:
        """Whether `accumulate` has anything to do with the samples so far."""

    @property
    def num_accumulated_tokens(self) -> int:
        """Output tokens of the next step's batch that went through the model."""

    def add_samples(self, samples: Sequence[Sample], is_whole_batch: bool = False) -> None:
        """Add whole groups to the next step's batch; `is_whole_batch`: these samples are all of it.

        A batch without any sample, whose responses are all masked, is a step without gradient.
        """

    def accumulate(self) -> None:
        """Compute a part of the next step's gradient before the batch is complete."""

    def finish_step(self) -> dict[str, float]:
        """Step on the complete batch; returns metrics, "actor/num_tokens" among them.

        Raises RunError if the gradient is not finite. After any exception the weights are unchanged.
        """

    def discard_batch(self) -> None:
        """Discard the samples and the gradient of the next step's batch."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps beside the weights: numbers, tensors, dicts and lists."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, with the weights of the same step."""


class TrainingFactory(Protocol):
    """The class of a training engine."""

    def __call__(
        self, *, config: ModelConfig, flat: Tensor, settings: TrainerSettings, device: str
    ) -> TrainingEngine:
        """A trainer of the weights `flat` [numel], fp32. Raises InputError for unsupported settings."""


def required_members(protocol: type) -> list[str]:
    """The names of the members of `InferenceEngine` or `TrainingEngine`."""
    return [name for name in (*protocol.__annotations__, *vars(protocol)) if not name.startswith("_")]
