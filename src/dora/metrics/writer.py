"""Write metrics.jsonl, and the same lines to TensorBoard, Weights & Biases, trackio or OpenTelemetry.

metrics.jsonl never depends on the trackers: a tracker that fails is disabled with a notice, and the run
continues. A resumed run appends to its file and continues its curves.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dora.atomic_file import write_text_atomically
from dora.errors import InputError
from dora.metrics.evaluation import VERSION_KEY, EvaluationResult

METRICS_FILE = "metrics.jsonl"
TRACKER_IDS_FILE = "trackers.json"  # in the run's folder: the ids of the run at hosted trackers
LIBRARIES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "trackio": "trackio",
    "otel": "opentelemetry.exporter.otlp.proto.http",
}
FLUSH_S = 1.0  # until TensorBoard's files have the latest values
_ID_ATTRIBUTES = {"wandb": "id", "trackio": "name"}

Notice = Callable[[str], None]


class MetricsWriter:
    """Writes each line to the file and to the trackers."""

    def __init__(
        self,
        out: Path,
        trackers: Trackers,
        from_step: int | None = None,
        finished: Sequence[EvaluationResult] = (),
        now_s: float = 0.0,
    ) -> None:
        """Create the file, or continue it on resume `from_step`, `now_s` seconds after the start of the run.

        On resume the lines of redone steps are removed. No version is evaluated twice: lines of the
        `finished` evaluations are kept, and a missing one is added.
        """
        self._trackers, path = trackers, out / METRICS_FILE
        kept: list[dict[str, Any]] = []
        if from_step is not None:
            kept = _truncate(path, from_step, {result.version for result in finished})
        self._file = path.open("x" if from_step is None else "a", encoding="utf-8")
        self._trackers.log_hidden([line for line in kept if line["step"] >= (from_step or 0)])
        written = {line.get(VERSION_KEY) for line in kept}
        for result in finished:
            if result.version not in written:  # a crash came between the journal's line and this one
                self.write_evaluation(result, from_step or 0, now_s)

    def write(self, line: Mapping[str, float]) -> None:
        """Write the line of a step or an evaluation."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._trackers.log(line, int(line["step"]))

    def write_evaluation(self, result: EvaluationResult, num_steps: int, now_s: float) -> None:
        """Write an evaluation under the last of `num_steps` trained steps: trackers need steps in order."""
        self.write({"step": max(0, num_steps - 1), "t_s": round(now_s, 3), **result.metrics()})

    def close_file(self) -> None:
        self._file.close()

    def close_trackers(self) -> None:
        self._trackers.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl; [] without the file. Raises InputError for a damaged line."""
    complete = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return [_parse_line(path, number, text) for number, text in enumerate(complete, start=1)]


def _parse_line(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
        if type(line["step"]) is int and all(isinstance(value, int | float) for value in line.values()):
            return dict(line)
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise InputError(
        f"{path}, line {number}: damaged: it must be a JSON object with a step and numbers; restore the "
        "file, or remove this line, which charts then lack"
    )


def _truncate(path: Path, from_step: int, evaluated: set[int]) -> list[dict[str, Any]]:
    """Keep only lines of steps before `from_step` and of `evaluated` versions; returns those lines."""
    kept = [
        line
        for line in read_metrics(path)
        if (line[VERSION_KEY] in evaluated if VERSION_KEY in line else line["step"] < from_step)
    ]
    write_text_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


class Tracker(Protocol):
    """Receives the metrics of one step after the other."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All trackers of a run; one that fails is disabled with a notice."""

    def __init__(
        self,
        names: Sequence[str],
        out: Path,
        project: str,
        config: Mapping[str, Any],
        notice: Notice,
        from_step: int | None = None,
    ) -> None:
        """Start the trackers `names`; `from_step` is set on resume. Raises InputError if one cannot start."""
        self._notice = notice
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            kind = _KINDS.get(name, _HostedTracker)
            try:
                self._trackers[name] = kind(_import_library(name), out, project, config, from_step)
            except InputError:
                raise
            except Exception as error:  # of any kind: it comes from a service
                raise InputError(
                    f"metrics.report_to: {name} cannot start: {type(error).__name__}: {error}; "
                    "check its own settings, or remove it"
                ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step to all trackers."""
        for name, tracker in [*self._trackers.items()]:
            self._try(name, partial(tracker.log, metrics, step))

    def log_hidden(self, lines: Sequence[Mapping[str, float]]) -> None:
        """Send kept lines to TensorBoard again, which hides them on resume; hosted trackers have them."""
        for line in lines:
            if tracker := self._trackers.get("tensorboard"):
                self._try("tensorboard", partial(tracker.log, line, int(line["step"])))

    def close(self) -> None:
        for name, tracker in [*self._trackers.items()]:
            self._try(name, tracker.close)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # of any kind: it comes from a service
            self._trackers.pop(name, None)
            self._notice(f"tracker {name} failed and is disabled: {type(error).__name__}: {error}")


def check_trackers(names: Sequence[str]) -> None:
    """Raises InputError naming the extra to install if a tracker's library is missing."""
    for name in names:
        _import_library(name)


def _import_library(name: str) -> Any:
    try:
        return importlib.import_module(LIBRARIES[name])
    except ImportError as error:
        raise InputError(
            f"metrics.report_to: {name} needs {LIBRARIES[name]}; "
            f'install it with pip install "dora-rl[{name}]"'
        ) from error


class _TensorBoard:
    """Event files in the run's folder; on resume the values of redone steps are hidden."""

    def __init__(
        self, library: Any, out: Path, project: str, config: Mapping[str, Any], from_step: int | None
    ) -> None:
        suffix = "" if from_step is None else f".from-{from_step}"  # unique even within a second
        self._writer = library.SummaryWriter(
            str(out / "tensorboard"), purge_step=from_step, flush_secs=FLUSH_S, filename_suffix=suffix
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _HostedTracker:
    """wandb, or trackio with the same calls; their environment variables apply, such as WANDB_MODE=offline.

    A resumed run keeps its id. wandb keeps the values that it has of redone steps.
    """

    def __init__(
        self, library: Any, out: Path, project: str, config: Mapping[str, Any], from_step: int | None
    ) -> None:
        name, ids = library.__name__, _read_ids(out)
        settings: dict[str, Any] = {"project": project, "name": out.name, "config": dict(config)}
        if name == "wandb":
            settings["dir"] = str(out)
        if from_step is not None and name in ids:
            settings |= {_ID_ATTRIBUTES[name]: ids[name], "resume": "allow"}
        self._run = library.init(**settings)
        _write_ids(out, {**ids, name: getattr(self._run, _ID_ATTRIBUTES[name])})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _start_spans(
    library: Any, out: Path, project: str, config: Mapping[str, Any], from_step: int | None
) -> Tracker:
    """OpenTelemetry. A resumed run continues its trace; redone steps have a span in each process."""
    from dora.metrics.otel import SpanTracker  # needs the extra

    ids = _read_ids(out)
    attributes = {
        "run.name": out.name,
        "run.steps": config["run"]["steps"],
        "model.path": str(config["model"]["path"]),
        "orchestrator.update_policy": config["orchestrator"]["update_policy"],
    }
    tracker = SpanTracker(project, attributes, ids.get("otel") if from_step is not None else None)
    _write_ids(out, {"otel": tracker.id, **ids})
    return tracker


def _read_ids(out: Path) -> dict[str, str]:
    path = out / TRACKER_IDS_FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _write_ids(out: Path, ids: Mapping[str, str]) -> None:
    (out / TRACKER_IDS_FILE).write_text(json.dumps(ids), encoding="utf-8")


_KINDS: dict[str, Callable[[Any, Path, str, Mapping[str, Any], int | None], Tracker]] = {
    "tensorboard": _TensorBoard,
    "otel": _start_spans,
}
