"""An external trainer: it fetches batches and publishes weights through the service.

A placeholder process takes the trainer's place in the run. It holds the newest weights, publishes them to the
engines and writes checkpoints, so the orchestrator and the executor treat it as any other trainer.
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
from dora.runtime.training.checkpoints import TrainerState, write_checkpoint
from dora.text import plural

if TYPE_CHECKING:
    from torch import Tensor


INCOMING_DIR = "incoming"  # in the run's folder: where a trainer on the same machine puts its weights
WEIGHTS = "model.safetensors"  # the weight file of a model folder


def run_placeholder(outbox: WorkerOutbox, inbox: WorkerInbox, spec: m.TrainerSpec) -> None:
    """Hold the newest weights: the initial ones, those of a checkpoint, or the last ones installed."""
    from dora.model.pretrained import load_pretrained
    from dora.model.weights import parameter_shapes
    from dora.trainer.checkpoint import load_checkpoint
    from dora.weights.store import WeightStore

    outbox.start_heartbeat()
    step = 0
    if spec.checkpoint is None:
        config, flat = load_pretrained(spec.model)
    else:
        config, flat, _, step = load_checkpoint(spec.checkpoint, reads_shards=False)
    store = WeightStore(spec.weights, spec.published_dtype, parameter_shapes(config))
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
                    outbox.send(write_checkpoint(message, spec.model, TrainerState(step, flat, {})))


def read_weights(file: Path, model: Path) -> Tensor:
    """The flat fp32 weights [numel] of a safetensors file with the tensors of the model in a folder.

    Raises ModelError for a file of another format, and for a tensor that is missing, extra, of another shape
    or dtype, or not finite.
    """
    from dora.model.pretrained import load_pretrained
    from dora.trainer.checkpoint import copy_tokenizer

    with tempfile.TemporaryDirectory(dir=file.parent) as name:
        folder = Path(name)
        shutil.copyfile(model / "config.json", folder / "config.json")
        copy_tokenizer(model, folder)  # a model that reads images needs its image processor's file
        (folder / WEIGHTS).symlink_to(file.absolute())
        try:
            return load_pretrained(folder)[1]
        except ModelError as error:  # the sender does not know the temporary folder
            raise ModelError(str(error).replace(str(folder / WEIGHTS), "the file")) from error
        except Exception as error:  # the run must continue, whatever the file contains
            raise ModelError(
                f"the file cannot be read as weights ({type(error).__name__}); send the names, shapes and "
                "number of tensors of model.path"
            ) from error


class CommittedGroups(NamedTuple):
    """Groups of a step's batch, in order of commitment. `is_complete`: these are the last ones."""

    groups: list[GroupId]
    is_complete: bool


@dataclass
class WeightUpload:
    """Weights of an external trainer and their state. `sha256` is that of the file."""

    version: int
    sha256: str
    is_installed: bool = False
    rejection: str = ""  # why they are not installed
    digest: str = ""  # of the published weights


class ExternalTrainer(Worker):
    """The driver's side of the placeholder, and of the external trainer.

    The executor's requests to the trainer pass through this class, so it knows the groups committed to each
    step and the step that is due. Methods return None for a result that does not exist yet.
    """

    def __init__(self, spec: m.TrainerSpec, batch_size: int, messages: WorkerMessages) -> None:
        super().__init__("placeholder of the external trainer", run_placeholder, spec, messages)
        self.num_trained: int | None = None  # steps; None: training has not begun
        self.due_step: int | None = None  # the step whose batch is complete and whose weights are awaited
        self._batch_size = batch_size
        self._batches: dict[int, list[GroupId]] = {}  # of untrained steps, in order of commitment
        self._upload: WeightUpload | None = None  # the last one

    def send(self, message: object) -> None:
        """Keep the requests that the external trainer executes, and send the others to the placeholder."""
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
        """Handle a message of the placeholder; returns the message that the supervisor must handle, or
        None.
        """
        upload = self._upload
        match message:
            case m.WeightsRejected(_, reason) if upload is not None:
                upload.rejection = reason
                return None
            case m.StepCompleted(step) if upload is not None:
                upload.is_installed, self.due_step = True, None
                del self._batches[step]
            case m.WeightsPublished(version, digest) if upload is not None and version == upload.version:
                upload.digest = digest
        return message

    @property
    def is_installing(self) -> bool:
        """Whether the placeholder reads weights, so that the due step may complete at any time."""
        return self._upload is not None and not (self._upload.is_installed or self._upload.rejection)

    def committed_groups(self, step: int, after: int) -> CommittedGroups | None:
        """The groups committed to the next step, without the first `after`; None if there are no others yet.

        Raises ServiceError for another step: after a resume the run waits for the weights of an earlier step,
        so a client that waits for a later step would never return.
        """
        if self.num_trained is None:
            return None
        if step != self.num_trained:
            is_old = step < self.num_trained
            why = "is trained already" if is_old else "comes later"
            raise ServiceError(410 if is_old else 409, f"step {step} {why}; the next is {self.num_trained}")
        groups = self._batches.get(step, [])
        if after > len(groups):
            committed = plural(len(groups), "group")
            raise ServiceError(
                422, f"after = {after}: step {step} has {committed} so far; set after to the number received"
            )
        is_complete = len(groups) == self._batch_size
        return CommittedGroups(groups[after:], is_complete) if is_complete or len(groups) > after else None

    def check_due(self, version: int, sha256: str) -> None:
        """Raises ServiceError for weights of a version that is not due, unless they were uploaded before."""
        upload = self._upload
        if upload is not None and (upload.version, upload.sha256) == (version, sha256):
            return
        if self.is_installing:
            raise ServiceError(
                409, f"other weights are being installed as version {version}; try again later"
            )
        if self.due_step is None or version != self.due_step + 1:
            num_trained = self.num_trained or 0
            is_old = version <= num_trained
            why = (
                "is published already"
                if is_old
                else "cannot be published before the batch of its step is complete"
            )
            raise ServiceError(409, f"version {version} {why}; the next is {num_trained + 1}")

    def publish(self, version: int, sha256: str, file: Path, metrics: dict[str, float]) -> str | None:
        """Complete the due step with the weights in `file`; returns the digest of the published weights.

        None: they are being installed. A repeated upload of the same weights gets the same result. Raises
        ServiceError for a version that is not due, and for weights that do not fit the model.
        """
        upload = self._upload
        if upload is not None and (upload.version, upload.sha256) == (version, sha256):
            if upload.rejection:
                self._upload = None
                raise ServiceError(422, f"these weights cannot become version {version}: {upload.rejection}")
            return upload.digest or None
        self.check_due(version, sha256)
        self._upload = WeightUpload(version, sha256)
        step_metrics = {f"external/{name}": value for name, value in metrics.items()}
        super().send(m.InstallWeights(version, file, step_metrics))
        return None
