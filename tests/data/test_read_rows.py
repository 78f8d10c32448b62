"""Rows are read from files and folders; an unreadable dataset is refused with a remedy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.data.test_dataset import write

from dora.data.dataset import Dataset, read_rows
from dora.errors import DataError

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]


def lines() -> str:
    return "".join(json.dumps(row) + "\n" for row in ROWS)


def test_a_missing_or_unknown_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"must be a \.jsonl, \.json, \.csv or \.parquet file, or a folder"):
        read_rows(write(tmp_path / "rows.txt", "prompt\n"))


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="split = 'train', but a file has no splits; remove the split"):
        read_rows(write(tmp_path / "rows.jsonl", lines()), "train")


def test_lines_may_be_empty_at_the_end_of_a_file_only(tmp_path: Path) -> None:
    assert [*read_rows(write(tmp_path / "rows.jsonl", lines() + "\n  \n"))] == ROWS
    with pytest.raises(DataError, match="line 3: is empty, and other lines follow; remove it"):
        read_rows(write(tmp_path / "gap.jsonl", lines() + "\n\n" + lines()))


def test_a_json_file_holds_a_list_whose_rows_may_have_different_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "n": 1, "hint": None}, {"prompt": "b", "n": 2}]
    dataset = Dataset.from_path(write(tmp_path / "rows.json", json.dumps(rows, indent=2)))
    assert [dataset.row(0), dataset.row(1)] == rows
    assert dataset.columns == ("n",)
    assert dataset.missing_columns() == {"hint": f"{tmp_path / 'rows.json'}, row 1"}


def test_a_csv_file_gives_texts(tmp_path: Path) -> None:
    long = "x" * 200_000
    text = f'\ufeffprompt,answer,day\n"a, ""b""\n2",007,2020-01-01\n\n{long},,\n'
    first = {"prompt": 'a, "b"\n2', "answer": "007", "day": "2020-01-01"}
    rows = [first, {"prompt": long, "answer": "", "day": ""}]
    assert [*read_rows(write(tmp_path / "rows.csv", text))] == rows


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("rows.json", '{"prompt": "a"}', "holds a dict; it must hold one list of objects"),
        ("rows.json", lines(), r"is not readable JSON \(Extra data.*one object per line \.jsonl"),
        ("rows.json", '[{"prompt": "a"}, 7]', "row 1: is a int"),
        ("rows.json", "[]", "has no rows"),
        ("rows.csv", "", "has no rows"),
        ("rows.csv", "prompt\na\nb,c\n", "row 1: has 2 values for 1 columns"),
        ("rows.csv", 'prompt\na\n"b', "row 1: is not CSV"),
        ("rows.csv", "prompt,n,n\n", "two columns have the same name; rename one of prompt, n, n"),
    ],
)
def test_a_bad_json_or_csv_file_is_refused(name: str, text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=complaint):
        Dataset.from_path(write(tmp_path / name, text))


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_a_json_or_csv_file_in_another_encoding_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes("prompt\n\xe4\n".encode("latin-1"))
    with pytest.raises(DataError, match="UTF-8"):
        read_rows(path)


@pytest.mark.parametrize(("name", "package"), [("rows.parquet", "pyarrow"), ("folder", "datasets")])
def test_a_missing_package_is_named_with_its_extra(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    (tmp_path / "folder").mkdir()
    write(tmp_path / "rows.parquet", "")
    with pytest.raises(DataError, match=rf"needs {package}; run pip install 'dora-rl\[data\]'"):
        read_rows(tmp_path / name)


def test_a_parquet_file_is_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(Table.from_pylist(ROWS), path)
    assert [*read_rows(path)] == ROWS
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read_rows(write(tmp_path / "broken.parquet", "nonsense"))


def test_a_parquet_value_that_python_cannot_have_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    far = pyarrow.array([0, 10**9], pyarrow.date32())
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "day": far}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet is not a readable Parquet file: days=1000000000"):
        read_rows(tmp_path / "rows.parquet")
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match=r", row 1 cannot be read: days=1000000000.*; correct it"):
        Dataset.from_path(tmp_path)


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas"])
def test_a_saved_folder_gives_python_values_whatever_its_format(kind: str, tmp_path: Path) -> None:
    """Otherwise a reward function gets the text "tensor(5)" for the number 5."""
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "n": 5, "tests": ["x", "y"]}]
    saved = datasets.Dataset.from_list(rows)
    saved.with_format(kind, columns=["n", "tests"]).save_to_disk(str(tmp_path / "rows"))
    assert [*read_rows(tmp_path / "rows")] == rows


def test_a_folder_that_datasets_saved_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "rows"))
    assert [*read_rows(tmp_path / "rows")] == ROWS
    dataset = Dataset.from_path(tmp_path / "rows")
    assert (len(dataset), dataset.prompt(1), dataset.fields(1)) == (2, "b", {"n": 2})
    with pytest.raises(DataError, match="split = 'train', but it holds no splits"):
        read_rows(tmp_path / "rows", "train")


def test_a_split_of_a_saved_folder_is_chosen_by_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {
        name: datasets.Dataset.from_list([row]) for name, row in zip(("train", "test"), ROWS, strict=True)
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "parts"))
    assert [*read_rows(tmp_path / "parts", "test")] == [ROWS[1]]
    with pytest.raises(DataError, match=r"has the splits train, test; choose one with data.split"):
        read_rows(tmp_path / "parts")
    with pytest.raises(DataError, match="split = 'dev' does not exist; it has train, test"):
        read_rows(tmp_path / "parts", "dev")


def test_a_folder_of_files_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "train.jsonl", lines())
    assert [*read_rows(tmp_path / "rows")] == ROWS
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty cannot be read by datasets: .*; give a folder"):
        read_rows(tmp_path / "empty")


def test_a_subset_of_a_folder_is_selected(tmp_path: Path) -> None:
    """As of openai/gsm8k, whose README.md lists its subsets."""
    pytest.importorskip("datasets")
    subsets = [f"- config_name: {name}\n  data_files: {name}.jsonl" for name in ("main", "other")]
    write(tmp_path / "README.md", "\n".join(["---", "configs:", *subsets, "---", ""]))
    for name in ("main", "other"):
        write(tmp_path / f"{name}.jsonl", json.dumps({"prompt": name}) + "\n")
    assert [*read_rows(tmp_path, "train", "other")] == [{"prompt": "other"}]
    with pytest.raises(DataError, match=r"choose one of several subsets with data\.subset"):
        read_rows(tmp_path, "train")
    with pytest.raises(DataError, match="a file has no subsets; remove the subset"):
        read_rows(tmp_path / "main.jsonl", subset="main")
