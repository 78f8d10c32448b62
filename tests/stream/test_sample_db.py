"""The sample store keeps trajectories, scores and states, for readers in other processes."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.core.types import Branch, GroupId, RequestId
from dora.stream.sample_db import LATER_COLUMNS, SampleStore, Trajectory, count_turns

GROUP = GroupId(2, 7)
READ = """
import json, sys
from pathlib import Path
from dora.journal.reader import read_responses, read_samples
run = Path(sys.argv[1])
print(json.dumps([list(answer.token_ids) for answer in read_responses(run, read_samples(run).values())]))
"""


class Subscriber:
    """Records what a store sends: unfinished trajectories, and the advantages of each group."""

    def __init__(self, store: SampleStore) -> None:
        self.trajectories: list[Trajectory] = []
        self.advantages: dict[GroupId, Sequence[float | None]] = {}
        store.subscribe(self)
        store.subscribe(None)

    def put(self, trajectory: Trajectory) -> None:
        self.trajectories.append(trajectory)

    def score(self, group: GroupId, rewards: Sequence[float], advantages: Sequence[float | None]) -> None:
        self.advantages[group] = advantages

    def finish(self, groups: Iterable[GroupId]) -> None:
        raise AssertionError("no group is in a final state")

    def flush(self) -> None:
        pass


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SampleStore]:
    made = SampleStore(tmp_path / "samples.sqlite")
    yield made
    made.close()


def trajectory(sibling: int, group: GroupId = GROUP) -> Trajectory:
    """Answers of a group differ in length; the first token id needs all four bytes."""
    length = 1 + sibling
    tokens = [2**31 - 1, *range(sibling)]
    return Trajectory(RequestId(*group, sibling), 3, "digest", [5, 6, 7], tokens, [-0.1 * length] * length)


def put_scored(store: SampleStore, group: GroupId = GROUP) -> None:
    for sibling in (1, 0):  # they finish in any order
        store.put(trajectory(sibling, group))
    store.score(group, (1.0, 0.5), (0.7, -0.7))


def rows(path: Path, columns: str) -> list[Any]:
    connection = sqlite3.connect(path)
    found = connection.execute(f"select {columns} from samples order by group_id, sibling").fetchall()
    connection.close()
    return found


def test_a_group_is_preserved_and_in_sibling_order(store: SampleStore) -> None:
    put_scored(store)
    store.commit()
    subscriber = Subscriber(store)
    samples = subscriber.trajectories
    assert [[*sample.token_ids] for sample in samples] == [[2**31 - 1], [2**31 - 1, 0]]
    assert [[*sample.prompt_ids] for sample in samples] == [[5, 6, 7]] * 2
    assert subscriber.advantages == {GROUP: (0.7, -0.7)}
    assert [sample.version for sample in samples] == [3, 3]
    assert [[*sample.logprobs] for sample in samples] == [[np.float32(-0.1)], [np.float32(-0.2)] * 2]


def test_routes_have_one_row_for_each_token_but_the_last(store: SampleStore) -> None:
    routes = np.arange(4 * 2 * 3, dtype=np.int16).reshape(4, 2, 3)
    store.put(trajectory(0))
    store.put(trajectory(1)._replace(routes=routes))
    store.score(GROUP, (1.0, 0.5), (0.7, -0.7))
    store.commit()
    samples = Subscriber(store).trajectories
    assert samples[0].routes is None
    np.testing.assert_array_equal(samples[1].routes, routes.reshape(4, 6))


def test_a_store_of_an_earlier_version_gets_the_later_columns(tmp_path: Path) -> None:
    path = tmp_path / "samples.sqlite"
    earlier = SampleStore(path)
    earlier.put(trajectory(0))
    earlier.close()
    connection = sqlite3.connect(path)
    for column in LATER_COLUMNS:
        connection.execute(f"alter table samples drop column {column}")
    connection.close()
    store = SampleStore(path)
    store.put(trajectory(1)._replace(finish_reason="length", turn_rewards=[0.5]))
    store.commit()
    first, second = Subscriber(store).trajectories
    assert (first.finish_reason, [*first.turn_rewards]) == (None, [])
    assert (second.finish_reason, [*second.turn_rewards]) == ("length", [0.5])
    store.close()


@pytest.mark.parametrize(
    ("mask", "branches", "num"),
    [
        (None, [], 1),
        ([1, 1, 0, 1], [], 2),
        ([0, 1, 0, 0, 1, 1], [], 2),
        (
            [1, 0, 1, 1, 1],
            [Branch(3 + 3, 4)],
            3,
        ),  # the second turn is followed by a branch without new tokens
        ([1, 1, 0, 1, 0, 1], [Branch(3 + 2, 4), Branch(3 + 4, 5)], 3),
    ],
)
def test_turns_are_counted(mask: list[int] | None, branches: list[Branch], num: int) -> None:
    assert count_turns(None if mask is None else np.array(mask, np.uint8), 3, branches) == num


def test_another_process_reads_only_what_is_committed(store: SampleStore, tmp_path: Path) -> None:
    def read_in_another_process() -> list[Any]:
        command = [sys.executable, "-c", READ, str(tmp_path)]
        read: list[Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return read

    put_scored(store)
    assert read_in_another_process() == []
    store.commit()
    assert read_in_another_process() == [[2**31 - 1], [2**31 - 1, 0]]


def test_a_second_answer_to_the_same_request_is_refused(store: SampleStore) -> None:
    store.put(trajectory(0))
    with pytest.raises(sqlite3.IntegrityError):
        store.put(trajectory(0))


def test_a_state_is_set_for_whole_groups(store: SampleStore, tmp_path: Path) -> None:
    other = GroupId(2, 8)
    store.put(trajectory(0, GroupId(3, 0)))
    put_scored(store)
    put_scored(store, other)
    store.set_state([GROUP], "trained", 4)
    store.set_state([other], "filtered: zero_variance")
    store.commit()
    assert rows(tmp_path / "samples.sqlite", "group_id, sibling, state, trained_step") == [
        ("2/7", 0, "trained", 4),
        ("2/7", 1, "trained", 4),
        ("2/8", 0, "filtered: zero_variance", None),
        ("2/8", 1, "filtered: zero_variance", None),
        ("3/0", 0, "finished", None),
    ]


def test_closing_commits(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "samples.sqlite")
    put_scored(store)
    store.close()
    assert rows(tmp_path / "samples.sqlite", "reward") == [(1.0,), (0.5,)]
    assert [path.name for path in tmp_path.iterdir()] == ["samples.sqlite"]


def test_rewards_and_advantages_must_have_the_same_length(store: SampleStore) -> None:
    put_scored(store)
    with pytest.raises(ValueError, match="shorter"):
        store.score(GROUP, (1.0, 0.0), (0.5,))


def test_a_resumed_run_reads_finished_samples(store: SampleStore) -> None:
    put_scored(store)
    other = GroupId(2, 8)
    store.put(trajectory(1, other))
    assert [(a.sibling, a.token_ids.tolist(), a.reward) for a in store.finished(GROUP)] == [
        (0, [2**31 - 1], 1.0),
        (1, [2**31 - 1, 0], 0.5),
    ]
    assert [(a.sibling, a.reward) for a in store.finished(other)] == [(1, None)]
    assert store.finished(GroupId(0, 0)) == []
    assert store.prompts(10) == [(GROUP, [5, 6, 7])]
    assert store.prompts(0) == []


def test_a_resumed_run_reads_the_rewards_of_tasks_that_scored_the_whole_group(store: SampleStore) -> None:
    put_scored(store)
    assert store.task_rewards(GROUP, 2) == store.task_rewards(GroupId(0, 0), 2) == {}
    by_task = {"looks": (1.0, 0.0), "length": (3.0, 4.0)}
    store.score(GROUP, (4.0, 4.0), (None, None), by_task)
    assert store.task_rewards(GROUP, 2) == by_task
    assert store.task_rewards(GROUP, 3) == {}
    store.put(trajectory(2))
    assert store.task_rewards(GROUP, 3) == {}


def test_prompts_of_training_are_read_beside_any_number_of_held_out_ones(store: SampleStore) -> None:
    for row in range(3):
        store.put(trajectory(0, GroupId(-1, row)))
    store.put(trajectory(0, GROUP))
    assert [group for group, _ in store.prompts(2)] == [GROUP, GroupId(-1, 0), GroupId(-1, 1)]


def test_every_sample_has_a_state_until_it_is_deleted(store: SampleStore) -> None:
    put_scored(store)
    store.set_state([GROUP], "trained", 4)
    assert store.states() == [(RequestId(*GROUP, k), "trained", 4) for k in (0, 1)]
    store.delete(RequestId(*GROUP, 0))
    assert store.states() == [(RequestId(*GROUP, 1), "trained", 4)]
    store.put(trajectory(0))


def test_an_event_waits_for_responses_and_rewards_and_not_for_states(
    store: SampleStore, tmp_path: Path
) -> None:
    path = tmp_path / "samples.sqlite"
    store.put(trajectory(0))
    store.commit_payload()
    assert rows(path, "state") == [("finished",)]
    store.score(GROUP, (1.0,), (0.5,))
    store.commit_payload()
    store.set_state([GROUP], "committed")
    store.commit_payload()
    assert rows(path, "state") == [("scored",)]
    store.commit()
    assert rows(path, "state") == [("committed",)]
