"""The whole state as JSON, and back: what a checkpoint keeps of the orchestrator.

Mappings are written as lists of pairs, for their keys are ids and numbers; indexes are not
written but counted anew. A restored orchestrator gives the same orders as the one it was
taken from.
"""

from __future__ import annotations

import typing
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any

from dora.core import invariants
from dora.core.indexes import Indexes
from dora.core.records import ProtocolError
from dora.core.state import State

SCHEMA = 6
_COUNTED = ("colocated", "leaving", *(f.name for f in fields(Indexes)))  # by State.restore


def to_json(state: State) -> dict[str, Any]:
    """The state as an object of JSON's own types."""
    values = {f.name: getattr(state, f.name) for f in fields(State)}
    kept = {name: _plain(value) for name, value in values.items() if name not in _COUNTED}
    return {"schema": SCHEMA, **kept}


def from_json(raw: Mapping[str, Any]) -> State:
    """The state that `to_json` wrote. Raises ProtocolError where it is not one."""
    if raw.get("schema") != SCHEMA:
        raise ProtocolError(f"snapshot schema {raw.get('schema')!r}; this version reads {SCHEMA}")
    hints = _hints(State)
    try:
        values = {
            name: _read(hints[name], raw[name])
            for name in (f.name for f in fields(State))
            if name not in _COUNTED
        }
        engines = values.pop("engines")
        state = State(**values)
        state.restore(engines)
        broken = invariants.check(state)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the snapshot is damaged: {error!r}") from error
    if broken:
        raise ProtocolError(f"the snapshot is damaged: {broken[0]}")
    return state


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, Set):
        return [_plain(item) for item in sorted(value)]
    if isinstance(value, tuple | list | deque):
        return [_plain(item) for item in value]
    return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


_MAPPINGS: dict[type, Callable[..., Any]] = {dict: dict, OrderedDict: OrderedDict, Counter: Counter}
_SEQUENCES: dict[type, Callable[..., Any]] = {list: list, set: set, deque: deque}


def _read(hint: Any, raw: Any) -> Any:
    """Plain JSON as the type that `hint` names."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in _MAPPINGS:
        item = int if origin is Counter else args[1]
        return _MAPPINGS[origin]({_read(args[0], key): _read(item, value) for key, value in raw})
    if origin in _SEQUENCES:
        return _SEQUENCES[origin](_read(args[0], value) for value in raw)
    if origin is tuple:
        items = [args[0]] * len(raw) if args[-1] is Ellipsis else args
        return tuple(_read(item, value) for item, value in zip(items, raw, strict=True))
    if origin is UnionType:
        return None if raw is None else _read(args[0], raw)
    if is_dataclass(hint):
        values = {name: _read(h, raw[name]) for name, h in _hints(typing.cast(type, hint)).items()}
        return typing.cast(Any, hint)(**values)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return hint(*(_read(h, value) for h, value in zip(_hints(hint).values(), raw, strict=True)))
    kinds = {type(None) if hint is None else hint} | ({int} if hint is float else set())
    if type(raw) not in kinds:
        raise TypeError(f"{raw!r} is no {hint}")
    return raw
