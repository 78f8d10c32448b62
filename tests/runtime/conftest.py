"""The fixtures of whole runs, for tests of the runtime that need one."""

from __future__ import annotations

from tests.runs.conftest import StartRun, plain_task, start_run, task

__all__ = ["StartRun", "plain_task", "start_run", "task"]
