"""What a person asks of a run reaches it and is answered, or is refused in words."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil
import pytest

from dora.errors import InputError, RunError
from dora.runtime.control.admin import AdminAnswer, AdminRequest, ControlDir, ask


def answer_all(control: ControlDir, stop: threading.Event) -> None:
    """A driver that answers whatever it is asked."""
    while not stop.is_set():
        for name, asked in control.asked():
            control.answer(name, AdminAnswer(asked.command != "drain", f"{asked.command} {asked.engine}"))
        time.sleep(0.01)


def test_each_request_gets_its_own_answer(tmp_path: Path) -> None:
    control, stop = ControlDir(tmp_path), threading.Event()
    driver = threading.Thread(target=answer_all, args=(control, stop))
    driver.start()
    try:
        assert ask(tmp_path, AdminRequest("list"), timeout_s=10) == AdminAnswer(True, "list None")
        assert ask(tmp_path, AdminRequest("drain", 3), timeout_s=10) == AdminAnswer(False, "drain 3")
    finally:
        stop.set()
        driver.join()
    assert [path.name for path in (tmp_path / "control").iterdir()] == ["process.json"]
    control.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not the folder of a run: it has no journal\.jsonl"):
        ask(tmp_path, AdminRequest("list"), timeout_s=1)


def test_a_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(InputError, match="is not a running run: it has ended"):
        ask(tmp_path, AdminRequest("list"), timeout_s=1)


def test_a_run_whose_process_is_gone_is_refused(tmp_path: Path) -> None:
    ControlDir(tmp_path)
    process = tmp_path / "control" / "process.json"
    process.write_text(json.dumps({"pid": psutil.Process().pid, "created_s": 1.0}))
    with pytest.raises(InputError, match=r"is not a running run: its process \d+ is gone"):
        ask(tmp_path, AdminRequest("list"), timeout_s=1)


def test_a_run_that_does_not_look_is_named_after_the_deadline(tmp_path: Path) -> None:
    control = ControlDir(tmp_path)
    with pytest.raises(RunError, match=r"no answer within 0\.1 s; it starts, evaluates or saves"):
        ask(tmp_path, AdminRequest("add"), timeout_s=0.1)
    assert control.asked() == []


def test_a_request_that_takes_longer_goes_on(tmp_path: Path) -> None:
    control = ControlDir(tmp_path)
    looked = threading.Timer(0.1, control.asked)
    looked.start()
    with pytest.raises(RunError, match="what was asked goes on there"):
        ask(tmp_path, AdminRequest("drain", 1), timeout_s=0.5)
    looked.join()


def test_a_run_that_ends_before_it_answers_is_no_wait_for_ever(tmp_path: Path) -> None:
    control = ControlDir(tmp_path)
    ended = threading.Timer(0.2, control.close)
    ended.start()
    with pytest.raises(RunError, match="the run ended before it answered"):
        ask(tmp_path, AdminRequest("add"), timeout_s=30)
    ended.join()


def test_what_others_put_into_the_folder_is_thrown_away(tmp_path: Path) -> None:
    control = ControlDir(tmp_path)
    for number, text in enumerate(("", "[]", '{"order": 1}', "\x00")):
        (tmp_path / "control" / f"{number}.request").write_text(text)
    assert control.asked() == []
    assert not list((tmp_path / "control").glob("*.request"))
