"""The sample store keeps what is put in, whole groups at a time, for readers in other processes."""

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

from dora.core.records import GroupId, RequestId
from dora.stream.samples import SampleStore, Trajectory

GROUP = GroupId(2, 7)
READ = """
import json, sys
from pathlib import Path
from dora.observe.samples import read_answers, read_samples
run = Path(sys.argv[1])
print(json.dumps([list(answer.token_ids) for answer in read_answers(run, read_samples(run).values())]))
"""


class Told:
    """Hears what a store has: of each answer that has not ended, and of each group's advantages."""

    def __init__(self, store: SampleStore) -> None:
        self.answers: list[Trajectory] = []
        self.advantages: dict[GroupId, Sequence[float | None]] = {}
        store.follow(self)
        store.follow(None)

    def put(self, trajectory: Trajectory) -> None:
        self.answers.append(trajectory)

    def score(self, group: GroupId, rewards: Sequence[float], advantages: Sequence[float | None]) -> None:
        self.advantages[group] = advantages

    def end(self, groups: Iterable[GroupId]) -> None:
        raise AssertionError("nothing ends while a store tells what it has")

    def flush(self) -> None:
        pass


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SampleStore]:
    made = SampleStore(tmp_path / "samples.sqlite")
    yield made
    made.close()


def trajectory(sibling: int, group: GroupId = GROUP) -> Trajectory:
    """The answers of a group have other lengths; the first token id needs all its bytes."""
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


def test_a_group_comes_back_as_it_was_put_in_sibling_order(store: SampleStore) -> None:
    put_scored(store)
    store.commit()
    told = Told(store)
    samples = told.answers
    assert [sample.token_ids for sample in samples] == [[2**31 - 1], [2**31 - 1, 0]]
    assert [sample.prompt_ids for sample in samples] == [[5, 6, 7]] * 2
    assert told.advantages == {GROUP: (0.7, -0.7)}
    assert [sample.version for sample in samples] == [3, 3]
    expected = [np.float32(-0.1)], [np.float32(-0.2)] * 2
    assert [sample.logprobs for sample in samples] == [list(map(float, line)) for line in expected]


def test_routes_come_back_a_row_for_each_token_but_the_last(store: SampleStore) -> None:
    routes = np.arange(4 * 2 * 3, dtype=np.int16).reshape(4, 2, 3)
    store.put(trajectory(0))
    store.put(trajectory(1)._replace(routes=routes))
    store.score(GROUP, (1.0, 0.5), (0.7, -0.7))
    store.commit()
    samples = Told(store).answers
    assert samples[0].routes is None
    np.testing.assert_array_equal(samples[1].routes, routes.reshape(4, 6))


def test_another_process_reads_what_is_committed_and_nothing_else(store: SampleStore, tmp_path: Path) -> None:
    def read_elsewhere() -> list[Any]:
        command = [sys.executable, "-c", READ, str(tmp_path)]
        read: list[Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return read

    put_scored(store)
    assert read_elsewhere() == []
    store.commit()
    assert read_elsewhere() == [[2**31 - 1], [2**31 - 1, 0]]


def test_a_second_answer_to_the_same_request_is_refused(store: SampleStore) -> None:
    store.put(trajectory(0))
    with pytest.raises(sqlite3.IntegrityError):
        store.put(trajectory(0))


def test_states_are_those_of_whole_groups(store: SampleStore, tmp_path: Path) -> None:
    other = GroupId(2, 8)
    store.put(trajectory(0, GroupId(3, 0)))
    put_scored(store)
    put_scored(store, other)
    store.mark([GROUP], "trained", 4)
    store.mark([other], "filtered: zero_variance")
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


def test_rewards_that_do_not_fit_their_advantages_are_refused(store: SampleStore) -> None:
    put_scored(store)
    with pytest.raises(ValueError, match="shorter"):
        store.score(GROUP, (1.0, 0.0), (0.5,))


def test_a_run_that_goes_on_finds_what_is_finished(store: SampleStore) -> None:
    put_scored(store)
    other = GroupId(2, 8)
    store.put(trajectory(1, other))
    assert [(a.sibling, a.token_ids, a.reward) for a in store.finished(GROUP)] == [
        (0, [2**31 - 1], 1.0),
        (1, [2**31 - 1, 0], 0.5),
    ]
    assert [(a.sibling, a.reward) for a in store.finished(other)] == [(1, None)]
    assert store.finished(GroupId(0, 0)) == []
    assert store.prompts(10) == [(GROUP, [5, 6, 7])]
    assert store.prompts(0) == []


def test_states_are_those_of_every_sample_until_it_is_forgotten(store: SampleStore) -> None:
    put_scored(store)
    store.mark([GROUP], "trained", 4)
    assert store.states() == [(RequestId(*GROUP, k), "trained", 4) for k in (0, 1)]
    store.forget(RequestId(*GROUP, 0))
    assert store.states() == [(RequestId(*GROUP, 1), "trained", 4)]
    store.put(trajectory(0))


def test_a_store_of_a_run_from_before_there_were_routes_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "samples.sqlite"
    SampleStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("alter table samples drop column routes")
    for _ in range(2):
        store = SampleStore(path)
        store.put(trajectory(len(store.num_drawn(GROUP))))
        store.close()
    store = SampleStore(path)
    assert [answer.routes for answer in Told(store).answers] == [None, None]
    store.close()
