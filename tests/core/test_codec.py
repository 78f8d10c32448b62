"""Events and actions survive a round trip through JSON; invalid JSON is rejected."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core import actions, codec, events
from dora.core.events import EngineLost, GroupScored, Trained
from dora.core.types import GroupId, ProtocolError

FLOATS = st.floats(allow_nan=False)


def records(cls: type) -> st.SearchStrategy[Any]:
    """Any instance of an event's or action's class."""
    floats = {
        float: FLOATS,
        float | None: st.none() | FLOATS,
        tuple[float, ...]: st.lists(FLOATS).map(tuple),
        tuple[tuple[int, float], ...]: st.lists(st.tuples(st.integers(), FLOATS)).map(tuple),
    }
    hints = get_type_hints(cls)
    return st.builds(cls, **{name: floats.get(hint, st.from_type(hint)) for name, hint in hints.items()})


@pytest.mark.parametrize("kind", codec.RECORDS)
@given(data=st.data())
def test_an_event_or_action_survives_a_round_trip(kind: str, data: st.DataObject) -> None:
    record = data.draw(records(codec.RECORDS[kind]))
    assert codec.from_json(json.loads(json.dumps(codec.to_json(record)))) == record


def test_a_kind_names_either_an_event_or_an_action() -> None:
    for module, base in ((events, events.Event), (actions, actions.Action)):
        classes = {cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, base)}
        assert classes - {base} <= {*codec.RECORDS.values()}
    lost = {"kind": "engine_lost", "engine": 1, "reason": "killed", "kept_tokens": ()}
    assert codec.to_json(EngineLost(1, "killed")) == lost


def test_an_integer_is_accepted_as_a_float() -> None:
    raw = {"kind": "group_scored", "group": [0, 1], "rewards": [1, 0.5]}
    assert codec.from_json(raw) == GroupScored(GroupId(0, 1), (1.0, 0.5))


def test_a_missing_optional_field_has_its_default() -> None:
    assert codec.from_json({"kind": "trained", "step": 3}) == Trained(3)
    written = codec.to_json(Trained(3, 0.5, 0.25))
    assert written == {"kind": "trained", "step": 3, "ess": 0.5, "kl": 0.25, "kls": ()}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "unknown kind None"),
        ({"kind": "tune"}, "unknown kind 'tune'"),
        ({"kind": "loaded", "engine": 0, "version": 1}, "loaded: field 'digest' is missing"),
        ({"kind": "loaded", "engine": "0", "version": 1, "digest": "d"}, "expected int, found '0'"),
        ({"kind": "loaded", "engine": 0, "version": None, "digest": "d"}, "expected int, found None"),
        ({"kind": "loaded", "engine": 0, "version": 1.5, "digest": "d"}, "expected int, found 1.5"),
    ],
)
def test_invalid_events_are_rejected(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        codec.from_json(raw)
