"""One run as JSON: everything that the report draws, from the run's files alone."""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, get_args

from dora.audit import audit
from dora.core.actions import Action
from dora.core.events import Published
from dora.core.types import Limits
from dora.errors import InputError
from dora.journal.extensions import extended_limits, find_extensions
from dora.journal.reader import (
    JOURNAL_FILE,
    SUMMARY_FILE,
    JournalLine,
    explain_missing_run,
    read_header,
    read_journal,
    read_line,
)
from dora.journal.timeline import GroupSpan, Outcome, RequestSpan, Span, Timeline
from dora.journal.why import request_histories
from dora.metrics.catalog import SECTIONS
from dora.metrics.evaluation import VERSION_KEY, EvaluationTracker
from dora.metrics.rollout import length_distribution
from dora.metrics.writer import METRICS_FILE, read_metrics
from dora.report import samples
from dora.report.timeline import engines_to_json, rows_to_json, trainer_to_json, trainer_waits

NUM_SAMPLES = 400  # responses shown in full
MAX_POINTS = 800  # of a curve
NUM_DIGITS = 5  # significant ones of a point
SHOWN_LIMITS = ("num_steps", "batch_size", "group_size", "max_staleness", "breaks_c1")

JsonObject = dict[str, Any]


def run_data(run: Path, num_samples: int = NUM_SAMPLES) -> JsonObject:
    """A run in its current state, audited. Raises InputError if its files cannot be read."""
    reader = RunReader(run, num_samples)
    reader.refresh()
    return reader.data() | {"audit": _audit(run)}


def read_throughput(run: Path) -> tuple[str, int, float]:
    """Update policy, staleness bound, trained tokens per second. Raises InputError for an unfinished run."""
    limits = read_journal(run).limits
    summary = _read_object(run / SUMMARY_FILE)
    if "tokens_per_s" not in summary:
        raise InputError(f"{run} has not finished: it has no {SUMMARY_FILE} with its throughput")
    return _policy(limits, samples.read_config(run)), limits.max_staleness, float(summary["tokens_per_s"])


