"""What moving costs, in tokens, and how long an unfinished request will probably go on."""

from __future__ import annotations

import pytest
from tests.core.midway import engine, midway, running
from tests.core.stations import limits

from dora.core.costs import Costs
from dora.core.lengths import horizon_tokens, is_long, remaining_tokens
from dora.core.records import GroupId, RequestId
from dora.core.state import State


def test_what_was_never_measured_is_free() -> None:
    assert Costs().of_move(3, 1000, row_tokens_per_s=50.0) == 0.0
    assert Costs().of_load(4, row_tokens_per_s=50.0) == 0.0


def test_a_move_costs_what_its_rows_could_have_decoded_meanwhile() -> None:
    """1,000 tokens of 2 kB at 1 MB/s take 2 s, and three requests stand still for 0.1 s each."""
    costs = Costs()
    costs.heard_move(num_tokens=100, num_bytes=200_000, copy_s=0.2, stop_s=0.1)
    assert costs.kv_bytes_per_token == 2_000
    assert costs.copy_bytes_per_s == 1_000_000
    assert costs.of_move(3, 1_000, row_tokens_per_s=50.0) == pytest.approx(50 * (2.0 + 0.3))


def test_a_load_costs_what_all_rows_could_have_decoded_meanwhile() -> None:
    costs = Costs()
    costs.heard_load(0.5)
    assert costs.of_load(4, row_tokens_per_s=50.0) == 4 * 50 * 0.5


def test_a_measurement_moves_the_mean_by_a_fifth() -> None:
    costs = Costs()
    costs.heard_load(1.0)
    costs.heard_load(2.0)
    assert costs.load_s == pytest.approx(1.2)
    costs.heard_answer(100)
    costs.heard_answer(50)
    assert costs.answer_tokens == pytest.approx(90.0)


def test_the_size_of_kv_is_that_of_all_moves_for_one_early_move_has_hardly_any_answer() -> None:
    costs = Costs()
    costs.heard_move(num_tokens=1, num_bytes=50_000, copy_s=0.1, stop_s=0.1)
    costs.heard_move(num_tokens=999, num_bytes=950_000, copy_s=0.1, stop_s=0.1)
    assert costs.kv_bytes_per_token == 1_000


def test_a_move_of_nothing_tells_nothing_of_bytes() -> None:
    costs = Costs()
    costs.heard_move(num_tokens=0, num_bytes=512, copy_s=0.0, stop_s=0.1)
    assert (costs.kv_bytes_per_token, costs.copy_bytes_per_s, costs.stop_s) == (0.0, 0.0, 0.1)


REQUEST = RequestId(0, 4, 0)


def at(num_tokens: int, finished: tuple[int, ...] = (), mean: float = 0.0) -> State:
    """The first of four siblings has `num_tokens`; others have finished with theirs."""
    state = midway(limits(group_size=4), newest=0)
    engine(state, 0, rows=8, held={0})
    running(state, 0, 0, 4, num_tokens=num_tokens, siblings=range(4 - len(finished)))
    group = state.groups[GroupId(0, 4)]
    group.finished_tokens, group.longest_tokens = sum(finished), max(finished, default=0)
    state.costs.answer_tokens = mean
    return state


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (at(30, mean=100.0), 70),  # nothing is known but the run's mean
        (at(30, (50, 70), mean=100.0), 30),  # the siblings' mean is 60
        (at(65, (50, 70), mean=100.0), 5),  # beyond their mean, not beyond the longest
        (at(90, (50, 70), mean=100.0), 90),  # beyond them all: it doubles
        (at(130, mean=100.0), 130),
        (at(0), 1),  # at the very beginning of a run
    ],
)
def test_finished_siblings_predict_the_unfinished(state: State, expected: float) -> None:
    assert remaining_tokens(state, REQUEST) == expected


def test_a_request_is_long_if_more_is_to_come_than_a_whole_answer_has() -> None:
    assert is_long(at(30, (500, 700), mean=100.0), REQUEST)
    assert is_long(at(101, mean=100.0), REQUEST)
    assert not is_long(at(30, (50, 70), mean=100.0), REQUEST)


def test_an_engine_has_a_version_until_its_last_request_ends() -> None:
    state = at(30, mean=100.0)
    running(state, 0, 0, 9, num_tokens=80)
    on = state.engines[0]
    assert horizon_tokens(state, on, 0) == 70
    assert horizon_tokens(state, on, 1) == 0
