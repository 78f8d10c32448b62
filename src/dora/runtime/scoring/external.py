"""An external reward task: clients of the service lease its groups and submit their rewards.

A lease lasts half of the task's timeout; then the group may be leased again, and the rewards of the first
client are refused. When the timeout is over, the group fails.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dora.core.types import GroupId
from dora.errors import ServiceError
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import DriverClock
from dora.stream.sample_db import FinishedSample

SERVICE = "service"  # as the reward function: rewards come through the service
MAX_REMEMBERED = 1000  # accepted submissions that a client may repeat


@dataclass(frozen=True)
class LeasedGroup:
    """A prompt and its responses, sibling by sibling. The number of a lease is unique."""

    lease: int
    group: str
    prompt: Any
    columns: dict[str, Any]
    token_ids: list[list[int]]
    finish_reasons: list[str | None]  # as the run stores them; null if it is not known


class _WaitingGroup(NamedTuple):
    """A group without rewards of the task."""

    since_s: float
    version: int
    num_responses: int
    prompt_row: bytes  # see `encode_prompt_row`


class ExternalRewards:
    """The groups of one task. The service calls `lease` and `submit` on the driver's thread."""

    def __init__(
        self,
        task: str,
        timeout_s: float,
        timeout_key: str,
        clock: DriverClock,
        responses: Callable[[GroupId], Sequence[FinishedSample]],
    ) -> None:
        """`responses` gives those of a group."""
        self._task, self._timeout_s, self._timeout_key, self._clock = task, timeout_s, timeout_key, clock
        self._responses, self.lease_s = responses, timeout_s / 2
        self._waiting: dict[GroupId, _WaitingGroup] = {}
        self._next_lease = itertools.count(secrets.randbelow(2**52))
        self._leases: dict[int, tuple[GroupId, float]] = {}  # lease -> group, end
        self._accepted: dict[int, Sequence[float]] = {}  # lease -> rewards
        self._new: list[tuple[GroupId, tuple[float, ...]]] = []  # accepted since `pop_accepted`

    def add(self, group: GroupId, prompt_row: bytes) -> None:
        """The rewards of a group are needed."""
        responses = self._responses(group)
        self._waiting[group] = _WaitingGroup(
            self._clock.now_s, responses[0].version, len(responses), prompt_row
        )

    def forget(self, group: GroupId) -> None:
        """The group is scored, or has failed."""
        self._waiting.pop(group, None)

    def check_deadlines(self) -> list[m.TaskFailed]:
        """Groups whose timeout is over."""
        end_s = self._clock.now_s - self._timeout_s
        late = tuple(group for group, waiting in self._waiting.items() if waiting.since_s < end_s)
        reason = f"{self._task}: no client submitted rewards within {self._timeout_key} = {self._timeout_s:g}"
        return [m.TaskFailed(late, reason, reason)] if late else []

    def lease(self) -> LeasedGroup | None:
        """Lease the next group, oldest version first; None if there is none now."""
        now_s = self._clock.now_s
        self._leases = {number: lease for number, lease in self._leases.items() if lease[1] > now_s}
        leased = {group for group, _ in self._leases.values()}
        free = [group for group in self._waiting if group not in leased]
        if not free:
            return None
        group = min(free, key=lambda group: self._waiting[group].version)
        number = next(self._next_lease)
        self._leases[number] = group, now_s + self.lease_s
        prompt, columns = json.loads(self._waiting[group].prompt_row)
        responses = self._responses(group)
        token_ids = [response.token_ids.tolist() for response in responses]
        finish_reasons = [response.finish_reason for response in responses]
        return LeasedGroup(number, str(group), prompt, columns, token_ids, finish_reasons)

    def submit(self, lease: int, rewards: Sequence[float]) -> None:
        """Accept the rewards of a leased group, sibling by sibling. Repeating an accepted call has no effect.

        Raises ServiceError if the lease has expired, or for a wrong number of rewards.
        """
        if self._accepted.get(lease) == rewards:
            return
        group, end_s = self._leases.get(lease, (None, 0.0))
        if group is None or group not in self._waiting or end_s <= self._clock.now_s:
            raise ServiceError(
                410,
                f"lease {lease} has expired or never existed, or its group has ended; lease a group again",
            )
        if len(rewards) != (num := self._waiting[group].num_responses):
            raise ServiceError(422, f"{len(rewards)} rewards for {num} responses; send one for each")
        del self._leases[lease], self._waiting[group]
        self._new.append((group, tuple(map(float, rewards))))
        self._accepted[lease] = rewards
        if len(self._accepted) > MAX_REMEMBERED:
            del self._accepted[next(iter(self._accepted))]

    def pop_accepted(self) -> list[tuple[GroupId, tuple[float, ...]]]:
        """The groups whose rewards were accepted since the last call, with these. The driver records them on
        its own: an error then ends the run, and not only the client's call.
        """
        accepted, self._new = self._new, []
        return accepted
