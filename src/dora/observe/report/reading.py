"""One run as one JSON-able dict: all that the report draws, from the run's files alone.

A reader goes on where it stopped, so that a run that is being written can be followed; of a line that is
torn it waits for the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora.core.events import Published
from dora.core.records import Limits, RequestId
from dora.errors import InputError
from dora.observe import audit
from dora.observe.journal import FILE_NAME, Line, read_header, read_journal, read_line
from dora.observe.nearby import why_no_run
from dora.observe.report import browsing
from dora.observe.report.curves import Curves
from dora.observe.report.engines import Engines
from dora.observe.report.groups import Groups
from dora.observe.report.waiting import RowTime, TrainerTime
from dora.observe.why import lives

NUM_SAMPLES = 400  # answers shown in full
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MAX_FINDINGS = 5  # of the audit, per guarantee

Data = dict[str, Any]


def run_data(run: Path, num_samples: int = NUM_SAMPLES) -> Data:
    """A run as it is now, audited. Raises InputError where its files cannot be read."""
    reader = RunReader(run, num_samples)
    reader.refresh()
    return reader.data() | {"audit": _audited(run)}


def speed_of(run: Path) -> tuple[str, int, float]:
    """Its policy, its bound, and trained tokens a second. Raises InputError where it has not ended."""
    limits = read_journal(run).limits
    summary = _object(run / SUMMARY)
    if "tokens_per_s" not in summary:
        raise InputError(f"{run} has not ended: it has no {SUMMARY} that says how fast it was")
    return _policy(limits, _config(run)), limits.max_staleness, float(summary["tokens_per_s"])


class RunReader:
    """Follows the files of one run; it never writes to them."""

    def __init__(self, run: Path, num_samples: int = NUM_SAMPLES) -> None:
        self._run, self._num_samples = run, num_samples
        self._seen: tuple[object, ...] = ()
        self._decode: browsing.Decode | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._offset, self._head = 0, b""
        self._lines: list[Line] = []

    def refresh(self) -> bool:
        """Read what is new; False if nothing is. Raises InputError where there is no run, or a bad line."""
        seen = tuple(_stamp(self._run / name) for name in (FILE_NAME, METRICS, SUMMARY))
        if seen == self._seen:
            return False
        path = self._run / FILE_NAME
        try:
            with path.open("rb") as file:
                head = file.readline()
                if head != self._head or os.fstat(file.fileno()).st_size < self._offset:
                    self._begin_anew()
                    self._open(path, head)
                file.seek(self._offset)
                *whole, torn = file.read().split(b"\n")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError(why_no_run(self._run)) from error
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror})") from error
        for text in whole:
            self._hear(read_line(path, len(self._lines) + 2, text))
            self._offset += len(text) + 1
        self._is_torn = torn != b""
        self._seen = seen
        return True

    def _open(self, path: Path, head: bytes) -> None:
        """A journal begins."""
        self._limits, self._num_prompts, _ = read_header(path, head)
        self._dora_version = str(json.loads(head).get("dora_version", ""))
        self._head, self._offset = head, len(head)
        self._engines = Engines(self._limits.breaks_c1)
        self._trainer, self._rows, self._groups = TrainerTime(), RowTime(self._limits), Groups()
        self._published: list[float] = []  # when, by version

    def _hear(self, line: Line) -> None:
        self._lines.append(line)
        now, record = line.t_s, line.record
        self._engines.hear(now, record)
        self._trainer.hear(now, record)
        self._rows.hear(now, record)
        self._groups.hear(record)
        if isinstance(record, Published):
            missing = record.version + 1 - len(self._published)
            self._published += [now] * missing  # a version that is redone was there before

    def data(self) -> Data:
        """The run as far as it was read by `refresh`."""
        now = self._lines[-1].t_s if self._lines else 0.0
        began = self._lines[0].t_s if self._lines else 0.0
        config, summary = _config(self._run), _object(self._run / SUMMARY)
        return {
            "name": self._run.resolve().name, "folder": self._run.as_posix(),
            "dora_version": self._dora_version,
            "from_s": round(began, 3), "to_s": round(now, 3),
            "is_torn": self._is_torn,
            "has_begun": bool(self._lines), "is_over": bool(summary),
            "limits": _told(self._limits, self._num_prompts),
            "policy": _policy(self._limits, config),
            "config": config,
            "summary": summary,
            "audit": None,
            "curves": _read_curves(self._run).to_json(),
            "evaluations": self._evaluations(summary),
            "published": [round(1e3 * t_s) for t_s in self._published],
            "engines": self._engines.to_json(now),
            "trainer": self._trainer.to_json(now),
            "rows": self._rows.to_json(now),
            "groups": self._groups.to_json(self._limits.group_size),
            "samples": self._samples(config),
        }  # fmt: skip

    def _evaluations(self, summary: Data) -> list[Data]:
        """Each with its version and when that was published; from the summary once there is one."""
        told = summary.get("evaluations") or [
            {name.removeprefix("val/"): value for name, value in line.items()}
            for line in _read_curves(self._run).evaluations
        ]
        first = _object(self._run / "eval_before.json")
        if first and not any(one.get("version") == 0 for one in told):
            told = [first, *told]
        return [one | {"t_s": self._published_at(one.get("version", 0))} for one in told]

    def _published_at(self, version: int) -> float | None:
        return round(self._published[version], 3) if 0 <= version < len(self._published) else None

    def _samples(self, config: Data) -> Data:
        """Some answers in full, with the life of each."""
        try:
            stored = browsing.stored_groups(self._run)
        except InputError:  # a run that has no answers yet, or whose store is elsewhere
            return {"num": 0, "num_groups": 0, "is_text": False, "groups": []}
        waits = sorted(self._trainer.waits, key=lambda wait: wait.from_s - wait.to_s)
        picked = browsing.pick(
            stored,
            max(1, self._num_samples // self._limits.group_size),
            moved=(_request(move["request"]).group for move in self._engines.moves),
            waited_for=(wait.group for wait in waits if wait.group is not None),
        )
        self._decode = self._decode or browsing.decoder(_tokenizers(self._run, config))
        groups = browsing.texts(self._run, picked, self._decode)
        told = lives(self._lines, self._limits.batch_size, browsing.requests_of(groups))
        for group in groups:
            for answer in group["answers"]:
                request = _request(f"{group['group']}/{answer['sibling']}")
                group["version"] = self._groups.versions.get(request.group, group["version"])
                life = told[request]
                answer["life"] = [[round(t_s, 3), sentence] for t_s, sentence in life]
        return {
            "num": sum(len(group.rewards) for group in stored), "num_groups": len(stored),
            "is_text": self._decode is not None, "groups": groups,
        }  # fmt: skip


def _request(name: str) -> RequestId:
    return RequestId(*map(int, name.split("/")))


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a file does."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return (status.st_size, status.st_mtime_ns)
    return None


def _object(path: Path) -> Data:
    """A file with a JSON object; empty where there is none yet, or only half of it."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _read_curves(run: Path) -> Curves:
    curves = Curves()
    with contextlib.suppress(OSError):
        for text in (run / METRICS).read_text(encoding="utf-8").split("\n")[:-1]:
            curves.read(text)
    return curves


