"""One evaluation: the held-out prompts that one version answers while the run goes on.

Its requests run among the others, but belong to no group: they take no place in a batch, have no deadline
and are never trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dora.core.records import GroupId


@dataclass(slots=True)
class Evaluation:
    """An evaluation from the publication of its version until every prompt is judged or has failed."""

    version: int
    num_requests: int
    num_begun: int = 0  # of them, in the order of their prompts
    num_running: int = 0  # of them, not at their end; they wait or are on an engine
    unfinished: dict[GroupId, int] = field(default_factory=dict)  # begun prompts -> answers not at their end
    failed: set[GroupId] = field(default_factory=set)  # of them, those with an answer that failed
    judging: set[GroupId] = field(default_factory=set)  # with the rewarder
    num_judged: int = 0  # prompts at their end

    @property
    def num_left(self) -> int:
        """Requests to be begun."""
        return self.num_requests - self.num_begun
