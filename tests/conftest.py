"""Two things for all tests: how Triton's kernels run, and what may go side by side.

Where there is no GPU, they run in Triton's interpreter; it must know before it is imported.
"""

from __future__ import annotations

import os

import pytest
import torch

RUNS = ("contract", "runtime")  # folders whose tests start whole runs

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With -n 2 --dist loadgroup, files stay whole, and never two whole runs compete for the cores."""
    for item in items:
        is_run = item.path.parent.name in RUNS
        item.add_marker(pytest.mark.xdist_group("runs" if is_run else str(item.path)))
