"""`dora status` reads the state of a run from one file, whichever machine or version wrote it."""

from __future__ import annotations

import json
import platform
import time
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from dora.errors import InputError
from dora.metrics import status
from dora.metrics.status import (
    DRIVER_FILE,
    REMOTE_UNRESPONSIVE_S,
    SCHEMA,
    STATUS_FILE,
    UNRESPONSIVE_S,
    read_status,
    remote_driver_of,
)

WAIT = {"waiter": "trainer", "target": "step 3", "reason": "2 more of its 2 groups", "since_s": 4.0}
GROUP = {"waiter": "step 3", "target": "engine 1", "reason": "tokens [v2]", "since_s": None}
PROCESS = {"name": "engine 1", "pid": 7, "last_message_s": 0.5, "timeout_s": 5.0, "activity": ""}


def write(run: Path, **changes: Any) -> Path:
    """Write the status of a running driver, which is this process."""
    process = psutil.Process()
    content = {
        "schema": SCHEMA,
        "host": platform.node(),
        "pid": process.pid,
        "created_s": process.create_time(),
        "unix_s": time.time(),
        "t_s": 10.0,
        "state": "running",
        "reason": "",
        "phase": "training",
        "steps": 3,
        "num_steps": 8,
        "idle_s": 1.0,
        "stall_after_s": 60.0,
        "processes": [PROCESS],
        "restarts": [{"worker": "engine 0", "in_s": 1.5}],
        "waits": [WAIT, GROUP],
        "root_causes": ["engine 1"],
    }
    (run / STATUS_FILE).write_text(json.dumps(content | changes))
    return run


ENDED_S = time.time() - 1000.0  # long ago, when the file was written for the last time
CASES: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({}, "running", "running: training, 3 of 8 steps trained"),
    ({"idle_s": 61.0}, "stalled", "stalled: no progress for 61.0 s; training, 3 of 8"),
    ({"unix_s": time.time() - 2 * UNRESPONSIVE_S - 600}, "unresponsive", "unresponsive: driver process "),
    ({"created_s": 1.0}, "crashed", "has exited; training, 3 of 8 steps trained; dora train --resume "),
    ({"host": "elsewhere", "created_s": 1.0}, "running", "running: training"),
    (
        {"host": "elsewhere", "unix_s": ENDED_S - REMOTE_UNRESPONSIVE_S},
        "unresponsive",
        " on elsewhere has written no status",
    ),
    ({"state": "finished", "unix_s": ENDED_S}, "finished", "finished, 3 steps trained"),
    ({"state": "stopped", "reason": "SIGINT", "unix_s": ENDED_S}, "stopped", "stopped by SIGINT; training"),
    ({"state": "failed", "reason": "no engine", "unix_s": ENDED_S}, "failed", "failed: no engine; training"),
)
IDS = [f"{state}-{number}" for number, (_, state, _) in enumerate(CASES)]  # changes have times in them


@pytest.mark.parametrize(("changes", "state", "words"), CASES, ids=IDS)
def test_every_state_of_a_run_is_recognised(
    tmp_path: Path, changes: dict[str, Any], state: str, words: str
) -> None:
    found = read_status(write(tmp_path, **changes))
    assert (found.state, words in found.sentence) == (state, True), found.sentence


def test_the_output_names_processes_waits_and_their_root_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert status.main(write(tmp_path), as_json=False) == 0
    printed = capsys.readouterr().out
    for words in ("engine 1", "0.5 s ago", "2 more of its 2 groups", "6.0 s", "tokens [v2]"):
        assert words in printed, words
    assert "engine 0 is restarted in 1.5 s" in printed
    assert "trainer ultimately waits for engine 1" in printed


def test_the_json_output_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(write(tmp_path, idle_s=90.0), as_json=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["verdict"], printed["root_causes"], printed["waits"]) == (
        "stalled",
        ["engine 1"],
        [WAIT, GROUP],
    )
    assert printed["sentence"].startswith("stalled: ")


def test_a_run_of_an_older_version_is_recognised_by_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    assert read_status(tmp_path).state == "crashed"
    (tmp_path / "summary.json").write_text('{"stopped": "SIGTERM"}')
    assert read_status(tmp_path).sentence == "stopped by SIGTERM"
    (tmp_path / "summary.json").write_text('{"stopped": ""}')
    assert read_status(tmp_path).state == "finished"


def test_a_driver_without_a_status_of_its_own_is_starting(tmp_path: Path) -> None:
    """A status that the driver of an earlier attempt wrote does not count."""
    process = psutil.Process()
    driver = {"pid": process.pid, "created_s": process.create_time()}
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "control").mkdir()
    (tmp_path / DRIVER_FILE).write_text(json.dumps(driver))
    found = read_status(tmp_path)
    assert (found.state, "starting, for" in found.sentence) == ("running", True)
    write(tmp_path, created_s=1.0, state="stopped", reason="SIGINT")
    assert "starting, for" in read_status(tmp_path).sentence
    write(tmp_path)
    assert read_status(tmp_path).sentence.startswith("running: training")
    (tmp_path / STATUS_FILE).unlink()
    (tmp_path / DRIVER_FILE).write_text(json.dumps(driver | {"created_s": 1.0}))
    assert read_status(tmp_path).state == "crashed"


@pytest.mark.parametrize("text", [None, "half a li", "[]", "{}", '{"schema": 99}', f'{{"schema": {SCHEMA}}}'])
def test_a_folder_without_a_status_is_rejected(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / STATUS_FILE).write_text(text)
    with pytest.raises(InputError, match=r"status\.json"):
        read_status(tmp_path)


def test_a_driver_on_another_machine_is_found_by_what_it_writes(tmp_path: Path) -> None:
    """Its clock is wrong by an hour. A status that nobody writes is that of a driver that has crashed."""
    hour_ago, is_done = time.time() - 3600, Event()

    def drive() -> None:
        for second in count():
            write(tmp_path, host="elsewhere", unix_s=hour_ago + second)
            if is_done.wait(0.05):
                return

    write(tmp_path, host="elsewhere", unix_s=hour_ago)
    assert remote_driver_of(tmp_path, 0.3) is None
    driver = Thread(target=drive)
    driver.start()
    try:
        assert remote_driver_of(tmp_path) == "elsewhere"
    finally:
        is_done.set()
        driver.join()
    write(tmp_path, host="elsewhere", state="stopped")
    assert remote_driver_of(tmp_path) is None
    write(tmp_path, host="elsewhere", unix_s=hour_ago)
    late = Thread(target=lambda: write(tmp_path, host="elsewhere", unix_s=hour_ago + 1))
    late.start()
    assert remote_driver_of(tmp_path, 0.3) is None, "the last status of a driver that has crashed"
    late.join()
    assert remote_driver_of(write(tmp_path)) is None
