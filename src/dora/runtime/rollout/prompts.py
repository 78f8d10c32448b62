"""The prompts of a run, in order: of a dataset, or uploaded through the service while the run trains.

The only state is the number of fetched prompts, which is part of the orchestrator's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dora.core.events import PromptsFetched
from dora.core.types import GroupId
from dora.data.dataset import Dataset, GrowingDataset
from dora.errors import DataError, ServiceError

if TYPE_CHECKING:
    from dora.runtime.run_setup import RunSetup

NO_UPLOADS = 'the prompts of this run come from data.path; set data.path = "service" to upload prompts'


def check_prompts(setup: RunSetup, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check uploaded rows before they are appended. Callable from any thread, because tokenizing is slow.

    Raises ServiceError if the run takes no uploads, DataError for a row that cannot be a prompt.
    """
    if not isinstance(setup.dataset, GrowingDataset):
        raise ServiceError(409, NO_UPLOADS)
    uploaded = Dataset(rows, setup.dataset.prompt_key, "the uploaded rows", image_key=setup.dataset.image_key)
    if uploaded.has_images:  # their paths would be those of the driver's machine
        raise DataError(
            f"the uploaded rows have images in the column {uploaded.image_key!r}; only a dataset may have "
            "them: remove the column"
        )
    setup.check_lengths(uploaded)


class PromptSource:
    """Executes `FetchPrompts` actions. `num_wanted` prompts were requested and are not uploaded yet."""

    def __init__(self, setup: RunSetup, num_taken: int) -> None:
        """`num_taken` prompts were fetched before the run was resumed."""
        self._setup, self._cursor = setup, setup.cursor(num_taken)
        self.num_wanted = 0

    @property
    def num_taken(self) -> int:
        """Prompts fetched so far, in all epochs."""
        return self._cursor.index

    def fetch(self, count: int) -> list[PromptsFetched]:
        """Request `count` prompts. Returns those that are available; the others follow once uploaded."""
        self.num_wanted += count
        return self._fetch_available()

    def append(self, first: int, rows: Sequence[Mapping[str, Any]]) -> list[PromptsFetched]:
        """Append uploaded rows, after `check_prompts`. They are durable when this returns.

        `first` is the number of rows before them. A repeated upload, as a client sends after a lost response,
        has no effect. Raises ServiceError or DataError without appending any row.
        """
        dataset = self._setup.dataset
        if not isinstance(dataset, GrowingDataset):
            raise ServiceError(409, NO_UPLOADS)
        if first != len(dataset):
            if first < len(dataset) and dataset.contains(first, rows):
                return []
            raise ServiceError(
                409,
                f"first = {first}: the run has {len(dataset)} prompts; upload the prompts that follow them",
            )
        try:
            dataset.append(rows)
        except OSError as error:
            raise ServiceError(503, f"cannot store the prompts: {error.strerror}; free disk space") from error
        return self._fetch_available()

    def _fetch_available(self) -> list[PromptsFetched]:
        first, dataset = self._cursor.index, self._setup.dataset
        count = self.num_wanted
        if isinstance(dataset, GrowingDataset):
            count = min(count, len(dataset) - first)
        if not count:
            return []
        self.num_wanted -= count
        return [PromptsFetched(first, tuple(GroupId(*self._cursor.next_group()) for _ in range(count)))]
