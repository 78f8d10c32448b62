"""metrics.jsonl and trackers have every step once, also after a resume; no tracker can end a run."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tests.runtime.running import metrics

from dora.errors import InputError
from dora.metrics.evaluation import EvaluationResult
from dora.metrics.writer import FLUSH_S, METRICS_FILE, MetricsWriter, Trackers, check_trackers


def scalars(folder: Path) -> Iterator[tuple[int, str, float]]:
    """The points that TensorBoard shows; a file has records of (length, checksum, event, checksum)."""
    found: list[tuple[int, str, float]] = []
    for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            if event.session_log.status == SessionLog.START:
                found = [point for point in found if point[0] < event.step]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += length + 16
    return iter(found)


def test_tensorboard_shows_every_step(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, "dora", {}, pytest.fail)
    trackers.log({"reward/mean": 0.5}, 0)
    trackers.log({"reward/mean": 0.75}, 1)
    trackers.close()
    expected = [(0, "reward/mean", 0.5), (1, "reward/mean", 0.75)]
    assert list(scalars(tmp_path / "tensorboard")) == expected


def test_tensorboard_hides_redone_steps_of_a_resumed_run(tmp_path: Path) -> None:
    for from_step, values in ((None, (0.5, 0.25, 0.75)), (1, (0.3,))):
        trackers = Trackers(["tensorboard"], tmp_path, "dora", {}, pytest.fail, from_step)
        for step, value in enumerate(values, start=from_step or 0):
            trackers.log({"x": value}, step)
        trackers.close()
    assert [(step, round(value, 3)) for step, _, value in scalars(tmp_path / "tensorboard")] == [
        (0, 0.5),
        (1, 0.3),
    ]


def test_tensorboard_is_flushed_before_the_run_ends(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, "dora", {}, pytest.fail)
    trackers.log({"a": 1.0, "b": 2.0}, 0)
    deadline_s = time.monotonic() + 10 * FLUSH_S
    while [*scalars(tmp_path / "tensorboard")] != [(0, "a", 1.0), (0, "b", 2.0)]:
        assert time.monotonic() < deadline_s
    trackers.close()


class FakeWandb:
    """Accepts a number of steps and then fails."""

    __name__, id = "wandb", "k1te"

    def __init__(self, num_good: int) -> None:
        self.steps: list[int] = []
        self.num_good = num_good
        self.is_finished = False
        self.settings: list[dict[str, Any]] = []

    def init(self, **settings: Any) -> FakeWandb:
        assert settings["project"] == "kites"
        self.settings.append(settings)
        return self

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if len(self.steps) == self.num_good:
            raise ConnectionError("no network")
        self.steps.append(step)

    def finish(self) -> None:
        self.is_finished = True


def log_three(tmp_path: Path, service: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(sys.modules, "wandb", service)
    notices: list[str] = []
    trackers = Trackers(["wandb"], tmp_path, "kites", {}, notices.append)
    for step in range(3):
        trackers.log({"reward/mean": 0.5}, step)
    trackers.close()
    return notices


def test_a_hosted_tracker_gets_every_step_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = FakeWandb(num_good=3)
    assert log_three(tmp_path, service, monkeypatch) == []
    assert service.steps == [0, 1, 2]
    assert service.is_finished


def test_a_failing_tracker_is_disabled_with_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = FakeWandb(num_good=1)
    notices = log_three(tmp_path, service, monkeypatch)
    assert notices == ["tracker wandb failed and is disabled: ConnectionError: no network"]
    assert service.steps == [0]


def test_a_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeWandb(num_good=3)
    monkeypatch.setitem(sys.modules, "wandb", service)
    for from_step in (None, 2):
        Trackers(["wandb"], tmp_path, "kites", {}, pytest.fail, from_step).close()
    started, resumed = service.settings
    assert "id" not in started
    assert (resumed["id"], resumed["resume"]) == ("k1te", "allow")


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(InputError, match=r'trackio needs trackio; .* pip install "dora-rl\[trackio\]"'):
        check_trackers(["tensorboard", "trackio"])


def test_a_tracker_that_cannot_start_fails_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: Any) -> None:
        raise PermissionError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__name__="wandb", init=init))
    with pytest.raises(InputError, match="wandb cannot start: PermissionError: no API key"):
        Trackers(["wandb"], tmp_path, "kites", {}, pytest.fail)


def evaluation(version: int) -> EvaluationResult:
    return EvaluationResult(version, num_prompts=2, num_responses=1, is_greedy=True)


def open_writer(out: Path, from_step: int | None = None, **known: Any) -> MetricsWriter:
    trackers = Trackers(["tensorboard"], out, "dora", {}, pytest.fail, from_step)
    return MetricsWriter(out, trackers, from_step, **known)


def test_a_resumed_run_has_every_step_and_every_evaluation_once(tmp_path: Path) -> None:
    """The crash came before the line of version 4; the journal has no evaluation of version 9."""
    before = open_writer(tmp_path)
    before.write_evaluation(evaluation(0), 0, 0.5)
    for step in range(4):
        before.write({"step": step, "x": 0.25 * step})
        if step == 2:
            before.write_evaluation(evaluation(2), 3, 1.5)
    before.write_evaluation(evaluation(9), 4, 9.5)
    before.close_file()
    before.close_trackers()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "half')

    after = open_writer(tmp_path, 2, finished=[evaluation(version) for version in (0, 2, 4)], now_s=7.25)
    after.write({"step": 2, "x": 8.0})
    after.close_file()
    after.close_trackers()
    lines = metrics(tmp_path)
    found = [(line["step"], line.get("val/version", "step")) for line in lines]
    assert found == [(0, 0), (0, "step"), (1, "step"), (2, 2), (1, 4), (2, "step")]
    added = next(line for line in lines if line.get("val/version") == 4)
    assert (added["t_s"], added["val/num_failed"]) == (7.25, 2)
    points = [*scalars(tmp_path / "tensorboard")]
    assert [(step, value) for step, tag, value in points if tag == "val/version"] == [(0, 0), (2, 2), (1, 4)]
    assert [(step, value) for step, tag, value in points if tag == "x"] == [(0, 0), (1, 0.25), (2, 8)]
