"""A name in a run's files leads to its meaning, whatever stands for what varies in it."""

from __future__ import annotations

import pytest

from dora.errors import InputError
from dora.observe.metrics import PARTS, found, listing


@pytest.mark.parametrize(
    ("name", "documented"),
    [
        ("staleness/num_3", "staleness/num_S"),
        ("off_policy/kl_k3_age_12", "off_policy/kl_k3_age_N"),
        ("reward/looks/mean", "reward/NAME/mean"),
        ("val/pass@4_low", "val/pass@K_low"),
        ("c2", "c1, c2, c3"),
    ],
)
def test_a_name_as_it_is_in_a_file_is_found(name: str, documented: str) -> None:
    assert [metric for _, metric in found(name) if documented in metric.names and metric.has(name)] != []


def test_a_name_that_is_like_another_is_not_taken_for_it() -> None:
    known = [metric for part in PARTS for metric in part.metrics]
    for name in ("staleness/num_", "staleness/num_x", "reward/a/b/mean", "val/pass@4_top", "steps_"):
        assert not any(metric.has(name) for metric in known), name


def test_no_name_is_explained_twice_in_one_file() -> None:
    of_steps = [name for part in PARTS[:-1] for metric in part.metrics for name in metric.each()]
    of_summary = [name for metric in PARTS[-1].metrics for name in metric.each()]
    assert [len({*names}) for names in (of_steps, of_summary)] == [len(of_steps), len(of_summary)]


def test_a_listing_has_units_and_says_when_a_name_is_there() -> None:
    told = listing("critic/lr")
    assert told.splitlines()[0] == "What the trainer did"
    assert 'only with adv_estimator = "gae"' in told
    assert "stall_s (s)" in listing("stall_s")
    assert len(listing("").splitlines()) > 150


def test_a_word_that_is_nowhere_is_refused() -> None:
    with pytest.raises(InputError, match="no metric has 'xyz'"):
        listing("xyz")
