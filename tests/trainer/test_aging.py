import math

from hypothesis import given
from hypothesis import strategies as st

from dora.trainer.aging import AgingRule, next_staleness

RULE = AgingRule(ess_low=0.5, ess_high=0.9, kl_low=0.02, kl_high=0.1)


def after(staleness: int, ess: float, kl: float, oldest: int | None = None) -> int:
    return next_staleness(RULE, staleness, 4, staleness if oldest is None else oldest, ess, kl)


def test_a_healthy_batch_at_the_bound_raises_it_by_one() -> None:
    assert [after(s, ess=0.95, kl=0.01) for s in range(5)] == [1, 2, 3, 4, 4]


def test_drift_halves_the_bound() -> None:
    assert [after(s, ess=0.3, kl=0.01) for s in range(5)] == [0, 0, 1, 1, 2]
    assert after(4, ess=0.95, kl=0.2) == 2


def test_between_the_limits_nothing_changes() -> None:
    assert after(2, ess=0.7, kl=0.01) == 2
    assert after(2, ess=0.95, kl=0.05) == 2


def test_a_batch_younger_than_the_bound_proves_nothing() -> None:
    assert after(2, ess=0.99, kl=0.0, oldest=1) == 2


def test_a_number_that_is_none_counts_as_drift() -> None:
    assert after(4, ess=math.nan, kl=0.0) == 2
    assert after(4, ess=1.0, kl=math.nan) == 2


@given(bounds=st.tuples(*[st.integers(0, 9)] * 3), ess=st.floats(), kl=st.floats())
def test_the_bound_stays_within_what_the_run_promised(
    bounds: tuple[int, int, int], ess: float, kl: float
) -> None:
    staleness, most, oldest = bounds
    assert 0 <= next_staleness(RULE, staleness, most, oldest, ess, kl) <= most
