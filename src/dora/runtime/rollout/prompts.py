"""Hands out the run's prompts in order: those of a dataset at once, those from outside once they are put.

How many were handed out is all its state, and the orchestrator's record has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dora.core.events import PromptsFetched
from dora.core.types import GroupId
from dora.data.dataset import Dataset, GrowingDataset
from dora.errors import ServiceError

if TYPE_CHECKING:
    from dora.runtime.run_setup import RunSetup

NOT_PUT = 'the prompts of this run come from data.path, which is not "service"'


def check_prompts(plan: RunSetup, rows: Sequence[Mapping[str, Any]]) -> None:
    """Whether rows from outside could be prompts, from any thread: tokenizing takes a while.

    Raises ServiceError or DataError for those that cannot.
    """
    if not isinstance(plan.dataset, GrowingDataset):
        raise ServiceError(409, NOT_PUT)
    plan.check_lengths(Dataset(rows, plan.dataset.prompt_key, "what was put"))


class PromptSource:
    """Answers orders to fetch prompts; `num_wanted` were ordered and are not there yet."""

    def __init__(self, plan: RunSetup, num_taken: int) -> None:
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

    def append(self, first: int, rows: Sequence[Mapping[str, Any]]) -> list[PromptsFetched]:
        """Take in rows that were checked; they are durable when this returns. `first` were there before.

        The same rows may be put again, as a client does that heard no answer: they are there once.
        Raises ServiceError or DataError, and takes none, if one of them cannot be.
        """
        inflow = self._plan.dataset
        if not isinstance(inflow, GrowingDataset):
            raise ServiceError(409, NOT_PUT)
        if first != len(inflow):
            if first < len(inflow) and inflow.contains(first, rows):
                return []
            raise ServiceError(
                409, f"first = {first}: {len(inflow)} prompts are there; put those that follow, and each once"
            )
        try:
            inflow.append(rows)
        except OSError as error:
            raise ServiceError(503, f"the prompts cannot be kept: {error.strerror}; make room") from error
        return self._hand_out()

    def _hand_out(self) -> list[PromptsFetched]:
        first, inflow = self._cursor.index, self._plan.dataset
        count = self.num_wanted
        if isinstance(inflow, GrowingDataset):
            count = min(count, len(inflow) - first)
        if not count:
            return []
        self.num_wanted -= count
        return [PromptsFetched(first, tuple(GroupId(*self._cursor.next_group()) for _ in range(count)))]
