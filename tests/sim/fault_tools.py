"""Tools to break a rule of the core on purpose, by replacing functions of `dora.core` in a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dora.core import codec, event_handlers
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.state import State

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]
Replacement = tuple[object, str, object]  # a module or class, the name of its rule, and the broken rule


class Fault(NamedTuple):
    """Replacements of rules; the verdict of some seed then has `message` in it."""

    name: str
    message: str
    replacements: tuple[Replacement, ...]


FAULTS: list[Fault] = []


def add_fault(name: str, message: str, *replacements: Replacement) -> None:
    FAULTS.append(Fault(name, message, replacements))


def replacement(owner: object, rule: str, broken: Function) -> Replacement:
    """Replace a rule by `broken`, whose first argument is the original."""
    original = getattr(owner, rule)
    return owner, rule, lambda *args, **kwargs: broken(original, *args, **kwargs)


def replaces(message: str, owner: object, rule: str) -> Decorator:
    """Add the fault that the decorated function, whose first argument is the original, replaces a rule."""

    def register(broken: Function) -> Function:
        add_fault(broken.__name__, message, replacement(owner, rule, broken))
        return broken

    return register


def before_handling(message: str, kind: type[Any] = object) -> Decorator:
    """Call the function before events of a kind (default: all). An event that it returns replaces it."""

    def register(change: Function) -> Function:
        def handle(original: Function, state: State, event: Event) -> Any:
            changed = change(state, event) if isinstance(event, kind) else None
            return original(state, event if changed is None else changed)

        add_fault(change.__name__, message, replacement(event_handlers, "handle", handle))
        return change

    return register


def after_handling(message: str, kind: type[Any] = object) -> Decorator:
    """Replace the actions of events of a kind (default: all) by those that the function returns, if any."""

    def register(change: Function) -> Function:
        def handle(original: Function, state: State, event: Event) -> Any:
            actions: list[Action] = original(state, event)
            changed = change(state, event, actions) if isinstance(event, kind) else None
            return actions if changed is None else changed

        add_fault(change.__name__, message, replacement(event_handlers, "handle", handle))
        return change

    return register


def instead_of_handling(message: str, kind: type[Any]) -> Decorator:
    """Handle events of one kind by the function alone."""

    def register(change: Function) -> Function:
        handlers = event_handlers.HANDLERS | {kind: change}
        add_fault(change.__name__, message, (event_handlers, "HANDLERS", handlers))
        return change

    return register


def forget_in_snapshot(name: str, value: object, message: str) -> None:
    """Add the fault that the written state has `value` in place of one field."""
    broken = replacement(codec, "state_to_json", lambda original, state: original(state) | {name: value})
    add_fault(f"a_snapshot_forgets_{name}", message, broken)
