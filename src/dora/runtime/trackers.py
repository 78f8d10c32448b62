"""Metrics of each step for the trackers people look at: TensorBoard, Weights & Biases, trackio.

`metrics.jsonl` is always written and never depends on them. A tracker that fails is left out from
then on, with a notice: no run ends because of a curve. A run that goes on goes on in its curves.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dora.errors import InputError

LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
FLUSH_S = 1.0  # until TensorBoard's files have what it was handed
KNOWN_AS = "trackers.json"  # in the run's folder: what the services call the run
_NAMED_BY = {"wandb": "id", "trackio": "name"}


class Tracker(Protocol):
    """Takes the metrics of one step after the other."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    """Event files in the run's folder. What is there of steps that are redone is hidden."""

    def __init__(
        self, library: Any, out: Path, project: str, config: Mapping[str, Any], from_step: int | None
    ) -> None:
        suffix = "" if from_step is None else f".from-{from_step}"  # a name of its own within a second, too
        self._writer = library.SummaryWriter(
            str(out / "tensorboard"), purge_step=from_step, flush_secs=FLUSH_S, filename_suffix=suffix
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Service:
    """wandb, or trackio, which takes the same calls; own variables say where to, as WANDB_MODE=offline.

    A run that goes on does so under its old name; of steps that are redone wandb keeps what it had.
    """

    def __init__(
        self, library: Any, out: Path, project: str, config: Mapping[str, Any], from_step: int | None
    ) -> None:
        own, path = library.__name__, out / KNOWN_AS
        known: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
        settings: dict[str, Any] = {"project": project, "name": out.name, "config": dict(config)}
        if own == "wandb":
            settings["dir"] = str(out)
        if from_step is not None and own in known:
            settings |= {_NAMED_BY[own]: known[own], "resume": "allow"}
        self._run = library.init(**settings)
        path.write_text(json.dumps({**known, own: getattr(self._run, _NAMED_BY[own])}))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers of a run, as one."""

    def __init__(
        self, names: Sequence[str], out: Path, project: str, config: Mapping[str, Any],
        notice: Callable[[str], None], from_step: int | None = None,
    ) -> None:  # fmt: skip
        """A run that goes on does so `from_step`. Raises InputError where a tracker cannot be started."""
        self._notice = notice
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            kind = _TensorBoard if name == "tensorboard" else _Service
            try:
                self._trackers[name] = kind(_library(name), out, project, config, from_step)
            except InputError:
                raise
            except Exception as error:  # whatever a service may raise
                raise InputError(
                    f"metrics.report_to: {name} cannot be started: {type(error).__name__}: {error}; "
                    "see its own settings, or remove it"
                ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand one step to all of them."""
        for name, tracker in [*self._trackers.items()]:
            self._try(name, lambda tracker=tracker: tracker.log(metrics, step))  # type: ignore[misc]

    def log_hidden(self, lines: Sequence[Mapping[str, float]]) -> None:
        """Give TensorBoard again what it hides although it is not redone; services keep what they have."""
        tracker = self._trackers.get("tensorboard")

        def log() -> None:
            for line in lines:
                assert tracker is not None
                tracker.log(line, int(line["step"]))

        if tracker is not None:
            self._try("tensorboard", log)

    def close(self) -> None:
        """No step comes any more."""
        for name, tracker in [*self._trackers.items()]:
            self._try(name, tracker.close)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a service may raise
            self._trackers.pop(name, None)
            self._notice(f"{name} is left out from now on: {type(error).__name__}: {error}")


def check(names: Sequence[str]) -> None:
    """Raises InputError naming the extra to install where a tracker's library is missing."""
    for name in names:
        _library(name)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(LIBRARIES[name])
    except ImportError as error:
        raise InputError(
            f"metrics.report_to: {name} needs {LIBRARIES[name]}; "
            f'install it with pip install "dora-rl[{name}]"'
        ) from error
