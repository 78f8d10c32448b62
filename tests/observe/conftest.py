"""One recorded run for all tests of this folder; whoever changes it takes a copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.observe.recording import record_run, world_config


@pytest.fixture(scope="session")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps to the end, with filtered and failed groups and lost engines."""
    return record_run(tmp_path_factory.mktemp("runs") / "good", world_config(), seed=0)


@pytest.fixture(scope="session")
def early_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped after 120 facts."""
    return record_run(tmp_path_factory.mktemp("runs") / "early", world_config(), seed=0, max_facts=120)
