"""The recorded facts give the recorded orders; the first order that differs is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.observe.recording import Record, record_run, tampered

from dora.observe import replay
from dora.sim.models import draw_config


@pytest.mark.parametrize("seed", range(10))
def test_a_run_replays_alike(tmp_path: Path, seed: int) -> None:
    assert replay.main(record_run(tmp_path / "run", draw_config(seed), seed)) == 0


def test_a_run_stopped_early_replays_alike(early_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(early_run) == 0
    assert "120 facts" in capsys.readouterr().out


def differing_at(capsys: pytest.CaptureFixture[str]) -> int:
    first, recorded, replayed = capsys.readouterr().out.splitlines()
    assert recorded.startswith("   recorded  ")
    assert replayed.startswith("   replayed  ")
    return int(first.removeprefix("replay differs at seq "))


@pytest.mark.parametrize(("kind", "key"), [("commit", "step"), ("admit", "version"), ("load", "engine")])
def test_a_changed_order_is_found(
    good_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, key: str
) -> None:
    changed_at = []

    def change_the_fifth(records: list[Record]) -> None:
        place = [seq for seq, record in enumerate(records) if record["kind"] == kind][4]
        records[place][key] += 1
        changed_at.append(place)

    assert replay.main(tampered(good_run, tmp_path / "run", change_the_fifth)) == 1
    assert differing_at(capsys) == changed_at[0]


def test_a_missing_order_is_found(good_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def forget_the_second_order(records: list[Record]) -> None:
        del records[1]

    assert replay.main(tampered(good_run, tmp_path / "run", forget_the_second_order)) == 1
    assert differing_at(capsys) == 1


def test_an_order_nobody_gave_is_found(
    good_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_twice(records: list[Record]) -> None:
        records.append({"t_s": 0.0, "kind": "stop"})

    assert replay.main(tampered(good_run, tmp_path / "run", stop_twice)) == 1
    assert "no order" in capsys.readouterr().out


def test_a_fact_that_cannot_be_true_is_found(
    good_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed_at = []

    def finish_elsewhere(records: list[Record]) -> None:
        place = next(seq for seq, record in enumerate(records) if record["kind"] == "request_finished")
        records[place]["engine"] = 17
        changed_at.append(place)

    assert replay.main(tampered(good_run, tmp_path / "run", finish_elsewhere)) == 1
    out = capsys.readouterr().out
    assert f"seq {changed_at[0]}\n" in out
    assert "refused" in out


def test_orders_lost_when_the_process_died_are_no_difference(early_run: Path, tmp_path: Path) -> None:
    def lose_the_last_orders(records: list[Record]) -> None:
        while records[-1]["kind"] in ("admit", "generate", "fetch", "train", "commit"):
            records.pop()

    assert replay.main(tampered(early_run, tmp_path / "run", lose_the_last_orders)) == 0
