"""Hands out the run's prompts in order: those of a dataset at once, those from outside once they are put.

How many were handed out is all its state, and the orchestrator's record has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dora.core.events import PromptsFetched
from dora.core.records import GroupId
from dora.data.dataset import Dataset
from dora.data.inflow import Inflow
from dora.errors import ServiceError

if TYPE_CHECKING:
    from dora.runtime.plan import Plan


class Supply:
    """Answers orders to fetch prompts; `num_wanted` were ordered and are not there yet."""

    def __init__(self, plan: Plan, num_taken: int) -> None:
        """`num_taken` prompts were handed out in former lives."""
        self._plan, self._cursor = plan, plan.cursor(num_taken)
        self.num_wanted = 0

    @property
    def num_taken(self) -> int:
        """Prompts handed out so far, in all epochs."""
        return self._cursor.index

    def fetch(self, count: int) -> list[PromptsFetched]:
        """The next `count` prompts, as far as they are there; the others follow."""
        self.num_wanted += count
        return self._hand_out()

    def put(self, first: int, rows: Sequence[Mapping[str, Any]]) -> list[PromptsFetched]:
        """Take in rows from outside; they are durable when this returns. `first` were there before.

        The same rows may be put again, as a client does that heard no answer: they are there once.
        Raises ServiceError or DataError, and takes none, if one of them cannot be.
        """
        inflow = self._plan.dataset
        if not isinstance(inflow, Inflow):
            raise ServiceError(409, 'the prompts of this run come from data.path, which is not "service"')
        if first != len(inflow):
            if first < len(inflow) and inflow.has(first, rows):
                return []
            raise ServiceError(
                409, f"first = {first}: {len(inflow)} prompts are there; put those that follow, and each once"
            )
        self._plan.check_lengths(Dataset(rows, inflow.prompt_key, "what was put"))
        inflow.add(rows)
        return self._hand_out()

    def _hand_out(self) -> list[PromptsFetched]:
        first, inflow = self._cursor.index, self._plan.dataset
        count = self.num_wanted
        if isinstance(inflow, Inflow):
            count = min(count, len(inflow) - first)
        if not count:
            return []
        self.num_wanted -= count
        return [PromptsFetched(first, tuple(GroupId(*self._cursor.take()) for _ in range(count)))]
