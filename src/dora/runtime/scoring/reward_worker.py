"""A reward worker: takes groups out of the sample stream, scores them, and sends the rewards to the driver.

Samples go through the stream only. Control messages name groups, and have one number for each sample.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from dora.core.types import GroupId
from dora.data.dataset import Prompt
from dora.data.tokenizer import Tokenizer
from dora.errors import RunError, StreamError
from dora.rewards.base import RewardInput, load_reward, score
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import WorkerInbox, WorkerOutbox, allow_multiprocessing
from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest
from dora.stream.run_stream import DRIVER_TIMEOUT_S, PROMPT_ROW, reward_consumer
from dora.stream.schema import StreamBatch, TimedOut

REWARD = "reward"  # name of the task of the section [reward]
GET_TIMEOUT_S = 60.0  # of one request for rows; it is repeated
REPORT_INTERVAL_S = 0.1  # between two reports that restart the timeout of a call


def encode_prompt_row(prompt: Prompt, columns: Mapping[str, Any]) -> bytes:
    """Encode a prompt and the other columns of its dataset row as JSON.

    A value without a JSON type, such as a date or a decimal, becomes a string.
    """
    return json.dumps([prompt, columns], default=str).encode()


def run_reward_worker(outbox: WorkerOutbox, inbox: WorkerInbox, spec: m.RewardWorkerSpec) -> None:
    """Score groups until the process is killed; `inbox` exits with the driver, and receives which batches
    the worker gets from then on.

    Raises RewardError if the reward function cannot be loaded.
    """
    allow_multiprocessing()
    outbox.start_heartbeat()
    worker = RewardWorker(spec, outbox)
    while True:
        try:
            with StreamClient(spec.remote or spec.stream, DRIVER_TIMEOUT_S) as client:
                outbox.send(m.WorkerReady(client_id=client.client_id))
                worker.run(client, inbox)
        except RunError:  # the storage is lost: connect to its replacement, or the run ends
            worker.report(())


class RewardWorker:
    """A reward function that scores batches of the stream."""

    def __init__(self, spec: m.RewardWorkerSpec, outbox: WorkerOutbox) -> None:
        reward = spec.reward
        self._name, self._consumer = reward.name, reward_consumer(reward.name)
        self._batch_request, self._outbox = spec.batch_request, outbox
        self._function = load_reward(
            reward.function, reward.key, reward.options, reward.columns, reward.missing
        )
        self._decode = Tokenizer(reward.model).decode
        self._groups: tuple[GroupId, ...] = ()  # as last reported
        self._reported_s = 0.0

    def run(self, client: StreamClient, inbox: WorkerInbox) -> NoReturn:
        """Score batches until the storage is lost. Raises RunError."""
        done: StreamBatch | None = None
        while True:
            for self._batch_request in inbox.receive():
                pass
            batch = client.get(self._consumer, self._batch_request, GET_TIMEOUT_S, done)
            done = None
            if not isinstance(batch, TimedOut):
                self._process(client, batch)
                done = batch

    def report(self, groups: tuple[GroupId, ...]) -> None:
        """Report to the driver which groups are scored from now on."""
        self._groups, self._reported_s = groups, time.monotonic()
        self._outbox.send(m.TaskStarted(groups))

    def restart_timeout(self) -> None:
        """Restart the timeout of the current call. Fast calls share a report."""
        if time.monotonic() >= self._reported_s + REPORT_INTERVAL_S:
            self.report(self._groups)

    def _process(self, client: StreamClient, batch: StreamBatch) -> None:
        """Send the result, which the caller commits: after a crash in between the work is repeated, and its
        result is ignored. If a batch cannot be scored, each of its groups is scored alone.
        """
        self.report(tuple(dict.fromkeys(batch.groups)))
        result = self._score(batch)
        if isinstance(result, m.TaskFailed) and len(result.groups) > 1:
            self._process_groups(client, batch)
            return
        self._outbox.send(result)
        if isinstance(result, m.TaskFailed):
            self.report(())

    def _process_groups(self, client: StreamClient, batch: StreamBatch) -> None:
        """Score each group of a failed batch alone, so that only the failing ones fail."""
        groups = self._groups
        with suppress(StreamError):
            client.release(batch)
        for group in groups:
            rows = client.get(self._consumer, BatchRequest(group=group), 0.0)
            if not isinstance(rows, TimedOut):  # otherwise another worker has leased the group
                self._process(client, rows)
                with suppress(StreamError):  # the lease has expired
                    client.commit(rows)
        self.report(())

    def _score(self, batch: StreamBatch) -> m.TaskCompleted | m.TaskFailed:
        """Score all responses. A response that is scored in a call of its own has a timeout of its own."""
        rewards: dict[GroupId, tuple[float, ...]] = dict.fromkeys(self._groups, ())
        try:
            results = score(self._function, self._inputs(batch))
            for group, result in zip(batch.groups, results, strict=True):
                if result.reward is None:
                    reason = result.reason if self._name == REWARD else f"{self._name}: {result.reason}"
                    return m.TaskFailed(self._groups, reason, result.detail or reason)
                rewards[group] += (result.reward,)
                self.restart_timeout()
        except Exception as error:
            reason = f"{self._consumer} raised {type(error).__name__}"
            return m.TaskFailed(self._groups, reason, "".join(traceback.format_exception(error)))
        return m.TaskCompleted(rewards)

    def _inputs(self, batch: StreamBatch) -> list[RewardInput]:
        prompt_rows: dict[GroupId, tuple[Prompt, dict[str, Any]]] = {}
        inputs = []
        names = (PROMPT_ROW, "token_ids", "finish_reason")
        for group, prompt_row, ids, reason in zip(batch.groups, *map(batch.rows, names), strict=True):
            if group not in prompt_rows:  # only the first row of a group has it
                prompt_rows[group] = json.loads(prompt_row.tobytes())
            prompt, columns = prompt_rows[group]
            token_ids = ids.tolist()
            finish_reason = reason.tobytes().decode() or None
            inputs.append(RewardInput(prompt, self._decode(token_ids), token_ids, columns, finish_reason))
        return inputs
