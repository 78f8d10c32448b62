"""A name in a run's files leads to its meaning, also with a variable part."""

from __future__ import annotations

import pytest

from dora.errors import InputError
from dora.metrics.catalog import SECTIONS, format_listing


@pytest.mark.parametrize(
    ("name", "documented"),
    [
        ("staleness/num_3", "staleness/num_S"),
        ("off_policy/kl_k3_age_12", "off_policy/kl_k3_age_N"),
        ("reward/looks/mean", "reward/NAME/mean"),
        ("val/pass@4_low", "val/pass@K_low"),
        ("c2", "c2"),
    ],
)
def test_a_name_from_a_file_is_found(name: str, documented: str) -> None:
    metrics = (metric for section in SECTIONS for metric in section.metrics)
    (metric,) = (metric for metric in metrics if metric.matches(name))
    assert documented in metric.names
    assert documented in format_listing(name)


def test_a_similar_name_does_not_match() -> None:
    known = [metric for section in SECTIONS for metric in section.metrics]
    for name in ("staleness/num_", "staleness/num_x", "reward/a/b/mean", "val/pass@4_top", "steps_"):
        assert not any(metric.matches(name) for metric in known), name


def test_no_name_is_documented_twice_for_one_file() -> None:
    of_steps = [name for section in SECTIONS[:-1] for metric in section.metrics for name in metric.names]
    of_summary = [name for metric in SECTIONS[-1].metrics for name in metric.names]
    assert [len({*names}) for names in (of_steps, of_summary)] == [len(of_steps), len(of_summary)]


def test_a_listing_has_units_and_conditions() -> None:
    listing = format_listing("critic/lr")
    assert listing.splitlines()[0] == "The trainer"
    assert 'only with adv_estimator = "gae"' in listing
    assert "stall_s (s)" in format_listing("stall_s")
    assert len(format_listing("").splitlines()) > 150


def test_an_unknown_word_is_rejected() -> None:
    with pytest.raises(InputError, match="no metric has 'xyz'"):
        format_listing("xyz")
