"""Requests through the folder RUN/control reach the driver and are answered, or fail with the reason."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil
import pytest

from dora.errors import InputError, RunError
from dora.runtime.control.admin import AdminAnswer, AdminRequest, ControlDir, send_request


def answer_all(control: ControlDir, stop: threading.Event) -> None:
    """A driver that answers each request."""
    while not stop.is_set():
        for name, request in control.new_requests():
            text = f"{request.command} {request.engine}"
            control.answer(name, AdminAnswer(request.command != "drain", text))
        time.sleep(0.01)


def test_each_request_gets_its_own_answer(tmp_path: Path) -> None:
    control, stop = ControlDir(tmp_path), threading.Event()
    driver = threading.Thread(target=answer_all, args=(control, stop))
    driver.start()
    try:
        answer = send_request(tmp_path, AdminRequest("list"), timeout_s=10)
        assert answer == AdminAnswer(True, "list None")
        answer = send_request(tmp_path, AdminRequest("drain", 3), timeout_s=10)
        assert answer == AdminAnswer(False, "drain 3")
    finally:
        stop.set()
        driver.join()
    assert [path.name for path in (tmp_path / "control").iterdir()] == ["process.json"]
    control.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not the folder of a run: it has no journal\.jsonl"):
        send_request(tmp_path, AdminRequest("list"), timeout_s=1)


def test_a_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(InputError, match="is not a running run: it has ended"):
        send_request(tmp_path, AdminRequest("list"), timeout_s=1)


def test_a_run_whose_driver_has_exited_is_refused(tmp_path: Path) -> None:
    ControlDir(tmp_path)
    process = tmp_path / "control" / "process.json"
    process.write_text(json.dumps({"pid": psutil.Process().pid, "created_s": 1.0}))
    with pytest.raises(InputError, match=r"is not a running run: its process \d+ has exited"):
        send_request(tmp_path, AdminRequest("list"), timeout_s=1)


def test_an_unread_request_times_out_and_is_withdrawn(tmp_path: Path) -> None:
    control = ControlDir(tmp_path)
    with pytest.raises(RunError, match=r"no reply within 0\.1 s: the run is starting, evaluating or saving"):
        send_request(tmp_path, AdminRequest("add"), timeout_s=0.1)
    assert control.new_requests() == []


def test_a_request_that_takes_longer_than_the_timeout_stays_in_progress(tmp_path: Path) -> None:
    control = ControlDir(tmp_path)
    reader = threading.Timer(0.1, control.new_requests)
    reader.start()
    with pytest.raises(RunError, match="the request is still in progress"):
        send_request(tmp_path, AdminRequest("drain", 1), timeout_s=0.5)
    reader.join()


def test_a_run_that_ends_before_it_answers_ends_the_wait(tmp_path: Path) -> None:
    control = ControlDir(tmp_path)
    close = threading.Timer(0.2, control.close)
    close.start()
    with pytest.raises(RunError, match="the run ended before it replied"):
        send_request(tmp_path, AdminRequest("add"), timeout_s=30)
    close.join()


def test_invalid_request_files_are_removed(tmp_path: Path) -> None:
    control = ControlDir(tmp_path)
    for number, text in enumerate(("", "[]", '{"order": 1}', "\x00")):
        (tmp_path / "control" / f"{number}.request").write_text(text)
    assert control.new_requests() == []
    assert not list((tmp_path / "control").glob("*.request"))
