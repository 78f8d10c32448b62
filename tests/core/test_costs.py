"""Costs of migrations and loads in tokens, and predicted lengths of unfinished requests."""

from __future__ import annotations

import pytest
from tests.core.fake_workers import limits, one_engine
from tests.core.midrun import add_engine, add_running, state_at

from dora.core.costs import MeasuredCosts
from dora.core.events import Loaded, RequestFinished
from dora.core.length_prediction import is_predicted_long, predict_remaining_steps, predict_remaining_tokens
from dora.core.state import State
from dora.core.types import GroupId, RequestId


def test_unmeasured_costs_are_0() -> None:
    assert MeasuredCosts().migration_cost(3, 1000, row_tokens_per_s=50.0) == 0.0
    assert MeasuredCosts().load_cost(4, row_tokens_per_s=50.0) == 0.0


def test_a_migration_costs_the_tokens_its_rows_do_not_decode_meanwhile() -> None:
    """1,000 tokens of 2 kB at 1 MB/s take 2 s; three requests pause for 0.1 s each."""
    costs = MeasuredCosts()
    costs.observe_migration(num_tokens=100, num_bytes=200_000, copy_s=0.2, stop_s=0.1)
    assert costs.kv_bytes_per_token == 2_000
    assert costs.copy_bytes_per_s == 1_000_000
    assert costs.migration_cost(3, 1_000, row_tokens_per_s=50.0) == pytest.approx(50 * (2.0 + 0.3))


def test_a_load_costs_the_tokens_all_rows_do_not_decode_meanwhile() -> None:
    costs = MeasuredCosts()
    costs.observe_load(0.5)
    assert costs.load_cost(4, row_tokens_per_s=50.0) == 4 * 50 * 0.5


def test_a_measurement_has_a_weight_of_one_fifth() -> None:
    costs = MeasuredCosts()
    costs.observe_load(1.0)
    costs.observe_load(2.0)
    assert costs.load_s == pytest.approx(1.2)
    costs.observe_response(100)
    costs.observe_response(50)
    assert costs.mean_response_tokens == pytest.approx(90.0)


def test_kv_bytes_per_token_is_averaged_over_all_migrations() -> None:
    costs = MeasuredCosts()
    costs.observe_migration(num_tokens=1, num_bytes=50_000, copy_s=0.1, stop_s=0.1)
    costs.observe_migration(num_tokens=999, num_bytes=950_000, copy_s=0.1, stop_s=0.1)
    assert costs.kv_bytes_per_token == 1_000


def test_a_migration_without_tokens_does_not_count_for_the_kv_size() -> None:
    costs = MeasuredCosts()
    costs.observe_migration(num_tokens=0, num_bytes=512, copy_s=0.0, stop_s=0.1)
    assert (costs.kv_bytes_per_token, costs.copy_bytes_per_s, costs.stop_s) == (0.0, 0.0, 0.1)


def test_a_run_measures_its_loads_and_responses() -> None:
    run = one_engine(limits(), rows=4, slots=2)
    run.deliver_all(unless=lambda event: isinstance(event, Loaded | RequestFinished))
    run.now += 2.0
    run.deliver_all(unless=lambda event: isinstance(event, RequestFinished))
    assert run.state.costs == MeasuredCosts(load_s=2.0)
    run.deliver_all()
    assert run.state.costs.mean_response_tokens == 3.0


REQUEST = RequestId(0, 4, 0)


def state_with_request(num_tokens: int, finished: tuple[int, ...] = (), mean: float = 0.0) -> State:
    """The first of four siblings has `num_tokens`; others have finished with theirs."""
    state = state_at(limits(group_size=4), newest=0)
    add_engine(state, 0, rows=8, loaded={0})
    add_running(state, 0, 0, 4, num_tokens=num_tokens, siblings=range(4 - len(finished)))
    group = state.groups[GroupId(0, 4)]
    group.finished_tokens, group.longest_tokens = sum(finished), max(finished, default=0)
    state.costs.mean_response_tokens = mean
    return state


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (state_with_request(30, mean=100.0), 70),  # only the run's mean is known
        (state_with_request(30, (50, 70), mean=100.0), 30),  # the siblings' mean is 60
        (state_with_request(65, (50, 70), mean=100.0), 5),  # beyond their mean, not beyond the longest
        (state_with_request(90, (50, 70), mean=100.0), 90),  # beyond all: expected to double
        (state_with_request(130, mean=100.0), 130),
        (state_with_request(0), 1),  # at the start of a run
    ],
)
def test_finished_siblings_predict_unfinished_ones(state: State, expected: float) -> None:
    assert predict_remaining_tokens(state, REQUEST) == expected


def test_a_request_is_long_if_more_than_a_mean_response_remains() -> None:
    assert is_predicted_long(state_with_request(30, (500, 700), mean=100.0), REQUEST)
    assert is_predicted_long(state_with_request(101, mean=100.0), REQUEST)
    assert not is_predicted_long(state_with_request(30, (50, 70), mean=100.0), REQUEST)


def test_remaining_steps_are_those_of_the_longest_request() -> None:
    state = state_with_request(30, mean=100.0)
    add_running(state, 0, 0, 9, num_tokens=80)
    on = state.engines[0]
    assert predict_remaining_steps(state, on, 0) == 70
    assert predict_remaining_steps(state, on, 1) == 0
