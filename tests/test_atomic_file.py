"""A file is replaced as a whole, whoever else writes it, and a failed write leaves nothing."""

from __future__ import annotations

import os
import stat
from multiprocessing import get_context
from pathlib import Path

import pytest

from dora.atomic_file import write_bytes_atomically
from dora.auth_token import write_private_file


def write_often(file: Path, text: str) -> None:
    for _ in range(500):
        write_private_file(file, text)


def test_two_processes_may_write_the_same_private_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    processes = [get_context("spawn").Process(target=write_often, args=(file, text)) for text in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert file.read_text() in ("a", "b")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [*tmp_path.iterdir()] == [file]


def test_a_failed_write_leaves_the_old_content_and_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_private_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_private_file(file, "\ud800")  # fails before the draft
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_private_file(tmp_path / "folder", "new")  # fails after it
    assert file.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"token", "folder"}


def test_other_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes_atomically(tmp_path / "file", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
