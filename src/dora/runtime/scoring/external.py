"""An external reward task: clients of the service lease its groups and submit their rewards.

A lease lasts half of the task's timeout; then the group may be leased again, and the rewards of the first
client are refused. When the timeout is over, the group fails.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dora.core.types import GroupId
from dora.data.tokenizer import Tokenizer
from dora.errors import RunError, ServiceError, StreamError
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import DriverClock
from dora.runtime.process.worker_process import WorkerMessages
from dora.stream import transport
from dora.stream.client import StreamClient
from dora.stream.run_stream import PROMPT_ROW, reward_consumer
from dora.stream.schema import StreamBatch, TimedOut

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
    texts: list[str]


class ExternalRewards:
    """The groups of one task, as the driver has them. Only `thread` may call `lease` and `submit`."""

    def __init__(
        self,
        spec: m.RewardSpec,
        timeout_s: float,
        timeout_key: str,
        stream: Path,
        clock: DriverClock,
        messages: WorkerMessages,
    ) -> None:
        """Rewards are put into `messages`."""
        self._clock, self._messages = clock, messages
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"leases of {spec.name}")
        self.timeout_s, self.lease_s = timeout_s, timeout_s / 2
        self._name, self._key, self._stream, self._model = spec.name, timeout_key, stream, spec.model
        self._since_s: dict[GroupId, float] = {}  # groups that are not finished
        self._scored: set[GroupId] = set()  # those of them that wait for other tasks only
        self._next_lease = itertools.count(secrets.randbelow(2**52))  # the ids of the stream start at 1
        self._leases: dict[int, tuple[StreamBatch, float]] = {}  # lease -> rows, end (time.monotonic)
        self._accepted: dict[int, Sequence[float]] = {}  # lease -> rewards

    def add(self, group: GroupId) -> None:
        """The group is in the stream, and its rewards are needed."""
        self._scored.discard(group)
        self._since_s[group] = self._clock.now_s

    def forget(self, group: GroupId) -> None:
        """The group is scored, or has failed."""
        self._since_s.pop(group, None)
        self._scored.discard(group)

    def check_deadlines(self) -> list[m.TaskFailed]:
        """Groups whose timeout is over."""
        end_s = self._clock.now_s - self.timeout_s
        late = tuple(group for group in self._waiting if self._since_s[group] < end_s)
        reason = f"{self._name}: no client submitted rewards within {self._key} = {self.timeout_s:g}"
        return [m.TaskFailed(late, reason, reason)] if late else []

    def has_group(self) -> bool:
        """Whether a group waits that is not leased."""
        now_s = time.monotonic()
        leased = {batch.groups[0] for batch, end_s in [*self._leases.values()] if end_s > now_s}
        return not leased.issuperset(self._waiting)

    @property
    def _waiting(self) -> list[GroupId]:
        """Groups without rewards of this task."""
        return [group for group in self._since_s if group not in self._scored]

    def close(self) -> None:
        """End all leases and accept no more calls."""
        self.thread.shutdown(cancel_futures=True)
        if "_client" in self.__dict__:
            self._client.close()

    def on_storage_replaced(self) -> None:
        """Connect to a new storage, which has no leases."""
        self.thread.submit(self._disconnect)

    def _disconnect(self) -> None:
        self._leases.clear()
        if "_client" in self.__dict__:
            self._client.close()
            del self._client

    def lease(self) -> LeasedGroup | None:
        """Lease the next group, oldest version first; None if there is none now."""
        now_s = time.monotonic()
        self._leases = {number: lease for number, lease in self._leases.items() if lease[1] > now_s}
        batch = self._client.get(reward_consumer(self._name), wait_s=0.0)
        if isinstance(batch, TimedOut):
            return None
        number = next(self._next_lease)
        self._leases[number] = batch, now_s + self.lease_s
        prompt_row = next(text for text in batch.rows(PROMPT_ROW) if len(text))
        prompt, columns = json.loads(prompt_row.tobytes())
        token_ids = [ids.tolist() for ids in batch.rows("token_ids")]
        texts = [self._tokenizer.decode(ids) for ids in token_ids]
        return LeasedGroup(number, str(batch.groups[0]), prompt, columns, token_ids, texts)

    def submit(self, lease: int, rewards: Sequence[float]) -> None:
        """Accept the rewards of a leased group, sibling by sibling. Repeating an accepted call has no effect.

        Raises ServiceError if the lease has expired, or for a wrong number of rewards.
        """
        if self._accepted.get(lease) == rewards:
            return
        batch, _ = self._leases.get(lease, (None, 0.0))
        if batch is None:
            raise ServiceError(410, f"lease {lease} has expired or never existed; lease a group again")
        if len(rewards) != len(batch):
            raise ServiceError(422, f"{len(rewards)} rewards for {len(batch)} responses; send one for each")
        self._scored.update(batch.groups)
        try:
            self._client.read_leased(reward_consumer(self._name), batch.indices)  # the group exists
            self._client.commit(batch)  # refused if the group may be leased again
        except StreamError as error:
            self._scored.difference_update(batch.groups)
            reason = "the group is leased again, or has ended; discard its rewards"
            raise ServiceError(410, f"lease {lease} has expired: {reason}") from error
        except RunError:  # the group is leased again once the lease ends, or by a new storage
            self._scored.difference_update(batch.groups)
            raise
        finally:
            del self._leases[lease]
        accepted = m.ExternalRewardsAccepted(self._name, batch.groups[0], tuple(map(float, rewards)))
        self._messages.put((None, accepted))
        self._accepted[lease] = rewards
        if len(self._accepted) > MAX_REMEMBERED:
            del self._accepted[next(iter(self._accepted))]

    @cached_property
    def _client(self) -> StreamClient:
        return StreamClient(transport.stream_endpoint(self._stream))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._model)
