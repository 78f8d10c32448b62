"""How facts and orders are written as JSON objects, and read back.

`{"kind": "request_finished", ...}`: the kind is the class name in snake case, the other keys
are its fields. Reading is strict, so a journal that was tampered with is refused; only a field with a
default may be missing, for older versions did not write it.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

from dora.core import actions, events
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.records import ProtocolError


@cache
def kind_of(cls: type) -> str:
    """`RequestFinished` -> `request_finished`."""
    return re.sub(r"(?<!^)([A-Z])", r"_\1", cls.__name__).lower()


FACTS: dict[str, type] = {kind_of(cls): cls for cls in typing.get_args(events.Event)}
ORDERS: dict[str, type] = {kind_of(cls): cls for cls in typing.get_args(actions.Action)}


def to_json(record: Event | Action) -> dict[str, Any]:
    """A fact or an order as a JSON object; tuples stay tuples, which JSON writes as lists."""
    cls: type = type(record)
    return {"kind": kind_of(cls), **{f.name: getattr(record, f.name) for f in fields(record)}}


def fact_from_json(raw: Mapping[str, Any]) -> Event:
    """Raises ProtocolError where the object is not a fact."""
    return typing.cast(Event, _record(FACTS, raw))


def order_from_json(raw: Mapping[str, Any]) -> Action:
    """Raises ProtocolError where the object is not an order."""
    return typing.cast(Action, _record(ORDERS, raw))


def _record(known: Mapping[str, type], raw: Mapping[str, Any]) -> object:
    cls = known.get(raw.get("kind", ""))
    if cls is None:
        raise ProtocolError(f"unknown kind {raw.get('kind')!r}; expected one of {sorted(known)}")
    return read(cls, raw)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _optional(cls: type) -> frozenset[str]:
    """Fields with a default."""
    return frozenset(f.name for f in fields(cls) if f.default is not MISSING)


def read(hint: Any, raw: Any) -> Any:
    """Turn parsed JSON back into the type that `hint` names."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        args = typing.get_args(hint)
        items = [args[0]] * len(raw) if args[-1] is Ellipsis else args
        return tuple(read(item, value) for item, value in zip(items, raw, strict=True))
    if origin is types.UnionType:
        return None if raw is None else read(typing.get_args(hint)[0], raw)
    if is_dataclass(hint):
        try:
            hints, optional = _hints(typing.cast(type, hint)), _optional(typing.cast(type, hint))
            given = {k: h for k, h in hints.items() if k in raw or k not in optional}
            return typing.cast(Any, hint)(**{k: read(h, raw[k]) for k, h in given.items()})
        except KeyError as error:
            raise ProtocolError(f"{kind_of(typing.cast(type, hint))} lacks {error}: {dict(raw)}") from error
    if isinstance(hint, type) and issubclass(hint, tuple):
        return hint(*(read(h, value) for h, value in zip(_hints(hint).values(), raw, strict=True)))
    if hint is float and isinstance(raw, int):
        return float(raw)
    if not isinstance(raw, hint):
        raise ProtocolError(f"expected {hint.__name__}, found {raw!r}")
    return raw
