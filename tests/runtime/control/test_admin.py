"""Requests through the folder RUN/control reach the driver and are answered, or fail with the reason."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil
import pytest
from tests.service.fake_run import FakeRun

from dora.errors import InputError, RunError, ServiceError
from dora.runtime.control.admin import AdminAnswer, AdminRequest, ControlDir, send_request
from dora.runtime.control.engines import add_engine, drain_engine
from dora.runtime.run_dir import remove_stale_files


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


def test_a_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(InputError, match="is not a running run: it has ended"):
        send_request(tmp_path, AdminRequest("list"), timeout_s=1)


def test_only_one_process_drives_a_run(tmp_path: Path) -> None:
    """Two resumes at the same moment. Removing the folder of the other one would let both go on."""
    ControlDir(tmp_path)
    with pytest.raises(RunError, match=r"control exists, so another process drives this run: stop it"):
        ControlDir(tmp_path)


def test_a_resume_removes_what_a_killed_driver_left_and_nothing_of_a_running_one(tmp_path: Path) -> None:
    address, process = tmp_path / "service.json", tmp_path / "control" / "process.json"
    ControlDir(tmp_path)
    address.write_text("{}")
    remove_stale_files(tmp_path)
    assert address.exists()
    assert process.exists()
    process.write_text(json.dumps({"pid": psutil.Process().pid, "created_s": 0.0}))  # another one had this id
    remove_stale_files(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_driver_has_exited_is_refused(tmp_path: Path) -> None:
    ControlDir(tmp_path)
    process = tmp_path / "control" / "process.json"
    process.write_text(json.dumps({"pid": psutil.Process().pid, "created_s": 1.0}))
    with pytest.raises(InputError, match=r"is not a running run: its process \d+ has exited"):
        send_request(tmp_path, AdminRequest("list"), timeout_s=1)


def test_an_unread_request_times_out_and_is_withdrawn(tmp_path: Path) -> None:
    control = ControlDir(tmp_path)
    with pytest.raises(RunError, match=r"no reply within 0\.1 s: the run is starting or saving"):
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


@pytest.mark.parametrize(
    ("text", "reason"),
    {
        "": "Expecting value",
        "[]": "must be a mapping",
        '{"order": 1}': "unexpected keyword argument 'order'",
        "\x00": "Expecting value",
        '{"command": "status"}': "command = 'status' must be one of list, add, drain",
        '{"command": "drain", "engine": null}': "engine = None must be the number of the engine to drain",
        '{"command": "drain", "engine": true}': "engine = True must be the number",
    }.items(),
)
def test_an_invalid_request_is_answered_with_its_mistake(tmp_path: Path, text: str, reason: str) -> None:
    run, control = FakeRun(tmp_path), ControlDir(tmp_path)
    (tmp_path / "control" / "1.request").write_text(text)
    control.process(run.requests)
    answer = AdminAnswer(**json.loads((tmp_path / "control" / "1.answer").read_text()))
    assert not answer.is_done
    assert answer.text.startswith("invalid request: ")
    assert reason in answer.text
    assert not (tmp_path / "control" / "1.request").exists()


def test_an_engine_that_joins_while_the_run_is_paused_has_been_added(tmp_path: Path) -> None:
    """The orchestrator's state has the engine only after the pause."""
    context, request = FakeRun(tmp_path).context, add_engine()
    context.pause()
    assert request(context) is None
    context.engines.joined_engines.add(2)
    added = request(context)
    assert added is not None
    assert (added.engine, added.end) == (2, None)


def test_an_engine_that_has_not_joined_cannot_be_drained(tmp_path: Path) -> None:
    context = FakeRun(tmp_path).context
    context.engines.add_engines(1)

    def rejection(engine: int) -> str:
        with pytest.raises(ServiceError) as error:
            drain_engine(engine, waits_for_end=True)(context)
        return str(error.value)

    assert rejection(2) == "engine 2 is starting; wait until it has joined"
    remedy = "(see dora engines list or GET /v1/engines)"
    assert rejection(7) == f"the run has no engine 7; it has 0, 1 {remedy}"
    context.engines.joined_engines.clear()
    assert rejection(7) == f"the run has no engine 7; none has joined yet {remedy}"
