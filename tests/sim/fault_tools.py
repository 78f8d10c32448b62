"""Tools to break a rule of the core on purpose, by replacing functions of `dora.core` in a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dora.core import event_handlers
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.state import State

Fault = Callable[[pytest.MonkeyPatch], None]


def before_handling(patch: pytest.MonkeyPatch, change: Callable[[State, Event], object]) -> None:
    """Call `change` before each event; the core then handles the event that it returns, if any."""
    original = event_handlers.handle

    def handle(state: State, event: Event) -> list[Action]:
        changed = change(state, event)
        return original(state, event if changed is None else changed)  # type: ignore[arg-type]

    patch.setattr(event_handlers, "handle", handle)


def after_handling(
    patch: pytest.MonkeyPatch, change: Callable[[State, Event, list[Action]], list[Action]]
) -> None:
    """Replace the actions of each event by those that `change` returns."""
    original = event_handlers.handle
    patch.setattr(event_handlers, "handle", lambda state, event: change(state, event, original(state, event)))


def instead_of_handling(
    patch: pytest.MonkeyPatch, kind: type[Event], change: Callable[[State, Any], list[Action]]
) -> None:
    """Handle events of one kind by `change` alone."""
    original = event_handlers.handle

    def handle(state: State, event: Event) -> list[Action]:
        return change(state, event) if isinstance(event, kind) else original(state, event)

    patch.setattr(event_handlers, "handle", handle)


def drop_actions(patch: pytest.MonkeyPatch, module: object, rule: str, kind: type[Action]) -> None:
    """Drop the actions of one kind that a rule gives."""
    original = getattr(module, rule)

    def without_kind(state: State) -> list[Action]:
        return [action for action in original(state) if not isinstance(action, kind)]

    patch.setattr(module, rule, without_kind)
