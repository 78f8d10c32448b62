"""Prompts that are added while a run goes: each is there once, whatever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.data.inflow import Inflow
from dora.errors import DataError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def test_what_was_added_is_there_again(path: Path) -> None:
    inflow = Inflow(path)
    assert (len(inflow), path.exists()) == (0, False)
    inflow.add([{"prompt": "a", "answer": 1}, {"prompt": "ü"}])
    inflow.add([{"prompt": [{"role": "user", "content": "c"}]}])
    for again in (inflow, Inflow(path)):
        assert [again.prompt(row) for row in range(len(again))] == [
            "a",
            "ü",
            [{"role": "user", "content": "c"}],
        ]
        assert again.fields(0) == {"answer": 1}


@pytest.mark.parametrize("rest", [b"", b'{"prompt": "a"}'])
def test_rows_are_never_added_to_a_file_that_has_lost_some(path: Path, rest: bytes) -> None:
    inflow = Inflow(path)
    inflow.add([{"prompt": "a"}])
    path.write_bytes(rest) if rest else path.unlink()
    with pytest.raises(DataError, match="has lost rows"):
        inflow.add([{"prompt": "b"}])
    assert len(inflow) == 1
    assert (path.read_bytes() if path.exists() else b"") == rest


def test_half_a_line_was_never_promised_and_is_overwritten(path: Path) -> None:
    Inflow(path).add([{"prompt": "a"}])
    with path.open("a") as file:
        file.write('{"prompt": "a long one that was cut')
    inflow = Inflow(path)
    assert len(inflow) == 1
    inflow.add([{"prompt": "b"}])
    assert path.read_text() == '{"prompt": "a"}\n{"prompt": "b"}\n'


def test_rows_are_known_by_their_place(path: Path) -> None:
    inflow = Inflow(path)
    inflow.add([{"prompt": "a"}, {"prompt": "b"}])
    assert inflow.has(1, [{"prompt": "b"}])
    assert not inflow.has(0, [{"prompt": "b"}])
    assert not inflow.has(1, [{"prompt": "b"}, {"prompt": "c"}])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"question": "b"}, "has no column 'prompt'"),
        ({"prompt": 3}, "must be a string, or messages"),
        ({"prompt": "b", "completion": "c"}, "hides what the reward function gets"),
        ({"prompt": "b", "weight": float("nan")}, "nan or inf"),
    ],
)
def test_of_rows_with_a_bad_one_none_is_taken(path: Path, row: dict[str, object], why: str) -> None:
    inflow = Inflow(path)
    with pytest.raises(DataError, match=why):
        inflow.add([{"prompt": "a"}, row])
    assert (len(inflow), path.exists()) == (0, False)


def test_a_damaged_file_is_refused(path: Path) -> None:
    path.write_text('{"prompt": \n')
    with pytest.raises(DataError, match="is damaged"):
        Inflow(path)