def _config(run: Path) -> Data:
    with contextlib.suppress(OSError, ValueError):
        return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    return {}


def _told(limits: Limits, num_prompts: int | None) -> Data:
    names = ("num_steps", "batch_size", "group_size", "max_staleness", "breaks_c1")
    return {name: getattr(limits, name) for name in names} | {"num_prompts": num_prompts}


def _policy(limits: Limits, config: Data) -> str:
    """As configured, or as the limits tell."""
    told = config.get("orchestrator", {}).get("update_policy")
    if told is not None:
        return str(told)
    return "dora" if limits.batches_per_version is None else "drain"


def _tokenizers(run: Path, config: Data) -> Sequence[Path]:
    """Folders that may have the model's: those of its checkpoints, newest first, or what it began with."""
    saved = sorted(run.glob("checkpoints/step-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    began = config.get("model", {}).get("path")
    return [*saved, *([Path(began)] if began else [])]


def _audited(run: Path) -> Data | None:
    """The verdict on each guarantee; None where the files do not suffice for one."""
    try:
        verdict = audit.check(run)
    except InputError:
        return None
    return {
        name: {
            "is_kept": not verdict.against(name),
            "text": text,
            "findings": verdict.against(name)[:MAX_FINDINGS],
        }
        for name, text in audit.describe(verdict.counts).items()
    }
