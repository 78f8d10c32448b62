"""Which errors say that a disk is full, and which disk they name."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from dora.full_disk import describe_full_disk, find_full_disk, is_full


def os_error(number: int, path: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([] if path is None else [str(path)]))


def sqlite_error() -> sqlite3.Error:
    """A database that may not grow."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.execute("pragma max_page_count = 2")
        db.execute("create table t (x)")
        with pytest.raises(sqlite3.Error) as error:
            db.execute("insert into t values (zeroblob(100000))")
    return error.value


@pytest.mark.parametrize(
    "error",
    [
        os_error(errno.ENOSPC),
        os_error(errno.EDQUOT),
        sqlite_error(),
        RuntimeError('Error while serializing: I/O error: No space left on device (os error 28)"'),
    ],
    ids=str,
)
def test_a_full_disk_and_a_used_up_quota_are_full(error: Exception) -> None:
    assert is_full(error)


@pytest.mark.parametrize(
    "error",
    [
        *map(os_error, (errno.ENOENT, errno.EACCES, errno.EIO, errno.EFBIG)),
        sqlite3.OperationalError("locked"),
    ],
    ids=str,
)
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_full(error)


def test_the_disk_of_the_failing_path_is_full(tmp_path: Path) -> None:
    run, weights = folders = [tmp_path / "run", tmp_path / "weights"]
    assert find_full_disk(os_error(errno.ENOSPC, run / "journal.jsonl"), folders) == run
    assert find_full_disk(os_error(errno.ENOSPC, weights / "3.draft"), folders) == weights
    assert find_full_disk(sqlite_error(), folders) == run


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_without_a_path_the_disk_with_the_least_free_space_is_full(tmp_path: Path) -> None:
    folders = sorted([tmp_path, Path("/dev/shm")], key=lambda folder: shutil.disk_usage(folder).free)
    assert find_full_disk(os_error(errno.ENOSPC), folders[::-1]) == folders[0]


def test_the_sentence_about_a_full_disk_has_bytes_needed_and_free(tmp_path: Path) -> None:
    removed = tmp_path / "removed" / "folder"
    said = describe_full_disk(removed, 3_000_000)
    assert re.fullmatch(
        rf"the disk of {removed} is full: up to 3 MB needed, [\d.,]+ [MG]B free. Free disk space there", said
    )
