"""Trackers get every step, and none of them can end a run."""

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

from dora.errors import InputError
from dora.runtime.trackers import FLUSH_S, Trackers, check


def scalars(folder: Path) -> Iterator[tuple[int, str, float]]:
    """What TensorBoard would show: records of (length, checksum, event, checksum)."""
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


def test_tensorboard_can_read_every_step(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, "dora", {}, pytest.fail)
    trackers.log({"reward/mean": 0.5}, 0)
    trackers.log({"reward/mean": 0.75}, 1)
    trackers.close()
    expected = [(0, "reward/mean", 0.5), (1, "reward/mean", 0.75)]
    assert list(scalars(tmp_path / "tensorboard")) == expected


def test_tensorboard_hides_what_is_redone_by_a_run_that_goes_on(tmp_path: Path) -> None:
    for from_step, values in ((None, (0.5, 0.25, 0.75)), (1, (0.3,))):
        trackers = Trackers(["tensorboard"], tmp_path, "dora", {}, pytest.fail, from_step)
        for step, value in enumerate(values, start=from_step or 0):
            trackers.log({"x": value}, step)
        trackers.close()
    assert [(step, round(value, 3)) for step, _, value in scalars(tmp_path / "tensorboard")] == [
        (0, 0.5),
        (1, 0.3),
    ]


def test_tensorboard_is_on_the_disk_before_the_run_ends(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, "dora", {}, pytest.fail)
    trackers.log({"a": 1.0, "b": 2.0}, 0)
    deadline_s = time.monotonic() + 10 * FLUSH_S
    while [*scalars(tmp_path / "tensorboard")] != [(0, "a", 1.0), (0, "b", 2.0)]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    trackers.close()


class Service:
    """Stands in for wandb: a run that takes so many steps and then fails."""

    __name__, id = "wandb", "k1te"

    def __init__(self, num_good: int) -> None:
        self.steps: list[int] = []
        self.num_good = num_good
        self.is_finished = False
        self.settings: list[dict[str, Any]] = []

    def init(self, **settings: Any) -> Service:
        assert settings["project"] == "kites"
        self.settings.append(settings)
        return self

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if len(self.steps) == self.num_good:
            raise ConnectionError("the network is gone")
        self.steps.append(step)

    def finish(self) -> None:
        self.is_finished = True


def log_three(tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(sys.modules, "wandb", service)
    notices: list[str] = []
    trackers = Trackers(["wandb"], tmp_path, "kites", {}, notices.append)
    for step in range(3):
        trackers.log({"reward/mean": 0.5}, step)
    trackers.close()
    return notices


def test_a_service_gets_every_step_and_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(num_good=3)
    assert log_three(tmp_path, service, monkeypatch) == []
    assert service.steps == [0, 1, 2]
    assert service.is_finished


def test_a_service_that_fails_is_left_out_with_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(num_good=1)
    notices = log_three(tmp_path, service, monkeypatch)
    assert notices == ["wandb is left out from now on: ConnectionError: the network is gone"]
    assert service.steps == [0]


def test_a_run_that_goes_on_is_the_same_one_for_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(num_good=3)
    monkeypatch.setitem(sys.modules, "wandb", service)
    for from_step in (None, 2):
        Trackers(["wandb"], tmp_path, "kites", {}, pytest.fail, from_step).close()
    begun, gone_on = service.settings
    assert "id" not in begun
    assert (gone_on["id"], gone_on["resume"]) == ("k1te", "allow")


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(InputError, match=r'trackio needs trackio; .* pip install "dora-rl\[trackio\]"'):
        check(["tensorboard", "trackio"])


def test_a_service_that_cannot_start_fails_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: Any) -> None:
        raise PermissionError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__name__="wandb", init=init))
    with pytest.raises(InputError, match="wandb cannot be started: PermissionError: no API key"):
        Trackers(["wandb"], tmp_path, "kites", {}, pytest.fail)
