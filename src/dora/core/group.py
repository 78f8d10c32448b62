"""What the orchestrator knows of one group: the answers to one prompt, which are trained together.

It keeps its version and its deadline from its admission to its end, whatever the bound does meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dora.core.records import GroupId, RequestId


class Term(NamedTuple):
    """What groups that were admitted together have in common."""

    deadline: int
    version: int


@dataclass(slots=True)
class Group:
    """A group from its admission until it is trained, filtered or failed."""

    id: GroupId
    index: int  # position in the dataset's order
    version: int
    deadline: int
    unfinished: set[RequestId]
    scored: bool = False
    finished_tokens: int = 0  # of all finished siblings
    longest_tokens: int = 0  # of the longest of them

    @property
    def term(self) -> Term:
        return Term(self.deadline, self.version)
