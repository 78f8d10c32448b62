"""Several updates of the weights in one training step: how its batch is divided, and how to take them back.

Ring-lite's fixed token budget per update (C3PO, arXiv 2506.14731), with nothing left over: a batch is
always used up, for no sample may be dropped or age.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from dora.trainer.packing import balanced


class Undoable(Protocol):
    """Weights with their optimizer, in one process or in several."""

    def keep(self) -> Callable[[], None]:
        """Copy weights and moments to the host's memory; what is returned puts them back."""


class Whole(Protocol):
    """Weights with their optimizer, in one process."""

    @property
    def flat(self) -> Tensor:
        """The weights [numel], stepped in place."""

    def forget(self) -> None:
        """Begin the gradient anew."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; the weights may have changed, too."""


def updates(lengths: Sequence[int], budget: int | None) -> list[list[int]]:
    """Indices of the responses of each update, near `budget` tokens each; one of all without a budget.

    There are as many updates as the batch's tokens come nearest to, one at least, and their tokens are
    as equal as whole responses allow.
    """
    if budget is None:
        return [[*range(len(lengths))]]
    num = (2 * sum(lengths) + budget) // (2 * budget)
    return balanced(lengths, max(1, min(num, len(lengths))))


@contextmanager
def undone_if_failed(*parts: Undoable) -> Iterator[None]:
    """Weights and moments are as before where anything is raised inside; the host's memory has a copy."""
    undo = [part.keep() for part in parts]
    try:
        yield
    except BaseException:
        for put_back in undo:
            put_back()
        raise


def kept_whole(part: Whole) -> Callable[[], None]:
    """`Undoable.keep` of what one process has."""
    flat, state = part.flat.detach().to("cpu", copy=True), _copied(part.state_dict())

    def put_back() -> None:
        part.flat.copy_(flat)
        part.forget()
        part.load_state_dict(state)

    return put_back


def _copied(value: Any) -> Any:
    """Nested dictionaries and lists with copies of their tensors."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
