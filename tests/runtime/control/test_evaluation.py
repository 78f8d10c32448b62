"""An evaluation beside nothing else leaves nothing behind on the engines, whatever breaks in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from dora.config import load
from dora.core.actions import Action, Drop, Score
from dora.core.events import Event, GroupScored, Loaded, RequestFailed, RequestFinished
from dora.core.types import GroupId, RequestId
from dora.runtime.control.evaluation import evaluate
from dora.runtime.executor import ProcessExecutor
from dora.runtime.run_setup import RunSetup


class Hands:
    """One engine, which says what was written down for it; each order is kept, with the facts before it."""

    def __init__(self, plan: RunSetup, facts: Sequence[Event]) -> None:
        self.plan, self.engines, self._facts = plan, [0], deque(facts)
        self.orders: list[tuple[int, Action]] = []
        self.num_told = 0
        self.episodes = SimpleNamespace(player=self)
        self.teller = SimpleNamespace(peek=lambda group: {0: [5], 1: [6]})

    def settle(self) -> None:
        """Nothing moves."""

    def perform(self, order: Action) -> None:
        self.orders.append((self.num_told, order))

    def next_fact(self, until: float | None) -> Event:
        self.num_told += 1
        return self._facts.popleft()


def test_a_prompt_with_an_episode_that_broke_is_over_with_its_last_sibling(
    task: Path, tmp_path: Path
) -> None:
    changes = [f"eval.path={task.parent / 'prompts.jsonl'}", "eval.num_prompts=2", "eval.num_samples=2"]
    plan = RunSetup.make(load.read_config(task, [*changes, "eval.greedy=false"]), tmp_path)
    whole, broken = GroupId(-1, 0), GroupId(-1, 1)

    def done(group: GroupId, sibling: int) -> Any:
        return RequestFinished(0, RequestId(*group, sibling), 0, 3, (), "stop")

    facts = [
        Loaded(0, 0, "digest"),
        RequestFailed(0, RequestId(*broken, 0), "no license left"),
        done(whole, 0),
        done(whole, 1),
        GroupScored(whole, (1.0, 0.0)),
        done(broken, 1),
    ]
    hands = Hands(plan, facts)
    result = evaluate(cast(ProcessExecutor, hands), 0, {})
    assert result is not None
    assert (result.rewards, result.num_failed) == ({whole: (1.0, 0.0)}, 1)
    assert [order for _, order in hands.orders if isinstance(order, Score)] == [Score(whole)]
    assert hands.orders[-1] == (len(facts), Drop(0, 0))
