"""Prompts that are put during a run: each is stored once and survives a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.data.dataset import GrowingDataset
from dora.errors import DataError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def test_appended_rows_are_restored(path: Path) -> None:
    dataset = GrowingDataset(path)
    assert (len(dataset), path.exists()) == (0, False)
    dataset.append([{"prompt": "a", "answer": 1}, {"prompt": "ü"}])
    dataset.append([{"prompt": [{"role": "user", "content": "c"}]}])
    for again in (dataset, GrowingDataset(path)):
        assert [again.prompt(row) for row in range(len(again))] == [
            "a",
            "ü",
            [{"role": "user", "content": "c"}],
        ]
        assert again.fields(0) == {"answer": 1}


@pytest.mark.parametrize("rest", [b"", b'{"prompt": "a"}'])
def test_rows_are_not_appended_to_a_truncated_file(path: Path, rest: bytes) -> None:
    dataset = GrowingDataset(path)
    dataset.append([{"prompt": "a"}])
    path.write_bytes(rest) if rest else path.unlink()
    with pytest.raises(DataError, match="so rows are lost"):
        dataset.append([{"prompt": "b"}])
    assert len(dataset) == 1
    assert (path.read_bytes() if path.exists() else b"") == rest


def test_an_incomplete_last_line_is_overwritten(path: Path) -> None:
    GrowingDataset(path).append([{"prompt": "a"}])
    with path.open("a") as file:
        file.write('{"prompt": "an incomplete line')
    dataset = GrowingDataset(path)
    assert len(dataset) == 1
    dataset.append([{"prompt": "b"}])
    assert path.read_text() == '{"prompt": "a"}\n{"prompt": "b"}\n'


def test_rows_are_identified_by_their_index(path: Path) -> None:
    dataset = GrowingDataset(path)
    dataset.append([{"prompt": "a"}, {"prompt": "b"}])
    assert dataset.contains(1, [{"prompt": "b"}])
    assert not dataset.contains(0, [{"prompt": "b"}])
    assert not dataset.contains(1, [{"prompt": "b"}, {"prompt": "c"}])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "b"}, "has no column 'prompt'"),
        ({"prompt": 3}, "must be a string, or messages"),
        ({"prompt": "b", "completion": "c"}, "has the name of an argument"),
        ({"prompt": "b", "weight": float("nan")}, "nan or inf"),
    ],
)
def test_no_row_is_appended_if_one_is_invalid(path: Path, row: dict[str, object], reason: str) -> None:
    dataset = GrowingDataset(path)
    with pytest.raises(DataError, match=reason):
        dataset.append([{"prompt": "a"}, row])
    assert (len(dataset), path.exists()) == (0, False)


def test_a_corrupt_file_is_refused(path: Path) -> None:
    path.write_text('{"prompt": \n')
    with pytest.raises(DataError, match="is corrupt"):
        GrowingDataset(path)
