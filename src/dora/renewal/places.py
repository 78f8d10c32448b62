"""Scheduler and seats whose requests can change their version.

What they keep beside that is said of the classes that they extend.
"""

from __future__ import annotations

from dora.engine.scheduler import Scheduler
from dora.engine.seats import Kept, Seats
from dora.engine.sequence import Request
from dora.engine.sequence import Sequence as Seated


class RenewingScheduler(Scheduler):
    """One whose prompts are held for the siblings of a version, as long as it has any."""

    def renew(self, request: Request, *, keeps_kv: bool) -> Seated | None:
        """`request` takes the place of the one of its id, which had an older version.

        Returns its record if it has begun: in its row if it `keeps_kv`, else it has none, and comes back as
        if it had been swapped out. One that has no token yet begins anew.
        """
        sequence = self.running.get(request.id) or self.swapped.get(request.id)
        if sequence is None:
            self.remove(request.id)
            self.submit(request)
            return None
        old = sequence.request.prompt_key
        sequence.request = request
        self._siblings[request.prompt_key] += 1
        self._siblings[old] -= 1
        if self._siblings[old] == 0:
            del self._siblings[old]
            self._let_go(old)
        if request.id in self.running and not keeps_kv:
            self.swapped[request.id] = self.running.pop(request.id)
            self._vacate(sequence)
        return sequence


class RenewingSeats(Seats):
    """One that can forget the KV of a request, and keep what was drawn."""

    def lose_kv(self, sequence: Seated) -> None:
        """It comes back without any: what it had is to be computed again."""
        kept = self._kept.get(sequence.request.id)
        draft = self._rows.draft(sequence) if kept is None else kept.draft
        self._kept[sequence.request.id] = Kept(draft, self._kv[:0].cpu())
