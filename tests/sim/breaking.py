"""Tools to break a rule of the core on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dora.core import hearing
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.state import State

Fault = Callable[[pytest.MonkeyPatch], None]


def before_hearing(patch: pytest.MonkeyPatch, change: Callable[[State, Event], object]) -> None:
    """`change` happens first; the core then hears the event that it returns, if it returns one."""
    right = hearing.hear

    def hear(state: State, event: Event) -> list[Action]:
        told = change(state, event)
        return right(state, event if told is None else told)  # type: ignore[arg-type]

    patch.setattr(hearing, "hear", hear)


def after_hearing(
    patch: pytest.MonkeyPatch, change: Callable[[State, Event, list[Action]], list[Action]]
) -> None:
    """`change` makes the orders of a fact."""
    right = hearing.hear
    patch.setattr(hearing, "hear", lambda state, event: change(state, event, right(state, event)))


def instead_of_hearing(
    patch: pytest.MonkeyPatch, kind: type[Event], change: Callable[[State, Any], list[Action]]
) -> None:
    """`change` is all that comes of facts of one kind."""
    right = hearing.hear

    def hear(state: State, event: Event) -> list[Action]:
        return change(state, event) if isinstance(event, kind) else right(state, event)

    patch.setattr(hearing, "hear", hear)


def without(patch: pytest.MonkeyPatch, module: object, rule: str, kind: type[Action]) -> None:
    """A rule forgets to give its orders of one kind."""
    right = getattr(module, rule)

    def forgetful(state: State) -> list[Action]:
        return [order for order in right(state) if not isinstance(order, kind)]

    patch.setattr(module, rule, forgetful)
