"""An evaluation before or after training leaves no version on the engines, also after failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora.config import load
from dora.core.actions import Action, Drop, Score
from dora.core.events import Event, GroupScored, Loaded, RequestFailed, RequestFinished
from dora.core.types import GroupId, RequestId
from dora.runtime.control.evaluation import evaluate
from dora.runtime.run_setup import RunSetup


class ScriptedExecutor:
    """One engine whose events are given. Keeps each action with the number of events before it."""

    runs_episodes, has_migrations, first_scoring_failure = True, False, ""

    def __init__(self, setup: RunSetup, events: Sequence[Event]) -> None:
        self.setup, self.engines, self._events = setup, [0], deque(events)
        self.actions: list[tuple[int, Action]] = []
        self._num_events = 0

    def abort_migrated(self) -> None:
        """No request has migrated."""

    def poll(self) -> None:
        """No migration is waited for."""

    def execute(self, action: Action, /) -> None:
        self.actions.append((self._num_events, action))

    def next_event(self, until: float | None) -> Event | None:
        self._num_events += 1
        return self._events.popleft()

    def held_out_answers(self, group: GroupId) -> dict[int, list[int]]:
        return {0: [5], 1: [6]}


def test_a_prompt_with_a_failed_episode_ends_with_its_last_sibling(task: Path, tmp_path: Path) -> None:
    changes = [f"eval.path={task.parent / 'prompts.jsonl'}", "eval.num_prompts=2", "eval.num_samples=2"]
    setup = RunSetup.make(load.read_config(task, [*changes, "eval.greedy=false"]), tmp_path)
    complete, failed = GroupId(-1, 0), GroupId(-1, 1)

    def finished(group: GroupId, sibling: int) -> Any:
        return RequestFinished(0, RequestId(*group, sibling), 0, 3, (), "stop")

    events = [
        Loaded(0, 0, "digest"),
        RequestFailed(0, RequestId(*failed, 0), "the environment has no license"),
        finished(complete, 0),
        finished(complete, 1),
        GroupScored(complete, (1.0, 0.0)),
        finished(failed, 1),
    ]
    executor = ScriptedExecutor(setup, events)
    result = evaluate(executor, 0, {})
    assert result is not None
    assert (result.rewards, result.num_failed) == ({complete: (1.0, 0.0)}, 1)
    assert [action for _, action in executor.actions if isinstance(action, Score)] == [Score(complete)]
    assert executor.actions[-1] == (len(events), Drop(0, 0))
