"""`dora samples` and `dora why` print responses as text, turn by turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.journal.recorded_runs import record_run, world_config

from dora.cli.main import app
from dora.core.types import GroupId, RequestId
from dora.errors import InputError
from dora.stream.sample_db import SampleStore, Trajectory

Captured = pytest.CaptureFixture[str]
MASK = [1, 0, 1]  # the token between is of an observation


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose first two groups are finished; the first one is scored and trained."""
    run = record_run(tmp_path / "run", world_config(), seed=1, max_events=60)
    for file in run.glob("samples.sqlite*"):
        file.unlink()
    store = SampleStore(run / "samples.sqlite")
    for request in (RequestId(0, row, k) for row in range(2) for k in range(2)):
        tokens = [10 * request.row + request.sibling, 5, 6]
        found = Trajectory(request, 0, "d", [1, 2], tokens, [-0.5] * 3, loss_mask=MASK)
        store.put(found._replace(segments=[(0, 1), (1, 2)] if request.sibling else None))
    store.score(GroupId(0, 0), [0.0, 1.0], [-1.0, 1.0])
    store.set_state([GroupId(0, 0)], "trained", 4)
    store.close()
    return run


def printed(capsys: Captured, *words: object) -> str:
    app([*map(str, words)], standalone_mode=False)
    return capsys.readouterr().out


def test_jsonl_has_a_line_for_each_response(run: Path, capsys: Captured) -> None:
    lines = [json.loads(line) for line in printed(capsys, "samples", run, "--jsonl").splitlines()]
    names = [f"{line['group']}/{line['sibling']}" for line in lines]
    assert names == ["0/1/0", "0/1/1", "0/0/0", "0/0/1"]
    roles = ("model", "environment", "model")
    assert lines[-1] == {
        "group": "0/0",
        "sibling": 1,
        "version": 0,
        "state": "trained",
        "step": 5,
        "reward": 1.0,
        "advantage": 1.0,
        "tokens": 3,
        "segments": [[0, 1], [1, 2]],
        "prompt": "1 2",
        "response": "156",
        "turns": [{"role": role, "text": text} for role, text in zip(roles, "156", strict=True)],
    }


def test_the_last_groups_are_printed_as_text(run: Path, capsys: Captured) -> None:
    text = printed(capsys, "samples", run, "--last", 1)
    assert text.startswith("group 0/0: version 0, trained in step 5\n\n    1 2\n")
    assert "response 0/0/1: reward 1, advantage 1, 3 tokens (1 of version 0, 2 of version 1)" in text
    assert "    [environment]\n    5\n" in text
    assert "group 0/1: version 0, finished\n" in printed(capsys, "samples", run)


def test_one_response_is_printed_also_by_why(run: Path, capsys: Captured) -> None:
    text = printed(capsys, "samples", run, "0/1/1")
    assert "response 0/1/1" in text
    assert "response 0/1/0" not in text
    assert printed(capsys, "why", run, "0/1/1").endswith(f"\n\n{text}")
    assert "response" not in printed(capsys, "why", run, "0/1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0/7", "the run has no finished response 0/7; `dora why`"),
        ("0/1/2", "the run has no finished response 0/1/2"),
        ("seven", "'seven' must be epoch/row/sibling, such as 0/3/7, or epoch/row"),
    ],
)
def test_an_unknown_request_is_refused(run: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        app(["samples", str(run), name], standalone_mode=False)
