"""Apportionment of engines to versions: step 2 of Algorithm 1 with a rounding that keeps the sum."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core.placement import apportion

Requests = dict[int, int]


@pytest.mark.parametrize(
    ("requests", "total", "expected"),
    [
        ({0: 2, 1: 6}, 4, {0: 1, 1: 3}),  # figure 6
        ({0: 1, 1: 2, 2: 1}, 8, {0: 2, 1: 4, 2: 2}),  # no remainder
        ({0: 5, 1: 5, 2: 5}, 5, {0: 2, 1: 2, 2: 1}),  # 5/3 each; Round would give 6
        ({0: 1, 1: 1, 2: 1}, 4, {0: 2, 1: 1, 2: 1}),  # 4/3 each; Round would give 3
        ({0: 3, 1: 3}, 3, {0: 2, 1: 1}),  # a tie goes to the earlier deadline
        ({0: 10, 1: 7, 2: 3}, 6, {0: 3, 1: 2, 2: 1}),  # 3, 2.1, 0.9
        ({0: 1, 1: 99}, 4, {0: 1, 1: 3}),  # 0.04 is still one
        ({0: 1, 1: 1, 2: 98}, 4, {0: 1, 1: 1, 2: 2}),
        ({0: 1, 1: 40, 2: 60}, 5, {0: 1, 1: 2, 2: 2}),  # 0.05, 1.98, 2.97: version 2 is most above its quota
        ({0: 0, 1: 5}, 3, {0: 0, 1: 3}),  # no requests, no engine
        ({0: 4}, 7, {0: 7}),
        ({0: 0}, 3, {0: 0}),
        ({}, 3, {}),
        ({0: 2, 1: 3}, 0, {0: 0, 1: 0}),
    ],
)
def test_engines_follow_requests(requests: Requests, total: int, expected: Requests) -> None:
    assert apportion(requests, total, sorted(requests)) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [([0, 1, 2], {0: 1, 1: 1, 2: 0}), ([2, 0, 1], {2: 1, 0: 1, 1: 0}), ([1, 2, 0], {1: 1, 2: 1, 0: 0})],
)
def test_with_fewer_engines_than_versions_the_first_in_order_get_one(
    order: list[int], expected: Requests
) -> None:
    assert apportion({0: 5, 1: 1, 2: 9}, 2, order) == expected


def test_a_version_without_requests_gets_no_engine() -> None:
    assert apportion({0: 0, 1: 3, 2: 8}, 1, [0, 1, 2]) == {0: 0, 1: 1, 2: 0}


@given(
    requests=st.dictionaries(st.integers(0, 8), st.integers(0, 40), max_size=6),
    total=st.integers(0, 30),
    data=st.data(),
)
def test_all_engines_are_used_and_every_version_is_served(
    requests: Requests, total: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(sorted(requests)))
    result = apportion(requests, total, order)
    wanting = [version for version in order if requests[version]]
    assert result.keys() == requests.keys()
    assert all(result[version] == 0 for version in requests if not requests[version])
    assert sum(result.values()) == (total if wanting else 0) or total <= len(wanting) == sum(result.values())
    if total <= len(wanting):
        assert [version for version in order if result[version]] == wanting[:total]
        return
    quota = {v: Fraction(total * requests[v], sum(requests.values())) for v in wanting}
    assert all(result[version] >= 1 for version in wanting)
    assert all(result[version] < quota[version] + 1 for version in wanting if quota[version] >= 1)
    if all(quota[version] >= 1 for version in wanting):  # plain largest remainder
        assert all(result[version] >= int(quota[version]) for version in wanting)
        more = {v for v in wanting if result[v] > int(quota[v])}
        rest = {v: quota[v] - int(quota[v]) for v in wanting}
        assert all(rest[v] >= rest[w] for v in more for w in wanting if w not in more)


@given(a=st.integers(1, 50), b=st.integers(1, 50), total=st.integers(2, 20))
def test_a_version_with_more_requests_never_gets_fewer_engines(a: int, b: int, total: int) -> None:
    result = apportion({0: a, 1: b}, total, [0, 1])
    if a != b:
        assert (result[0] - result[1]) * (a - b) >= 0 or total == sum(result.values()) == 2
