"""Everything dies at once, and the run goes on from a checkpoint: `kill -9` in virtual time.

The orchestrator is what its journal says, the trainer is at some step it was at before, and whoever
else was there is not there any more.
"""

from __future__ import annotations

from random import Random

from dora.core.events import Resumed, Trained
from dora.core.records import Member
from dora.core.state import State

MAX_DEATHS = 4  # in one world
MAX_REDONE = 3  # steps between two checkpoints


class Deaths:
    """Says when, and with which fact the run goes on."""

    def __init__(self, seed: int, every: int | None) -> None:
        """`every` so many facts; None: never."""
        self._rng = Random(f"deaths {seed}")
        self._every = every
        self._num = self._from_step = 0
        self._batches: dict[int, tuple[Member, ...]] = {}  # trained, as a journal has them

    def note(self, event: Trained, state: State) -> None:
        """Before the orchestrator forgets the batch; one that is redone is known."""
        if event.step not in state.batches:
            return
        groups = [state.groups[group] for group in state.batches[event.step]]
        self._batches[event.step] = tuple(Member(g.id, g.index, g.version) for g in groups)

    def is_due(self, num_events: int) -> bool:
        """Whether everything dies after so many facts."""
        is_due = self._every is not None and num_events > 0 and num_events % self._every == 0
        return is_due and self._num < MAX_DEATHS

    def resume(self, state: State) -> Resumed:
        """From a checkpoint that is no older than the one before."""
        self._num += 1
        num_trained = state.num_trained // state.limits.batch_size
        first = max(self._from_step, num_trained - MAX_REDONE)
        self._from_step = self._rng.randint(first, num_trained)
        kept = tuple((v, digest) for v, digest in sorted(state.store.items()) if v < self._from_step)
        redone = tuple(self._batches[step] for step in range(self._from_step, num_trained))
        return Resumed(self._from_step, kept, redone)
