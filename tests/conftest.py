"""Settings of all tests: Triton's kernels, an offline hub, no time limits of properties, order, repeats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():  # Triton must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that looks like one of the hub downloads nothing

settings.register_profile("dora", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dora")

TESTS = Path(__file__).parent
LONGEST = TESTS / "test_gpu_script.py"
WITH_PROCESSES = {TESTS / name for name in ("contract", "runs", "service")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file comes first, so that pytest-xdist does not wait for it alone at the end.

    A failed test of processes or connections is repeated once, and pytest names it. The up to ten processes
    of a run share two cores with other tests, and with strangers on a machine of a cloud.
    """
    items.sort(key=lambda item: item.path != LONGEST)
    for item in items:
        if WITH_PROCESSES.intersection(item.path.parents):
            item.add_marker(pytest.mark.flaky(reruns=1))
