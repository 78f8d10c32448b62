"""The stream of a run: the driver puts responses and rewards, the trainer reads groups.

`samples.sqlite` is the durable record. The driver sends what is durable there, one whole group at a time; a
resumed run sends all untrained samples again. The trainer reads the groups that the core has chosen and
commits them with its step.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol

import numpy as np
from numpy.typing import NDArray

from dora.core.types import Branch, GroupId, RequestId
from dora.curve import CurveAddress
from dora.errors import RunError, StorageFullError
from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest, ConsumerDeclaration, SampleMeta
from dora.stream.sample_db import HeldOutResponse, StoredSample, Trajectory
from dora.stream.schema import ColumnData, Field, StreamBatch, TimedOut
from dora.stream.server import InProcessClient, StreamServer
from dora.stream.storage import SampleStream

ACTOR = "actor"  # the trainer's consumer
AUX_COLUMNS = ("reference", "proximal", "values")  # per token; the consumer of that name fills it
PROMPT_ROW = "prompt_row"  # JSON of prompt and dataset columns, in a group's first row; empty in the others
FIELDS = (
    Field("prompt_ids", "<i4", is_jagged=True),
    Field("token_ids", "<i4", is_jagged=True),
    Field("logprobs", "<f4", is_jagged=True),
    Field("routes", "<i2", is_jagged=True),  # of all tokens, concatenated; empty if unknown
    Field("weight_digest", "u1", is_jagged=True),  # ASCII
    Field("loss_mask", "u1", is_jagged=True),  # 1: generated token, 0: token of an observation
    Field("branches", "<i4", is_jagged=True),  # start and parent of each, concatenated
    Field("finish_reason", "u1", is_jagged=True),  # ASCII; empty if unknown
    Field("turn_rewards", "<f8", is_jagged=True),  # empty if unknown
    Field("reward", "<f8"),
    Field("advantage", "<f8"),  # NaN: needs the whole batch
)

# The driver may be suspended for this long before it replies; its exit is detected at once.
DRIVER_TIMEOUT_S = 86400.0
WAIT_S = 10.0  # for a group that is committed, hence already sent; and for room in the file system
_RETRY_S = 0.1

StreamWriter = StreamClient | InProcessClient  # what the driver writes with
Scores = Sequence[tuple[float, float | None]]  # reward and advantage of each sibling


def reward_consumer(task: str) -> str:
    """The name of a reward task's consumer."""
    return f"reward/{task}"


@dataclass(frozen=True)
class StorageSpec:
    """How to make the storage of a run. Other machines reach it at `host`; None: there are none."""

    folder: Path
    fields: Sequence[Field]
    consumers: Sequence[ConsumerDeclaration]
    host: str | None = None

    def open(self) -> StreamServer:
        """A server of an empty stream."""
        shutil.rmtree(self.folder, ignore_errors=True)  # of a storage that crashed
        self.folder.mkdir(exist_ok=True)
        return StreamServer(SampleStream(self.fields, self.consumers, self.folder), self.host)


class StreamStorage(Protocol):
    """Serves a run's stream. `remote` is its address for other machines."""

    @property
    def remote(self) -> CurveAddress | None: ...

    @property
    def is_available(self) -> bool:
        """Whether the storage serves requests; if not, a replacement is starting."""

    def connect(self) -> StreamWriter:
        """A client for the driver. Raises RunError."""

    def check(self) -> None:
        """Raises RunError if the storage has ended and cannot be replaced."""

    def report_lost(self, reason: str) -> None:
        """Report that the storage does not reply. Raises RunError if the storage cannot be replaced."""

    def close(self) -> None:
        """Stop serving."""


class ThreadStorage:
    """A storage in a thread of this process; the driver calls its stream directly."""

    is_available = True

    def __init__(self, spec: StorageSpec) -> None:
        self._server = spec.open()
        self.remote = self._server.remote
        self._thread = self._server.start()

    def connect(self) -> InProcessClient:
        return InProcessClient(self._server)

    def check(self) -> None:
        """Raises RunError if the thread has ended."""
        if self._server.is_closed:
            self.report_lost("the sample stream is closed: its thread has ended")

    def report_lost(self, reason: str) -> None:
        raise RunError(reason)

    def close(self) -> None:
        self._server.stop()
        self._thread.join()


