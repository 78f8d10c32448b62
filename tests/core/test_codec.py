"""Every fact and order is read back from JSON as it was written; anything else is refused."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core import codec
from dora.core.events import EngineLost, GroupScored, Trained
from dora.core.records import GroupId, ProtocolError

FLOATS = st.floats(allow_nan=False)


def records(cls: type) -> st.SearchStrategy[Any]:
    """Any instance of a fact's or an order's class."""
    floats = {
        float: FLOATS,
        float | None: st.none() | FLOATS,
        tuple[float, ...]: st.lists(FLOATS).map(tuple),
        tuple[tuple[int, float], ...]: st.lists(st.tuples(st.integers(), FLOATS)).map(tuple),
    }
    hints = get_type_hints(cls)
    return st.builds(cls, **{name: floats.get(hint, st.from_type(hint)) for name, hint in hints.items()})


@pytest.mark.parametrize("kind", codec.FACTS)
@given(data=st.data())
def test_a_fact_survives_being_written(kind: str, data: st.DataObject) -> None:
    fact = data.draw(records(codec.FACTS[kind]))
    assert codec.fact_from_json(json.loads(json.dumps(codec.to_json(fact)))) == fact


@pytest.mark.parametrize("kind", codec.ORDERS)
@given(data=st.data())
def test_an_order_survives_being_written(kind: str, data: st.DataObject) -> None:
    order = data.draw(records(codec.ORDERS[kind]))
    assert codec.order_from_json(json.loads(json.dumps(codec.to_json(order)))) == order


def test_a_kind_names_either_a_fact_or_an_order() -> None:
    assert not codec.FACTS.keys() & codec.ORDERS.keys()
    assert codec.to_json(EngineLost(1, "killed")) == {"kind": "engine_lost", "engine": 1, "reason": "killed"}


def test_a_whole_number_may_stand_for_a_float() -> None:
    raw = {"kind": "group_scored", "group": [0, 1], "rewards": [1, 0.5]}
    assert codec.fact_from_json(raw) == GroupScored(GroupId(0, 1), (1.0, 0.5))


def test_a_field_that_older_versions_did_not_write_has_its_default() -> None:
    assert codec.fact_from_json({"kind": "trained", "step": 3}) == Trained(3)
    written = codec.to_json(Trained(3, 0.5, 0.25))
    assert written == {"kind": "trained", "step": 3, "ess": 0.5, "kl": 0.25, "kls": ()}


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({}, "unknown kind None"),
        ({"kind": "train"}, "unknown kind 'train'"),
        ({"kind": "loaded", "engine": 0, "version": 1}, "loaded lacks 'digest'"),
        ({"kind": "loaded", "engine": "0", "version": 1, "digest": "d"}, "expected int, found '0'"),
        ({"kind": "loaded", "engine": 0, "version": None, "digest": "d"}, "expected int, found None"),
        ({"kind": "loaded", "engine": 0, "version": 1.5, "digest": "d"}, "expected int, found 1.5"),
    ],
)
def test_what_is_no_fact_is_refused(raw: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        codec.fact_from_json(raw)
