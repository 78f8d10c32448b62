"""A trainer outside the run: it fetches batches and publishes weights through the service.

In its place the run has a stand-in, a process with the words of a trainer: it holds the weights that came
last, publishes them for the engines and writes checkpoints. So neither the orchestrator nor the driver's
hands know that a step is computed elsewhere.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dora.core.types import GroupId
from dora.errors import ModelError, ServiceError
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import Worker, WorkerInbox, WorkerMessages, WorkerOutbox
from dora.runtime.training.checkpoints import write_checkpoint
from dora.text import plural

if TYPE_CHECKING:
    from torch import Tensor


INCOMING_DIR = "incoming"  # in the run's folder: where a trainer on the same machine puts its weights
WEIGHTS = "model.safetensors"  # the name that a model folder gives them


def run_placeholder(outbox: WorkerOutbox, inbox: WorkerInbox, spec: m.TrainerSpec) -> None:
    """Hold the newest weights: those of the start, of a checkpoint, or the last that were taken."""
    from dora.model.pretrained import load_pretrained
    from dora.trainer.checkpoint import load_checkpoint
    from dora.weights.store import WeightStore

    outbox.start_heartbeat()
    store, step = WeightStore(spec.weights, spec.published_dtype), 0
    if spec.checkpoint is None:
        _, flat = load_pretrained(spec.model)
    else:
        _, flat, _, step = load_checkpoint(spec.checkpoint)
    outbox.send(m.WorkerReady())
    while True:
        for message in inbox.receive(None):
            match message:
                case m.InstallWeights(version, file, metrics):
                    try:
                        flat, step = read_weights(file, spec.model), version
                    except (ModelError, OSError) as error:
                        outbox.send(m.WeightsRejected(version, str(error)))
                    else:
                        outbox.send(m.StepCompleted(version - 1, metrics))
                case m.PublishWeights(version):
                    outbox.send(m.WeightsPublished(version, store.publish(version, flat)))
                case m.SaveCheckpoint():
                    outbox.send(write_checkpoint(message, spec.model, flat, step, lambda: ({}, {})))


def read_weights(file: Path, model: Path) -> Tensor:
    """The flat fp32 weights [numel] of a safetensors file with the tensors of the model in a folder.

    Raises ModelError for a file that is none, and for a tensor that is missing, extra, of another shape or
    dtype, or not finite.
    """
    from dora.model.pretrained import load_pretrained

    with tempfile.TemporaryDirectory(dir=file.parent) as name:
        folder = Path(name)
        shutil.copyfile(model / "config.json", folder / "config.json")
        (folder / WEIGHTS).symlink_to(file.absolute())
        try:
            return load_pretrained(folder)[1]
        except ModelError as error:  # of a place that is nobody's business
            raise ModelError(str(error).replace(str(folder / WEIGHTS), "the file")) from error
        except Exception as error:  # a shape that no model has, say: whatever was sent, the run goes on
            raise ModelError(
                f"the file cannot be read as weights ({type(error).__name__}); send the names, shapes and "
                "number of tensors of model.path"
            ) from error


class CommittedGroups(NamedTuple):
    """Groups of a step's batch from some place on; `is_whole`: no more will come."""

    groups: list[GroupId]
    is_whole: bool


@dataclass
class WeightUpload:
    """Weights from outside and what came of them. `sha256` is of their file, `digest` of what engines get."""

    version: int
    sha256: str
    is_taken: bool = False
    refusal: str = ""
    digest: str = ""


class ExternalTrainer(Worker):
    """The stand-in as the driver sees it, and the driver as a trainer outside sees it.

    What the hands tell a trainer passes here: which groups are committed to each step, and which step is
    due. Methods that return None have nothing to say yet.
    """

    def __init__(self, spec: m.TrainerSpec, batch_size: int, told: WorkerMessages) -> None:
        super().__init__("stand-in of the trainer", run_placeholder, spec, told)
        self.num_trained: int | None = None  # steps; None: the run has not begun
        self.due_step: int | None = None  # the step whose batch is whole and whose weights are awaited
        self._batch_size = batch_size
        self._batches: dict[int, list[GroupId]] = {}  # of steps to come, in the order of commitment
        self._upload: WeightUpload | None = None  # the last one

    def send(self, message: object) -> None:
        """Keep what is for who trains outside, and pass on the rest."""
        match message:
            case m.AccumulateGroup(step, group):
                self._batches.setdefault(step, []).append(group)
            case m.TrainStep(step, groups):
                self._batches[step], self.due_step = [*groups], step
            case m.PublishWeights(version):
                self.num_trained = version
                super().send(message)
            case _:
                super().send(message)

    def on_message(self, message: object) -> object | None:
        """Note what the stand-in says, and pass on what is not for who trains outside alone."""
        upload = self._upload
        match message:
            case m.WeightsRejected(_, reason) if upload is not None:
                upload.refusal = reason
                return None
            case m.StepCompleted(step) if upload is not None:
                upload.is_taken, self.due_step = True, None
                del self._batches[step]
            case m.WeightsPublished(version, digest) if upload is not None and version == upload.version:
                upload.digest = digest
        return message

    @property
    def is_installing(self) -> bool:
        """Whether weights are being read, so that the step that is due may end at any time."""
        return self._upload is not None and not (self._upload.is_taken or self._upload.refusal)

    def committed_groups(self, step: int, after: int) -> CommittedGroups | None:
        """Groups of the next step's batch but for the first `after`; None: no others yet.

        Raises ServiceError for another step. Who waited for a later one would wait for ever, where a run that
        was resumed waits for the weights of an earlier one.
        """
        if self.num_trained is None:
            return None
        if step != self.num_trained:
            is_old = step < self.num_trained
            why = "is trained already" if is_old else "comes later"
            raise ServiceError(410 if is_old else 409, f"step {step} {why}; the next is {self.num_trained}")
        groups = self._batches.get(step, [])
        if after > len(groups):
            known = plural(len(groups), "group")
            raise ServiceError(
                422, f"after = {after}: step {step} has {known} so far; give how many you have"
            )
        is_whole = len(groups) == self._batch_size
        return CommittedGroups(groups[after:], is_whole) if is_whole or len(groups) > after else None

    def check_due(self, version: int, sha256: str) -> None:
        """Raises ServiceError for weights of a version that is not awaited, unless these came before."""
        upload = self._upload
        if upload is not None and (upload.version, upload.sha256) == (version, sha256):
            return
        if self.is_installing:
            raise ServiceError(409, f"other weights of version {version} are being read; wait for their end")
        if self.due_step is None or version != self.due_step + 1:
            num_trained = self.num_trained or 0
            is_old = version <= num_trained
            why = "is published already" if is_old else "cannot be published before its step's batch is whole"
            raise ServiceError(409, f"version {version} {why}; the next is {num_trained + 1}")

    def publish(self, version: int, sha256: str, file: Path, metrics: dict[str, float]) -> str | None:
        """End the step that is due with the weights in a file; the digest of what engines will hold.

        None: they are being read. The same ones may be given again, and get the same answer. Raises
        ServiceError for another version than the next, and for weights that do not fit.
        """
        upload = self._upload
        if upload is not None and (upload.version, upload.sha256) == (version, sha256):
            if upload.refusal:
                self._upload = None
                raise ServiceError(422, f"these weights cannot be version {version}: {upload.refusal}")
            return upload.digest or None
        self.check_due(version, sha256)
        self._upload = WeightUpload(version, sha256)
        told = {f"external/{name}": number for name, number in metrics.items()}
        super().send(m.InstallWeights(version, file, told))
        return None
