"""A reward task outside the run: its groups are lent through the service, and rewards come back.

A loan is a lease of the sample stream. It ends after half of the task's time limit, and the group is lent to
somebody else; at the limit the group fails. Who comes too late is refused, and changes nothing.
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

import numpy as np

from dora.core.types import GroupId
from dora.data.tokenizer import Tokenizer
from dora.errors import RunError, ServiceError, StreamError
from dora.runtime.process import messages as m
from dora.stream import transport
from dora.stream.client import StreamClient
from dora.stream.run_stream import PROMPT_ROW, reward_column
from dora.stream.schema import StreamBatch, TimedOut

SERVICE = "service"  # in the place of a function: rewards come through the service
NUM_REMEMBERED = 1000  # rewards that may be given again, by who heard no answer


@dataclass(frozen=True)
class LeasedGroup:
    """A group on lease: its question, and its answers sibling by sibling. No other loan has its number."""

    lease: int
    group: str
    prompt: Any
    columns: dict[str, Any]
    token_ids: list[list[int]]
    texts: list[str]


class ExternalRewards:
    """One such task, as the driver has it; `lend` and `take` are for `thread` alone."""

    def __init__(self, name: str, timeout_s: float, timeout_key: str, stream: Path, model: Path) -> None:
        """The tokenizer of `model` decodes answers."""
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"lends to {name}")
        self.timeout_s, self.lease_s = timeout_s, timeout_s / 2
        self._name, self._key, self._stream, self._model = name, timeout_key, stream, model
        self._since_s: dict[GroupId, float] = {}  # waiting for their rewards
        self._judged: set[GroupId] = set()  # of them, those that wait for other tasks' rewards alone
        self._numbers = itertools.count(secrets.randbelow(2**52))  # storages count their leases from 1
        self._lent: dict[int, tuple[StreamBatch, float]] = {}  # lease -> rows, and when it ends
        self._taken: dict[int, Sequence[float]] = {}  # lease -> the rewards that came

    def ask(self, group: GroupId) -> None:
        """The group is in the stream, and is to be judged."""
        self._judged.discard(group)
        self._since_s[group] = time.monotonic()

    def forget(self, group: GroupId) -> None:
        """The group has its rewards, or has failed."""
        self._since_s.pop(group, None)
        self._judged.discard(group)

    def check_deadlines(self, asleep_s: float) -> list[m.TaskFailed]:
        """Groups for which nobody had rewards in time; `asleep_s` of it nobody could give us any."""
        self._since_s = {group: since_s + asleep_s for group, since_s in self._since_s.items()}
        end_s = time.monotonic() - self.timeout_s
        late = tuple(group for group in self._waiting if self._since_s[group] < end_s)
        reason = f"{self._name}: no rewards came from outside within {self._key} = {self.timeout_s:g}"
        return [m.TaskFailed(late, reason, reason)] if late else []

    def has_group(self) -> bool:
        """Whether a group waits that is not on loan."""
        now_s = time.monotonic()
        lent = {batch.groups[0] for batch, end_s in [*self._lent.values()] if end_s > now_s}
        return not lent.issuperset(self._waiting)

    @property
    def _waiting(self) -> list[GroupId]:
        """Groups without rewards of this task."""
        return [group for group in self._since_s if group not in self._judged]

    def close(self) -> None:
        """Nothing is lent any more; the stream takes back what is."""
        self.thread.shutdown(cancel_futures=True)
        if "_client" in self.__dict__:
            self._client.close()

    def reconnect(self) -> None:
        """Another storage is there, which knows of no loan."""
        self.thread.submit(self._forget_storage)

    def _forget_storage(self) -> None:
        self._lent.clear()
        if "_client" in self.__dict__:
            self._client.close()
            del self._client

    def lease(self) -> LeasedGroup | None:
        """The next group, oldest version first; None: there is none now."""
        now_s = time.monotonic()
        self._lent = {lease: loan for lease, loan in self._lent.items() if loan[1] > now_s}
        batch = self._client.get(reward_column(self._name), wait_s=0.0)
        if isinstance(batch, TimedOut):
            return None
        self._lent[lease := next(self._numbers)] = batch, now_s + self.lease_s
        question = next(text for text in batch.rows(PROMPT_ROW) if len(text))
        prompt, columns = json.loads(question.tobytes())
        token_ids = [ids.tolist() for ids in batch.rows("token_ids")]
        texts = [self._tokenizer.decode(ids) for ids in token_ids]
        return LeasedGroup(lease, str(batch.groups[0]), prompt, columns, token_ids, texts)

    def submit(self, lease: int, rewards: Sequence[float]) -> None:
        """The rewards of a group on loan, sibling by sibling; the same ones may be given again.

        Raises ServiceError for a loan that is over, or another number of rewards.
        """
        if self._taken.get(lease) == rewards:
            return
        batch, _ = self._lent.get(lease, (None, 0.0))
        if batch is None:
            raise ServiceError(410, f"lease {lease} is over, or was never given; ask for a group anew")
        if len(rewards) != len(batch):
            raise ServiceError(422, f"{len(rewards)} rewards for {len(batch)} answers; give one for each")
        self._judged.update(batch.groups)  # before others can hear of it, and forget the group
        try:
            self._client.renew(batch)  # refused if somebody else may have the group
            self._client.fill(batch.indices, {reward_column(self._name): np.array(rewards, np.float64)})
            self._client.commit(batch)
        except StreamError as error:
            self._judged.difference_update(batch.groups)
            why = "the group was given to somebody else, or has ended; drop what came of it"
            raise ServiceError(410, f"lease {lease} is over: {why}") from error
        except RunError:  # it is lent once more: when the lease ends, or by another storage
            self._judged.difference_update(batch.groups)
            raise
        finally:
            del self._lent[lease]
        self._taken[lease] = rewards
        if len(self._taken) > NUM_REMEMBERED:
            del self._taken[next(iter(self._taken))]

    @cached_property
    def _client(self) -> StreamClient:
        return StreamClient(transport.stream_endpoint(self._stream))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._model)