P = ParamSpec("P")


def _if_available(
    send: Callable[Concatenate[RunStream, P], None],
) -> Callable[Concatenate[RunStream, P], None]:
    """Skip calls while the storage is lost: its replacement gets everything from the sample store."""

    @wraps(send)
    def wrapper(stream: RunStream, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not stream.storage.is_available:
            return
        try:
            send(stream, *args, **kwargs)
        except StorageFullError:
            raise
        except RunError as error:
            stream.storage.report_lost(str(error))

    return wrapper


class RunStream:
    """The driver's side: a `SampleSubscriber` that sends whole groups and their scores to the storage."""

    def __init__(
        self,
        folder: Path,
        group_size: int,
        columns: Sequence[str] = (),
        tasks: Mapping[str, float] | None = None,
        host: str | None = None,
        serve: Callable[[StorageSpec], StreamStorage] = ThreadStorage,
    ) -> None:
        """Creates `folder` for segments and socket, and starts the storage with `serve`.

        `columns`: the AUX_COLUMNS that the trainer needs. `tasks`: lease time (s) of each reward task.
        `host`: where other machines reach the stream.
        """
        self.folder, self._group_size = folder, group_size
        self.storage = serve(_storage_spec(folder, columns, tasks or {}, host))
        self._connect()

    def _connect(self) -> None:
        """Connect to an empty storage."""
        self._client = self.storage.connect()
        self._answers: dict[GroupId, list[Trajectory]] = {}  # of incomplete and unsent groups
        self._complete: list[GroupId] = []  # and unsent
        self._scores: dict[GroupId, Scores] = {}  # unsent
        self._finished: dict[GroupId, None] = {}  # not yet cleared
        self._is_full = False  # the file system was full: the run ends, the sample store has everything

    @_if_available
    def reconnect(self) -> None:
        """Connect to a replaced storage; the sample store must send everything again."""
        self._client.close()
        self._connect()

    def put(self, trajectory: Trajectory) -> None:
        """Queue a response. Responses to held-out prompts are not trained, so they are not sent."""
        group = trajectory.request.group
        if group.is_held_out:
            return
        siblings = self._answers.setdefault(group, [])
        siblings.append(trajectory)
        if len(siblings) == self._group_size:
            siblings.sort(key=lambda sibling: sibling.request)
            self._complete.append(group)

    def score(self, group: GroupId, rewards: Sequence[float], advantages: Sequence[float | None]) -> None:
        """Queue the scores of a group, sibling by sibling."""
        if group.is_held_out:
            return
        self._scores[group] = [*zip(rewards, advantages, strict=True)]

    def finish(self, groups: Iterable[GroupId]) -> None:
        """Queue the removal of groups that are trained, filtered or failed."""
        self._finished |= dict.fromkeys(groups)

    @_if_available
    def flush(self) -> None:
        """Send what is queued; removals go first, because they make room.

        Raises StorageFullError once. Later calls do nothing, so that a run can still save what was trained.
        """
        if self._is_full:
            return
        finished, self._finished = self._finished, {}
        if finished:
            self.clear(finished)
        complete, self._complete = self._complete, []
        self._send_answers([t for group in complete for t in self._answers.pop(group, ())])
        scores, self._scores = self._scores, {}
        self._send_scores({group: found for group, found in scores.items() if group not in finished})

    @_if_available
    def request_scores(
        self, group: GroupId, prompt_row: bytes, held_out: Sequence[HeldOutResponse] = ()
    ) -> None:
        """Offer a group to all reward tasks, the oldest version first.

        `held_out` are the responses to a held-out prompt, which are not in the stream yet.
        """
        num_answers = len(held_out) or self._group_size
        prompt_rows = [np.frombuffer(text, np.uint8) for text in (prompt_row, *[b""] * (num_answers - 1))]
        if not group.is_held_out:
            self._fill([group], {PROMPT_ROW: prompt_rows})
            return
        version = -1 - group.epoch
        samples = [
            SampleMeta(RequestId(*group, k), version, len(response.token_ids))
            for k, response in enumerate(held_out)
        ]
        columns: ColumnData = {
            "token_ids": [np.asarray(response.token_ids, np.int32) for response in held_out],
            "finish_reason": [_ascii(response.finish_reason) for response in held_out],
            PROMPT_ROW: prompt_rows,
        }
        self._put(samples, columns)

    @_if_available
    def clear(self, groups: Iterable[GroupId]) -> None:
        """Remove groups from the stream at once, also leased ones."""
        groups = [*groups]
        self._client.clear(groups)
        for group in groups:
            self._answers.pop(group, None)

    @_if_available
    def evict(self, client_id: str) -> None:
        """Release the leases of a client whose process has crashed."""
        self._client.evict(client_id)

    def close(self) -> None:
        self._client.close()
        self.storage.close()

    def _send_answers(self, answers: Sequence[Trajectory]) -> None:
        if not answers:
            return
        samples = [SampleMeta(t.request, t.version, len(t.prompt_ids) + len(t.token_ids)) for t in answers]
        self._put(samples, _answer_columns(answers))

    def _send_scores(self, scores: Mapping[GroupId, Scores]) -> None:
        if not scores:
            return
        rewards, advantages = zip(*(pair for pairs in scores.values() for pair in pairs), strict=True)
        columns = {
            "reward": np.array(rewards, np.float64),
            "advantage": np.array([math.nan if a is None else a for a in advantages], np.float64),
        }
        self._fill([*scores], columns)

    def _put(self, samples: Sequence[SampleMeta], columns: ColumnData) -> None:
        self._write(lambda: self._client.put(samples, columns))

    def _fill(self, groups: Sequence[GroupId], columns: ColumnData) -> None:
        self._write(lambda: self._client.fill(groups, columns))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            wait_for_room(self.folder, write)
        except StorageFullError:
            self._is_full = True
            raise


def _storage_spec(
    folder: Path, columns: Sequence[str], tasks: Mapping[str, float], host: str | None
) -> StorageSpec:
    """The fields and consumers of a run's stream."""
    aux_fields = [Field(name, "<f4", is_jagged=True) for name in columns]
    fields = [*FIELDS, *aux_fields, Field(PROMPT_ROW, "u1", is_jagged=True)]
    stored = [field.name for field in FIELDS]
    consumers = [
        ConsumerDeclaration(ACTOR, [*stored, *columns]),
        *(ConsumerDeclaration(name, stored) for name in columns),
        *(
            ConsumerDeclaration(reward_consumer(task), ["token_ids", "finish_reason", PROMPT_ROW], lease_s)
            for task, lease_s in tasks.items()
        ),
    ]
    return StorageSpec(folder, fields, consumers, host)


def wait_for_room(folder: Path, write: Callable[[], None]) -> None:
    """Put or fill; while the file system is full, try again.

    Raises StreamError, and StorageFullError after WAIT_S.
    """
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return write()
        except StorageFullError as error:
            if time.monotonic() >= deadline_s:
                raise StorageFullError(
                    f"the sample stream in {folder} has had no room for {WAIT_S:g} s: {error}; free space in "
                    "that file system (in a container its size is --shm-size), and continue the run with "
                    "--resume"
                ) from error
            time.sleep(_RETRY_S)


class GroupReader:
    """The trainer's side: reads groups by name; their leases last until the step is committed."""

    def __init__(self, folder: Path, consumer: str = ACTOR, wait_s: float | None = None) -> None:
        """`wait_s`: time to wait for a group (WAIT_S). Raises RunError if the stream does not reply."""
        self._consumer, self._wait_s = consumer, WAIT_S if wait_s is None else wait_s
        self._folder = folder
        self._client = StreamClient(folder, DRIVER_TIMEOUT_S)
        self._leased: dict[GroupId, StreamBatch] = {}

    def read_group(self, group: GroupId) -> list[StoredSample]:
        """The samples of a scored group, in sibling order. Raises RunError if it is not ready in time."""
        if group not in self._leased:
            try:
                batch = self._get(group)
            except RunError:  # the storage is lost: connect to its replacement, if there is one
                self._client.close()
                self._client = _connect_again(self._folder)
                self._leased.clear()
                batch = self._get(group)
            if isinstance(batch, TimedOut):
                raise RunError(f"not in the sample stream after {batch.wait_s:g} s: {batch.reason}")
            self._leased[group] = batch
        return _to_samples(self._leased[group])

    def fill(self, group: GroupId, rows: Sequence[NDArray[np.float32]]) -> None:
        """Fill this consumer's own column of a group, sibling by sibling. Raises as `wait_for_room`."""
        wait_for_room(self._folder, lambda: self._client.fill([group], {self._consumer: rows}))

    def read_rows(self, requests: Iterable[RequestId]) -> list[StoredSample]:
        """Samples by their `stream_row`, while another reader of this consumer has them on lease."""
        return _to_samples(self._client.read_leased(self._consumer, requests))

    def commit(self, groups: Iterable[GroupId]) -> None:
        """Commit the groups of a finished step. A lost storage is ignored: the new one does not need it."""
        for group in groups:
            if (batch := self._leased.pop(group, None)) is not None:
                with suppress(RunError):
                    self._client.commit(batch)

    def close(self) -> None:
        """Release all leases."""
        self._client.close()

    def _get(self, group: GroupId) -> StreamBatch | TimedOut:
        return self._client.get(self._consumer, BatchRequest(group=group), self._wait_s)


def _connect_again(folder: Path) -> StreamClient:
    """Connect to the replacement of a lost storage, which may be lost as well. Raises RunError."""
    deadline_s = time.monotonic() + DRIVER_TIMEOUT_S
    while True:
        try:
            return StreamClient(folder, DRIVER_TIMEOUT_S)
        except RunError:
            if time.monotonic() > deadline_s:
                raise


def _answer_columns(answers: Sequence[Trajectory]) -> dict[str, Any]:
    no_routes = np.zeros(0, np.int16)
    return {
        "prompt_ids": [np.asarray(t.prompt_ids, np.int32) for t in answers],
        "token_ids": [np.asarray(t.token_ids, np.int32) for t in answers],
        "logprobs": [np.asarray(t.logprobs, np.float32) for t in answers],
        "routes": [no_routes if t.routes is None else t.routes.astype(np.int16).reshape(-1) for t in answers],
        "weight_digest": [_ascii(t.weight_digest) for t in answers],
        "loss_mask": [
            np.ones(len(t.token_ids), np.uint8) if t.loss_mask is None else np.asarray(t.loss_mask, np.uint8)
            for t in answers
        ],
        "branches": [np.array(t.branches or (), np.int32).reshape(-1) for t in answers],
        "finish_reason": [_ascii(t.finish_reason) for t in answers],
        "turn_rewards": [np.array(t.turn_rewards, np.float64) for t in answers],
    }


def _ascii(text: str | None) -> NDArray[np.uint8]:
    return np.frombuffer((text or "").encode(), np.uint8)


def _to_samples(batch: StreamBatch) -> list[StoredSample]:
    """Copies, because a trainer may keep them longer than the lease."""
    columns = {field.name: batch.rows(field.name) for field in FIELDS}
    aux_columns = {name: batch.rows(name) for name in AUX_COLUMNS if name in batch}
    samples = []
    for row, (request, version) in enumerate(zip(batch.requests, batch.versions, strict=True)):
        values = (columns[field.name][row] for field in FIELDS)
        prompt, tokens, logprobs, routes, digest, mask, branches, finish, turns, reward, advantage = values
        num_tokens = len(prompt) + len(tokens)
        samples.append(
            StoredSample(
                version=version,
                prompt_ids=prompt.copy(),
                token_ids=tokens.copy(),
                logprobs=logprobs[mask > 0],
                reward=float(reward),
                advantage=None if math.isnan(advantage) else float(advantage),
                routes=routes.reshape(num_tokens - 1, -1).copy() if len(routes) else None,
                weight_digest=digest.tobytes().decode(),
                stream_row=request,
                loss_mask=None if mask.all() else mask.copy(),
                branches=[Branch(*pair) for pair in branches.reshape(-1, 2).tolist()] or None,
                finish_reason=finish.tobytes().decode() or None,
                turn_rewards=turns.tolist(),
                **{name: rows[row].copy() for name, rows in aux_columns.items()},
            )
        )
    return samples
