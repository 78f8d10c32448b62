"""The curves of a run: `metrics.jsonl`, and the trackers that get the same lines.

A run that goes on goes on in them. Steps that are redone are told again; no version is evaluated twice, so
what was told of an evaluation that is over stays, and what was not is made up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dora.config import Config
from dora.runtime.held_out import VERSION, Evaluation
from dora.runtime.trackers import Trackers

FILE_NAME = "metrics.jsonl"


class Curves:
    """Writes one line after the other to the file and hands it to the trackers."""

    def __init__(
        self, config: Config, out: Path, notice: Callable[[str], None], from_step: int | None = None,
        ended: Sequence[Evaluation] = (), now_s: float = 0.0,
    ) -> None:  # fmt: skip
        """A run that goes on does so `from_step`, `now_s` after it began; these evaluations `ended` before.

        Raises InputError where a tracker cannot be started; then the file is as it was.
        """
        metrics, path, is_new = config.metrics, out / FILE_NAME, from_step is None
        settings = config.model_dump()
        self._trackers = Trackers(metrics.report_to, out, metrics.project, settings, notice, from_step)
        kept = [] if from_step is None else _keep(path, from_step, {0, *(e.version for e in ended)})
        self._file = path.open("x" if is_new else "a")
        self._trackers.log_hidden([line for line in kept if line["step"] >= (from_step or 0)])
        told = {line.get(VERSION) for line in kept}
        for evaluation in ended:
            if evaluation.version not in told:  # everything died between the journal's line and this one
                self.write_evaluation(evaluation, from_step or 0, now_s)

    def write(self, line: Mapping[str, float]) -> None:
        """One line, of a step or of an evaluation."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._trackers.log(line, int(line["step"]))

    def write_evaluation(self, evaluation: Evaluation, num_steps: int, now_s: float) -> None:
        """Told with the last of the `num_steps` that are trained, for trackers take steps in order."""
        self.write({"step": max(0, num_steps - 1), "t_s": round(now_s, 3), **evaluation.metrics()})

    def close_file(self) -> None:
        self._file.close()

    def close_trackers(self) -> None:
        self._trackers.close()


def _keep(path: Path, from_step: int, evaluated: set[int]) -> list[dict[str, Any]]:
    """Leave only lines of steps before `from_step`, and of versions that are `evaluated`; these lines."""
    whole = path.read_text().split("\n")[:-1] if path.is_file() else []
    told = [(text, json.loads(text)) for text in whole]
    kept = [
        (text, line)
        for text, line in told
        if (line[VERSION] in evaluated if VERSION in line else line["step"] < from_step)
    ]
    draft = path.with_suffix(".draft")
    draft.write_text("".join(text + "\n" for text, _ in kept))
    os.replace(draft, path)
    return [line for _, line in kept]
