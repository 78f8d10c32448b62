"""C1, C2 and C3, derived from events and actions, in real runs and in simulated ones.

It imports only the record types of the core, none of its rules or state: an error in the orchestrator cannot
hide itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dora.audit.groups import GroupAudit
from dora.audit.steps import StepAudit
from dora.audit.versions import VersionAudit
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.types import Limits
from dora.journal.reader import SampleKey, SampleRow


class GuaranteeAudit:
    """Follows all events and actions of a run. `findings` are sentences that start with the guarantee."""

    def __init__(
        self,
        limits: Limits,
        num_prompts: int | None,
        samples: Mapping[SampleKey, SampleRow] | None = None,
        source_rows: Sequence[int] | None = None,
    ) -> None:
        """`num_prompts` is the number of dataset rows, None for a growing dataset; `source_rows` are those of
        each source, if there are several. Without `samples` there is no sample store to compare with.
        """
        self.findings: list[str] = []
        self.versions = VersionAudit(self.findings, samples or {}, breaks_c1=limits.breaks_c1)
        self.steps = StepAudit(self.findings, limits.num_steps)
        self.groups = GroupAudit(self.findings, limits, num_prompts, self.steps, samples, source_rows)

    def observe(self, record: Event | Action) -> None:
        """Follow the next event or action."""
        self.versions.observe(record)
        self.steps.observe(record)
        self.groups.observe(record)

    def close(self) -> None:
        """Check what needs the whole run."""
        self.steps.close()
        self.groups.close()
