"""JSON codecs for events and actions, as in the journal, and for the state, as in checkpoints.

An event is written as `{"kind": "request_finished", ...}`: the class name in snake case, then its fields.
Decoding is strict, so that a damaged journal is rejected; only a field with a default may be missing, since
older versions did not write it. Mappings of the state are written as lists of pairs, because their keys are
ids and numbers. Indexes are not written: decoding rebuilds them.
"""

from __future__ import annotations

import re
import typing
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Set
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any

from dora.core import actions, events, invariants
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.index import Indexes
from dora.core.state import State
from dora.core.types import ProtocolError

SNAPSHOT_SCHEMA = 11


@cache
def kind_of(cls: type) -> str:
    """`RequestFinished` -> `request_finished`."""
    return re.sub(r"(?<!^)([A-Z])", r"_\1", cls.__name__).lower()


# Kind -> class of all events and actions.
RECORDS: dict[str, type] = {
    kind_of(cls): cls
    for module, base in ((events, Event), (actions, Action))
    for cls in vars(module).values()
    if isinstance(cls, type) and base in cls.__bases__
}


def to_json(record: Event | Action) -> dict[str, Any]:
    """An event or action as a JSON object; tuples stay tuples, which JSON writes as lists."""
    cls: type = type(record)
    return {"kind": kind_of(cls), **{name: getattr(record, name) for name in _field_names(cls)}}


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


def from_json(raw: Mapping[str, Any]) -> Event | Action:
    """The inverse of `to_json`. Raises ProtocolError if the object is neither an event nor an action."""
    cls = RECORDS.get(raw.get("kind", ""))
    if cls is None:
        raise ProtocolError(f"unknown kind {raw.get('kind')!r}; expected one of {sorted(RECORDS)}")
    record: Event | Action = decode(cls, raw)
    return record


def decode(hint: Any, raw: Any) -> Any:
    """Convert parsed JSON to the type `hint`. Raises ProtocolError."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        args = typing.get_args(hint)
        items = [args[0]] * len(raw) if args[-1] is Ellipsis else args
        return tuple(decode(item, value) for item, value in zip(items, raw, strict=True))
    if origin is UnionType:
        return None if raw is None else decode(typing.get_args(hint)[0], raw)
    if is_dataclass(hint):
        return _decode_record(typing.cast(type, hint), raw)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return hint(*(decode(h, value) for h, value in zip(_type_hints(hint).values(), raw, strict=True)))
    if hint is float and isinstance(raw, int):
        return float(raw)
    if not isinstance(raw, hint):
        raise ProtocolError(f"expected {hint.__name__}, found {raw!r}")
    return raw


def state_to_json(state: State) -> dict[str, Any]:
    """A snapshot of the state in JSON's own types."""
    return {
        "schema": SNAPSHOT_SCHEMA,
        **{name: _encode_value(getattr(state, name)) for name in _SNAPSHOT_FIELDS},
    }


def state_from_json(raw: Mapping[str, Any]) -> State:
    """The state of which `state_to_json` made a snapshot. Raises ProtocolError if the snapshot is damaged."""
    if raw.get("schema") != SNAPSHOT_SCHEMA:
        raise ProtocolError(f"snapshot schema {raw.get('schema')!r}; this version reads {SNAPSHOT_SCHEMA}")
    hints = _type_hints(State)
    try:
        values = {name: _decode_value(hints[name], raw[name]) for name in _SNAPSHOT_FIELDS}
        engines = values.pop("engines")
        state = State(**values)
        state.rebuild_indexes(engines)
        broken = invariants.check(state)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the snapshot is damaged: {error!r}") from error
    if broken:
        raise ProtocolError(f"the snapshot is damaged: {broken[0]}")
    return state


def _decode_record(cls: type, raw: Mapping[str, Any]) -> object:
    hints, optional = _type_hints(cls), _optional_fields(cls)
    try:
        return cls(**{k: decode(h, raw[k]) for k, h in hints.items() if k in raw or k not in optional})
    except KeyError as error:
        raise ProtocolError(f"{kind_of(cls)}: field {error} is missing in {dict(raw)}") from error


@cache
def _type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _optional_fields(cls: type) -> frozenset[str]:
    """Fields with a default value."""
    return frozenset(f.name for f in fields(cls) if f.default is not MISSING)


_REBUILT_FIELDS = {"colocated", "draining", *(f.name for f in fields(Indexes))}  # by State.rebuild_indexes
_SNAPSHOT_FIELDS = tuple(f.name for f in fields(State) if f.name not in _REBUILT_FIELDS)
_MAPPINGS: dict[type, Callable[..., Any]] = {dict: dict, OrderedDict: OrderedDict, Counter: Counter}
_SEQUENCES: dict[type, Callable[..., Any]] = {list: list, set: set, deque: deque}


def _encode_value(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _encode_value(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return [[_encode_value(key), _encode_value(item)] for key, item in value.items()]
    if isinstance(value, Set):
        return [_encode_value(item) for item in sorted(value)]
    if isinstance(value, tuple | list | deque):
        return [_encode_value(item) for item in value]
    return value


def _decode_value(hint: Any, raw: Any) -> Any:
    """Convert a part of a snapshot to the type `hint`: all fields must be there, with exactly its type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in _MAPPINGS:
        item = int if origin is Counter else args[1]
        pairs = ((_decode_value(args[0], key), _decode_value(item, value)) for key, value in raw)
        return _MAPPINGS[origin](dict(pairs))
    if origin in _SEQUENCES:
        return _SEQUENCES[origin](_decode_value(args[0], value) for value in raw)
    if origin is tuple:
        items = [args[0]] * len(raw) if args[-1] is Ellipsis else args
        return tuple(_decode_value(item, value) for item, value in zip(items, raw, strict=True))
    if origin is UnionType:
        return None if raw is None else _decode_value(args[0], raw)
    if is_dataclass(hint):
        hints = _type_hints(typing.cast(type, hint))
        values = {name: _decode_value(h, raw[name]) for name, h in hints.items()}
        return typing.cast(Any, hint)(**values)
    if isinstance(hint, type) and issubclass(hint, tuple):
        hints = _type_hints(hint)
        return hint(*(_decode_value(h, value) for h, value in zip(hints.values(), raw, strict=True)))
    expected = {type(None) if hint is None else hint} | ({int} if hint is float else set())
    if type(raw) not in expected:
        raise TypeError(f"expected {hint}, found {raw!r}")
    return raw
