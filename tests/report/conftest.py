"""The recorded runs of the journal's tests."""

from tests.journal.conftest import finished_run, resumed_run, stopped_run, story_run

__all__ = ["finished_run", "resumed_run", "stopped_run", "story_run"]
