"""Recorded runs for read-only use; a test that changes one takes a copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.journal.recorded_runs import record_resumed_run, record_run, world_config
from tests.journal.story import write_story


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight complete steps, with filtered and failed groups and lost engines."""
    return record_run(tmp_path_factory.mktemp("runs") / "finished", world_config(), seed=0)


@pytest.fixture(scope="session")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped after 120 events."""
    return record_run(tmp_path_factory.mktemp("runs") / "stopped", world_config(), seed=0, max_events=120)


@pytest.fixture(scope="session")
def story_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The short run of `story`."""
    return write_story(tmp_path_factory.mktemp("runs") / "story")


@pytest.fixture(scope="session")
def resumed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run that was resumed, with redone steps."""
    return record_resumed_run(tmp_path_factory.mktemp("runs") / "resumed")
