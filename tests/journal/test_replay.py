"""The recorded events cause the recorded actions; the first difference is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.journal.recorded_runs import Record, edited, record_run

from dora.journal import replay
from dora.sim.random_config import draw_world_config


@pytest.mark.parametrize("seed", range(10))
def test_a_run_replays_to_the_same_actions(tmp_path: Path, seed: int) -> None:
    assert replay.main(record_run(tmp_path / "run", draw_world_config(seed), seed)) == 0


def test_a_stopped_run_replays_to_the_same_actions(
    stopped_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main(stopped_run) == 0
    assert "120 events" in capsys.readouterr().out


def differing_at(capsys: pytest.CaptureFixture[str]) -> int:
    first, recorded, replayed = capsys.readouterr().out.splitlines()
    assert recorded.startswith("   recorded  ")
    assert replayed.startswith("   replayed  ")
    return int(first.removeprefix("replay differs at seq "))


@pytest.mark.parametrize(("kind", "key"), [("commit", "step"), ("admit", "version"), ("load", "engine")])
def test_a_changed_action_is_found(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, key: str
) -> None:
    changed_at = []

    def change_the_fifth(records: list[Record]) -> None:
        index = [seq for seq, record in enumerate(records) if record["kind"] == kind][4]
        records[index][key] += 1
        changed_at.append(index)

    assert replay.main(edited(finished_run, tmp_path / "run", change_the_fifth)) == 1
    assert differing_at(capsys) == changed_at[0]


def test_a_missing_action_is_found(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def remove_the_second_action(records: list[Record]) -> None:
        del records[1]

    assert replay.main(edited(finished_run, tmp_path / "run", remove_the_second_action)) == 1
    assert differing_at(capsys) == 1


def test_an_additional_action_is_found(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_twice(records: list[Record]) -> None:
        records.append({"t_s": 0.0, "kind": "stop"})

    assert replay.main(edited(finished_run, tmp_path / "run", stop_twice)) == 1
    assert "no action" in capsys.readouterr().out


def test_an_illegal_event_is_found(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed_at = []

    def finish_elsewhere(records: list[Record]) -> None:
        index = next(seq for seq, record in enumerate(records) if record["kind"] == "request_finished")
        records[index]["engine"] = 17
        changed_at.append(index)

    assert replay.main(edited(finished_run, tmp_path / "run", finish_elsewhere)) == 1
    out = capsys.readouterr().out
    assert f"seq {changed_at[0]}\n" in out
    assert "refused" in out


def test_actions_lost_in_a_crash_are_no_difference(stopped_run: Path, tmp_path: Path) -> None:
    def remove_the_last_actions(records: list[Record]) -> None:
        while records[-1]["kind"] in ("admit", "generate", "fetch_prompts", "train", "commit"):
            records.pop()

    assert replay.main(edited(stopped_run, tmp_path / "run", remove_the_last_actions)) == 0
