"""`dora status` says where a run stands from one file, whoever wrote it and whatever became of them."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora.errors import InputError
from dora.observe import status
from dora.observe.status import DRIVER, FILE_NAME, QUIET_ELSEWHERE_S, QUIET_S, SCHEMA, standing_of

WAIT = {"who": "trainer", "on": "step 3", "what": "2 more of its 2 groups", "since_s": 4.0}
GROUP = {"who": "step 3", "on": "engine 1", "what": "tokens [v2]", "since_s": None}


def write(run: Path, **changes: Any) -> Path:
    """What a driver that goes wrote just now: this process."""
    process = psutil.Process()
    told = {
        "schema": SCHEMA,
        "host": platform.node(),
        "pid": process.pid,
        "created_s": process.create_time(),
        "unix_s": time.time(),
        "t_s": 10.0,
        "state": "running",
        "why": "",
        "phase": "training",
        "steps": 3,
        "num_steps": 8,
        "idle_s": 1.0,
        "patience_s": 60.0,
        "processes": [{"name": "engine 1", "pid": 7, "heard_s": 0.5, "limit_s": 5.0, "at": ""}],
        "restarts": [{"who": "engine 0", "in_s": 1.5}],
        "waits": [WAIT, GROUP],
        "owners": ["engine 1"],
    }
    (run / FILE_NAME).write_text(json.dumps(told | changes))
    return run


ENDED_S = time.time() - 1000.0  # long ago, when somebody wrote for the last time
CASES: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({}, "running", "running: training, 3 of 8 steps trained"),
    ({"idle_s": 61.0}, "stalled", "stalled: nothing has happened for 61.0 s; training, 3 of 8"),
    ({"unix_s": time.time() - 2 * QUIET_S - 600}, "silent", "silent: its driver, process "),
    ({"created_s": 1.0}, "died", "is gone; training, 3 of 8 steps trained; dora train --resume "),
    ({"host": "elsewhere", "created_s": 1.0}, "running", "running: training"),
    (
        {"host": "elsewhere", "unix_s": ENDED_S - QUIET_ELSEWHERE_S},
        "silent",
        " on elsewhere, has written nothing",
    ),
    ({"state": "finished", "unix_s": ENDED_S}, "finished", "finished, 3 steps trained"),
    ({"state": "stopped", "why": "SIGINT", "unix_s": ENDED_S}, "stopped", "stopped by SIGINT; training"),
    ({"state": "failed", "why": "no engine", "unix_s": ENDED_S}, "failed", "failed: no engine; training"),
)
IDS = [f"{state}-{number}" for number, (_, state, _) in enumerate(CASES)]  # changes have times in them


@pytest.mark.parametrize(("changes", "state", "words"), CASES, ids=IDS)
def test_each_way_a_run_can_stand_is_told_apart(
    tmp_path: Path, changes: dict[str, Any], state: str, words: str
) -> None:
    standing = standing_of(write(tmp_path, **changes))
    assert (standing.state, words in standing.sentence) == (state, True), standing.sentence


def test_what_is_printed_names_processes_waits_and_their_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert status.main(write(tmp_path), as_json=False) == 0
    printed = capsys.readouterr().out
    for words in ("engine 1", "0.5 s ago", "2 more of its 2 groups", "6.0 s", "tokens [v2]"):
        assert words in printed, words
    assert "engine 0 is started again in 1.5 s" in printed
    assert "trainer waits, in the end, for engine 1" in printed


def test_all_of_it_is_one_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(write(tmp_path, idle_s=90.0), as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["owners"], told["waits"]) == ("stalled", ["engine 1"], [WAIT, GROUP])
    assert told["sentence"].startswith("stalled: ")


def test_a_run_of_an_older_version_is_known_by_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    assert standing_of(tmp_path).state == "died"
    (tmp_path / "summary.json").write_text('{"stopped": "SIGTERM"}')
    assert standing_of(tmp_path).sentence == "stopped by SIGTERM"
    (tmp_path / "summary.json").write_text('{"stopped": ""}')
    assert standing_of(tmp_path).state == "finished"


def test_a_run_whose_driver_has_written_nothing_yet_is_starting(tmp_path: Path) -> None:
    """Nor has it, where the file of a former life is there."""
    process = psutil.Process()
    driver = {"pid": process.pid, "created_s": process.create_time()}
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "control").mkdir()
    (tmp_path / DRIVER).write_text(json.dumps(driver))
    assert (standing_of(tmp_path).state, "starting, for" in standing_of(tmp_path).sentence) == (
        "running",
        True,
    )
    write(tmp_path, created_s=1.0, state="stopped", why="SIGINT")
    assert "starting, for" in standing_of(tmp_path).sentence
    write(tmp_path)
    assert standing_of(tmp_path).sentence.startswith("running: training")
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / DRIVER).write_text(json.dumps(driver | {"created_s": 1.0}))
    assert standing_of(tmp_path).state == "died"


@pytest.mark.parametrize("text", [None, "half a li", "[]", "{}", '{"schema": 99}', f'{{"schema": {SCHEMA}}}'])
def test_what_is_no_run_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(InputError, match=r"status\.json"):
        standing_of(tmp_path)
