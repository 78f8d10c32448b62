"""What an inference engine and a training engine must offer to stand behind DORA.

DORA's own are `dora.engine.engine.Engine` and `dora.trainer.trainer.Trainer`; any class of the same shape
takes their place (`engine.adapter`, `trainer.adapter`). `dora.contract` has tests that anybody can run
against one, docs/adapters.md tells how.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dora.core.records import RequestId
from dora.engine.sequence import Completion, Request

if TYPE_CHECKING:
    from torch import Tensor

    from dora.model.config import ModelConfig
    from dora.trainer.settings import Sample, TrainerSettings


@dataclass(frozen=True)
class Capabilities:
    """What an inference engine can do beyond generating; what is not said, it cannot.

    A run whose configuration asks for something else is refused before it starts, and so is one that asks an
    adapter to tell the experts of each token, or for exact log-probs.
    """

    max_versions: int | None = 1  # that one engine holds at once; None: as many as version_slots says
    are_adapters: bool = False  # versions are low-rank adapters of the model that the run begins with
    is_seeded: bool = False  # a request's tokens depend on its seed alone, not on what else is generated
    filters: bool = False  # top_k, top_p, min_p
    stop_strings: bool = False
    pauses: bool = False  # stands still between `pause` and `resume`
    rushes: bool = False  # decodes some requests while others stand still
    reprefills: bool = False  # hands running requests over and takes them, without KV; see `MovesRequests`
    episodes: bool = False  # answers of several turns, with others' words in between; see `TurnTaking`
    dtypes: tuple[str, ...] = ("float32",)
    devices: tuple[str, ...] = ("cpu",)


NATIVE = Capabilities(
    max_versions=None,
    is_seeded=True,
    filters=True,
    stop_strings=True,
    pauses=True,
    rushes=True,
    reprefills=True,
    episodes=True,
    dtypes=("float32", "bfloat16"),
    devices=("cpu", "cuda"),
)


class InferenceEngine(Protocol):
    """Generates answers; it belongs to one thread, and waits for nobody.

    An adapter's class has an attribute `capabilities` and is made with the keywords of `InferenceFactory`.
    What it is asked and cannot do raises `dora.engine.sequence.EngineError`, and changes nothing.
    """

    busy_row_s: float  # requests that were decoded times wall time, summed over steps
    num_decoded: int  # tokens of answers so far

    @property
    def kernels(self) -> str:
        """What computes here, for the person who reads the log."""

    @property
    def versions(self) -> Mapping[int, str]:
        """Versions held, and the digests of their bytes as they lie here."""

    @property
    def kv_share(self) -> float:
        """Share of the KV memory in use (0 to 1)."""

    @property
    def can_step(self) -> bool:
        """Whether `step` has anything to do."""

    def load(self, version: int, source: Tensor) -> str:
        """Copy the weights of a version, a flat buffer [numel]; returns the digest of the bytes held.

        The buffer may have other weights afterwards, so views of it would break C1.
        `dora.model.weights.Layout` says where each Hugging Face parameter lies in it. Raises EngineError
        where the version is held already, there is no place, or the buffer does not fit the model.
        """

    def drop(self, version: int) -> None:
        """Forget a version. Raises EngineError if it is unknown or has unfinished requests."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests, more than there are rows, too; each is answered by its version, to its end.

        Raises EngineError with `refused` for those that cannot run; all others are taken.
        """

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        """Give up those of these requests that are here; tokens thrown away, by request."""

    def progress(self) -> dict[RequestId, int]:
        """Tokens so far of every unfinished request."""

    def step(self) -> list[Completion]:
        """A short piece of work, a token for each row at best; the answers that are finished with it."""

    def rush(self, ids: Iterable[RequestId]) -> None:
        """Decode these requests only, until none of them is left; none: all. If it `rushes`."""

    def pause(self) -> None:
        """Make `step` do nothing until `resume`. If it `pauses`."""

    def resume(self) -> None:
        """Decode again."""


@runtime_checkable
class Recomputing(Protocol):
    """What an engine has beside `InferenceEngine` that computes KV again for requests that are its own."""

    num_recomputed: int  # tokens so far


class InferenceFactory(Protocol):
    """An adapter's class. `model` is a folder in the Hugging Face format; lengths are in tokens."""

    capabilities: Capabilities

    def __call__(
        self, *, model: str, max_rows: int, max_context: int, version_slots: int, device: str, dtype: str
    ) -> InferenceEngine:
        """An engine that holds no version yet."""


class TrainingEngine(Protocol):
    """Steps one policy; a batch is put piece by piece, in the order of its groups."""

    num_steps_done: int

    @property
    def flat(self) -> Tensor:
        """The weights as they are now, [numel], fp32, as `dora.model.weights.Layout` orders them."""

    @property
    def can_work(self) -> bool:
        """Whether `work` has anything to do with what was put so far."""

    @property
    def num_accumulated(self) -> int:
        """Answer tokens of the next step's batch that went through the model."""

    def put(self, samples: Sequence[Sample], is_whole: bool = False) -> None:
        """Take up whole groups of the next step's batch; `is_whole`: this is all of it."""

    def work(self) -> None:
        """A piece of work for the next step's gradient, before the batch is complete."""

    def finish(self) -> dict[str, float]:
        """The batch is complete: step, and return metrics, "actor/num_tokens" among them.

        Raises RunError where the gradient is not finite. Whatever is raised, the weights are as before.
        """

    def forget(self) -> None:
        """Begin the step's batch anew."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights: numbers, tensors, and dicts and lists of them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, with the weights of the same step."""


class TrainingFactory(Protocol):
    """An adapter's class."""

    def __call__(
        self, *, config: ModelConfig, flat: Tensor, settings: TrainerSettings, device: str
    ) -> TrainingEngine:
        """A trainer of the weights `flat` [numel], fp32. Raises InputError for settings it does not know."""


def members(protocol: type) -> list[str]:
    """What `InferenceEngine` or `TrainingEngine` asks for, by name."""
    return [name for name in (*protocol.__annotations__, *vars(protocol)) if not name.startswith("_")]