class RunReader:
    """Reads the files of a run repeatedly while the run writes them."""

    def __init__(self, run: Path, num_samples: int = NUM_SAMPLES) -> None:
        self._run, self._num_samples = run, num_samples
        self._stamps: tuple[object, ...] = ()
        self._decode: samples.Decode | None = None
        self._reset()

    def refresh(self) -> bool:
        """Read new content; False if there is none. Raises InputError for a missing run or an invalid
        line.
        """
        stamps = tuple(_stamp(self._run / name) for name in (JOURNAL_FILE, METRICS_FILE, SUMMARY_FILE))
        if stamps == self._stamps:
            return False
        path = self._run / JOURNAL_FILE
        try:
            with path.open("rb") as file:
                head = file.readline()
                if head != self._head or os.fstat(file.fileno()).st_size < self._offset:
                    self._reset()
                    self._start(path, head)
                file.seek(self._offset)
                *complete, torn = file.read().split(b"\n")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError(explain_missing_run(self._run)) from error
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror})") from error
        for text in complete:
            line = read_line(path, self._num_lines + 1, text)
            if isinstance(line, JournalLine):
                self._observe(line)
            self._offset += len(text) + 1
            self._num_lines += 1
        self._is_torn = torn != b""
        self._stamps = stamps
        return True

    def data(self) -> JsonObject:
        """The data of the run up to the last `refresh`."""
        now = self._lines[-1].t_s if self._lines else 0.0
        started = self._lines[0].t_s if self._lines else 0.0
        config, summary = samples.read_config(self._run), _read_object(self._run / SUMMARY_FILE)
        for extension in find_extensions(line.record for line in self._lines):
            config.setdefault("run", {})["steps"] = extension.num_steps
            schedule = {"lr_decay": extension.lr_decay, "min_lr_ratio": extension.min_lr_ratio}
            config.setdefault("trainer", {}).update(schedule)
        spans = [*self._ended, *self._timeline.open_spans()]
        return {
            "name": self._run.resolve().name,
            "folder": self._run.as_posix(),
            "from_s": round(started, 3),
            "to_s": round(now, 3),
            "is_torn": self._is_torn,
            "is_started": bool(self._lines),
            "is_finished": bool(summary),
            "limits": {name: getattr(self._limits, name) for name in SHOWN_LIMITS},
            "policy": _policy(self._limits, config),
            "config": config,
            "summary": summary,
            "audit": None,
            "metrics": metric_columns(read_metrics(self._run / METRICS_FILE)),
            "evaluations": self._evaluations(summary),
            "published": [round(1e3 * t_s) for t_s in self._published],
            "engines": engines_to_json(spans, now),
            "trainer": trainer_to_json(spans, now),
            "rows": rows_to_json(spans, self._limits, now),
            "groups": groups_to_json(spans, self._timeline.num_trained, self._limits.group_size),
            "samples": self._samples(config, spans),
        }

    def _reset(self) -> None:
        self._offset, self._num_lines, self._head = 0, 0, b""  # of what was read
        self._lines: list[JournalLine] = []

    def _start(self, path: Path, head: bytes) -> None:
        """Read the header of a journal."""
        self._limits = read_header(path, head).limits
        self._head, self._offset, self._num_lines = head, len(head), 1
        self._timeline = Timeline(breaks_c1=self._limits.breaks_c1)
        self._ended: list[Span] = []
        self._published: list[float] = []  # times, by version
        is_greedy = samples.read_config(self._run).get("eval", {}).get("greedy", False)
        self._evaluated = EvaluationTracker(is_greedy, pass_threshold=self._limits.pass_threshold)

    def _observe(self, line: JournalLine) -> None:
        self._lines.append(line)
        now, record = line.t_s, line.record
        self._ended += self._timeline.observe(now, record)
        self._limits = extended_limits(self._limits, record)
        event, actions = (None, [record]) if isinstance(record, Action) else (record, [])
        self._evaluated.update(event, actions, self._limits.evaluation)
        if isinstance(record, Published):
            missing = record.version + 1 - len(self._published)
            self._published += [now] * missing  # None for a redone version

    def _evaluations(self, summary: JsonObject) -> list[JsonObject]:
        """All evaluations with the time at which their version was published."""
        found = summary.get("evaluations") or [each.to_json() for each in self._evaluated.finished]
        times_s = {version: round(t_s, 3) for version, t_s in enumerate(self._published)}
        return [one | {"t_s": times_s.get(one.get("version", 0))} for one in found]

    def _samples(self, config: JsonObject, spans: Sequence[Span]) -> JsonObject:
        """Some responses in full, with the history of their requests."""
        try:
            stored = samples.read_groups(self._run)
        except InputError:  # the run has no responses yet, or no store
            return {"num": 0, "is_text": False, "groups": []}
        waits = sorted(trainer_waits(spans), key=lambda wait: wait.from_s - wait.to_s)
        picked = samples.pick_groups(
            stored,
            max(1, self._num_samples // self._limits.group_size),
            migrated=(
                span.request.group for span in spans if isinstance(span, RequestSpan) and span.migrated_to
            ),
            waited_for=(wait.group for wait in waits if wait.group is not None),
        )
        self._decode = self._decode or samples.find_decoder(self._run, config)
        shown = samples.read_texts(self._run, picked, self._decode)
        requests = [samples.request_of(group, response) for group in shown for response in group["responses"]]
        histories = request_histories(self._lines, self._limits.batch_size, requests)
        versions = {span.group: span.admitted.version for span in spans if isinstance(span, GroupSpan)}
        for group in shown:
            group["prompt"] = samples.split_turns(group["prompt"])
            for response in group["responses"]:
                request = samples.request_of(group, response)
                group["version"] = versions.get(request.group, group["version"])
                response["history"] = [[round(t_s, 3), sentence] for t_s, sentence in histories[request]]
        return {
            "num": sum(len(group.rewards) for group in stored),
            "is_text": self._decode is not None,
            "groups": shown,
        }


# --- metrics.jsonl


def metric_columns(lines: Iterable[JsonObject]) -> JsonObject:
    """The steps in metrics.jsonl as columns, thinned to the number of points that a chart can show.

    The line of a redone step replaces the step's earlier line. The columns have equal length, with None where
    a line has no value; a point is the mean of `every` steps.
    """
    of_step = {line["step"]: line for line in lines if VERSION_KEY not in line}
    steps = [of_step[step] for step in sorted(of_step)]
    every = -(-len(steps) // MAX_POINTS) or 1
    names = sorted({name for step in steps for name in step})
    return {
        "every": every,
        "num": len(steps),
        "columns": {name: _thinned([step.get(name) for step in steps], every) for name in names},
        "meanings": {name: meaning for name in names if (meaning := _meaning(name))},
    }


@cache
def _meaning(name: str) -> str:
    """Unit and meaning of a metric; empty for an unknown one."""
    metrics = (metric for section in SECTIONS for metric in section.metrics)
    known = next((metric for metric in metrics if metric.matches(name)), None)
    return "" if known is None else ": ".join(filter(None, (known.unit, known.meaning)))


def _thinned(values: Sequence[float | None], every: int) -> list[float | None]:
    return [_mean(values[i : i + every]) for i in range(0, len(values), every)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(f"{sum(known) / len(known):.{NUM_DIGITS}g}") if known else None


# --- groups

OUTCOMES = get_args(Outcome)


def groups_to_json(spans: Sequence[Span], num_trained: int, group_size: int) -> JsonObject:
    """Groups by outcome, samples by staleness, responses by length and outcome.

    `num_trained` steps are trained and were not voided by a resume.
    """
    groups = {span.group: span for span in spans if isinstance(span, GroupSpan)}
    outcome_of = {group: _outcome(span, num_trained) for group, span in groups.items()}
    outcomes, reasons, staleness = Counter(outcome_of.values()), Counter[tuple[str, str]](), Counter[int]()
    for group, span in groups.items():
        if outcome_of[group] in ("filtered", "failed"):
            reasons[span.outcome, span.end] += 1
        elif outcome_of[group] == "trained" and span.step is not None:
            staleness[span.step - span.admitted.version] += group_size
    lengths = {outcome: Counter[int]() for outcome in OUTCOMES}  # -> length -> finished responses
    for request in spans:
        if isinstance(request, RequestSpan) and request.finished and not request.request.is_held_out:
            lengths[outcome_of.get(request.request.group, "pending")][request.num_tokens] += 1
    return {
        "num": len(groups),
        "outcomes": {outcome: outcomes[outcome] for outcome in OUTCOMES},
        "reasons": [[outcome, reason, num] for (outcome, reason), num in reasons.most_common()],
        "staleness": {str(s): num for s, num in sorted(staleness.items())},
        "lengths": _lengths_to_json(lengths),
    }


def _outcome(span: GroupSpan, num_trained: int) -> Outcome:
    """A group whose step was voided is pending."""
    is_void = span.outcome == "trained" and (span.step is None or span.step >= num_trained)
    return "pending" if is_void else span.outcome


def _lengths_to_json(lengths: Mapping[Outcome, Counter[int]]) -> JsonObject:
    """Responses by outcome and length (tokens), in buckets up to and including `to`."""
    generated = sum(lengths.values(), Counter[int]())
    limits = _bucket_limits(max(generated, default=0))
    counts = {outcome: [0] * len(limits) for outcome in lengths}
    for outcome, of_outcome in lengths.items():
        for length, num in of_outcome.items():
            counts[outcome][bisect.bisect_left(limits, length)] += num
    return {
        "to": limits,
        "counts": counts,
        "generated": length_distribution(generated),
        "trained": length_distribution(lengths["trained"]),
    }


def _bucket_limits(longest: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 11, 16, ...: powers of the square root of 2, up to the first >= `longest`."""
    limits = [0]
    while limits[-1] < longest:
        limits.append(next(n for k in count() if (n := round(2 ** (k / 2))) > limits[-1]))
    return limits


# --- other files


def _audit(run: Path) -> JsonObject | None:
    """The verdict on each guarantee; None if the run lacks the files for an audit."""
    try:
        result = audit.check(run)
    except InputError:
        return None
    return {
        name: {
            "is_kept": not result.findings_against(name),
            "text": text,
            "findings": result.findings_against(name)[: audit.MAX_PRINTED],
        }
        for name, text in audit.describe(result).items()
    }


def _read_object(path: Path) -> JsonObject:
    """A file with a JSON object; empty if it is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _stamp(path: Path) -> tuple[int, int] | None:
    """Size and time of the last change; None for a missing file."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return (status.st_size, status.st_mtime_ns)
    return None


def _policy(limits: Limits, config: JsonObject) -> str:
    """The configured update policy; without a configuration, the policy that the limits imply."""
    policy = config.get("orchestrator", {}).get("update_policy")
    if policy is not None:
        return str(policy)
    return "dora" if limits.batches_per_version is None else "drain"
