"""What a run sends through its stream: the answers of a group, its rewards once it is judged.

`samples.sqlite` is the record; the driver sends what is durable there, a group at once, for nobody takes
less, and a run that goes on sends again what was not trained. The trainer takes the groups that the core has
chosen, and commits them with its step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
from numpy.typing import NDArray

from dora.core.records import GroupId, RequestId
from dora.errors import NoRoomError, RunError, StreamError
from dora.stream import wire
from dora.stream.batch import Batch, Waited
from dora.stream.client import StreamClient
from dora.stream.fields import Field, Given
from dora.stream.lines import NewRow, Want
from dora.stream.samples import StoredSample, Trajectory
from dora.stream.storage import STOPPED_S, Declared, InThread, Storage, StorageSpec

ACTOR = "actor"
_ANSWER = (
    Field("prompt_ids", "<i4", (None,)),
    Field("token_ids", "<i4", (None,)),
    Field("logprobs", "<f4", (None,)),
    Field("routes", "<i2", (None,)),  # of all tokens, end to end; none where they are not known
    Field("weight_digest", "u1", (None,)),  # ASCII
    Field("loss_mask", "u1", (None,)),  # 1: the token was drawn, 0: it was read
)
_JUDGEMENT = (Field("reward", "<f8"), Field("advantage", "<f8"))  # NaN: it needs the whole batch
FIELDS = (*_ANSWER, *_JUDGEMENT)
QUESTION = "question"  # JSON, once a group is to be judged; its first answer has it, the others are empty
COLLECTOR = "collector"
COLUMNS = ("reference", "proximal", "values")  # of every token, where a station beside the trainer makes it
WAIT_S = 10.0  # for a group that is committed, and so was sent; and for room
_TRY_AGAIN_S = 0.1


def no_room(folder: Path, why: str) -> NoRoomError:
    """What ends a run whose stream finds no room for new columns; the record has what was told."""
    return NoRoomError(
        f"no room in {folder} for {WAIT_S:g} s, so the run cannot go on: {why}; make room in that file "
        "system, which in a container is its --shm-size, and go on with --resume"
    )


def fill(
    client: StreamClient, folder: Path, indices: Sequence[int], columns: Given, tell: Callable[[], None]
) -> None:
    """Fill columns in. While there is no room it waits, and says so with `tell` at each try.

    Raises StreamError, and after WAIT_S NoRoomError.
    """
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            client.fill(indices, columns)
            return
        except NoRoomError as error:
            if time.monotonic() >= until_s:
                raise no_room(folder, str(error)) from error
            tell()
            time.sleep(_TRY_AGAIN_S)


def reward_column(task: str) -> str:
    """The column that a reward task fills, which is its consumer's name too."""
    return f"reward/{task}"


P = ParamSpec("P")


def _to_storage(send: Callable[Concatenate[Feed, P], None]) -> Callable[Concatenate[Feed, P], None]:
    """What does not reach the storage is told to the next one, from the record."""

    @wraps(send)
    def sent(feed: Feed, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not feed.storage.is_there:
            return
        try:
            send(feed, *args, **kwargs)
        except NoRoomError:
            raise
        except RunError as error:
            feed.storage.lose(str(error))

    return sent


class Feed:
    """The driver's side: the rows that are on their way to the storage."""

    def __init__(
        self,
        folder: Path,
        group_size: int,
        columns: Sequence[str] = (),
        tasks: Mapping[str, float] | None = None,
        num_answers: int = 0,
        host: str | None = None,
        serve: Callable[[StorageSpec], Storage] = InThread,
    ) -> None:
        """Blocks and the socket lie in `folder`, which is made. `columns` are those of COLUMNS that the
        trainer needs; who makes one is the consumer of its name. `tasks` judge what is asked, also the
        `num_answers` to each held-out prompt, each on a lease of so many seconds. Other machines reach the
        stream at `host`. `serve` returns when its storage is there.
        """
        self.folder, self._group_size = folder, group_size
        made = [Field(name, "<f4", (None,)) for name in columns]
        rewards = {reward_column(task): lease_s for task, lease_s in (tasks or {}).items()}
        made += [Field(QUESTION, "u1", (None,)), *(Field(name, "<f8") for name in rewards)]
        stored, whole = [field.name for field in FIELDS], {"group_size": group_size}
        consumers = [Declared(ACTOR, [*stored, *columns], whole)]
        consumers += [Declared(name, stored, whole) for name in columns]
        judged = {**whole, "held_out_size": num_answers}
        for name, lease_s in rewards.items():
            rules = {**judged, "by_version": True, "lease_s": lease_s}
            consumers.append(Declared(name, ["token_ids", QUESTION], rules))
        if rewards:
            consumers.append(Declared(COLLECTOR, [*rewards], judged))
        self.storage = serve(StorageSpec(folder, [*FIELDS, *made], consumers, host))
        self._begin()

    def _begin(self) -> None:
        """The storage is empty, and knows nobody."""
        self._client = StreamClient(wire.endpoint_of(self.folder), self.storage.timeout_s)
        self._indices: dict[GroupId, dict[int, int]] = {}  # by sibling
        self._answers: dict[GroupId, list[Trajectory]] = {}  # of groups that are not whole
        self._whole: list[GroupId] = []  # and not sent
        self._judged: dict[RequestId, tuple[float, float | None]] = {}
        self._ended: dict[GroupId, None] = {}
        self._is_full = False  # no room was found once, so the run ends; the record has it all

    @_to_storage
    def begin_again(self) -> None:
        """Another storage is there; who follows the record has to be told all of it anew, and asks anew."""
        self._client.close()
        self._begin()

    def put(self, trajectory: Trajectory) -> None:
        """An answer is finished. Those to held-out prompts are not trained, so nobody would take them."""
        group = trajectory.request.group
        if group.is_held_out:
            return
        siblings = self._answers.setdefault(group, [])
        siblings.append(trajectory)
        if len(siblings) == self._group_size:
            self._whole.append(group)

    def score(self, group: GroupId, rewards: Sequence[float], advantages: Sequence[float | None]) -> None:
        """A group is judged, sibling by sibling."""
        if group.is_held_out:
            return
        for sibling, judged in enumerate(zip(rewards, advantages, strict=True)):
            self._judged[RequestId(*group, sibling)] = judged

    @_to_storage
    def ask(self, group: GroupId, question: bytes, held_out: Sequence[Sequence[int]] = ()) -> None:
        """Have the reward tasks judge a group; the answers to a held-out prompt, as token ids, come with it.

        Each task sees it from now on, oldest version first.
        """
        num_answers = len(held_out) or len(self._indices[group])
        questions = [np.frombuffer(text, np.uint8) for text in (question, *[b""] * (num_answers - 1))]
        if not group.is_held_out:
            indices = self._indices[group]
            self._fill([indices[sibling] for sibling in sorted(indices)], {QUESTION: questions})
            return
        version = -1 - group.epoch
        rows = [NewRow(RequestId(*group, k), version, len(ids)) for k, ids in enumerate(held_out)]
        answers = [np.asarray(ids, np.int32) for ids in held_out]
        self._put_rows(rows, {"token_ids": answers, QUESTION: questions})

    @_to_storage
    def drop(self, groups: Iterable[GroupId]) -> None:
        """Take these groups away at once, from whoever has them: they have failed, or are judged."""
        groups = [*groups]
        self._client.clear(groups)
        for group in groups:
            self._indices.pop(group, None)
            self._answers.pop(group, None)

    @_to_storage
    def bury(self, client: str) -> None:
        """Others may have what this client had on lease, and it gets nothing more: its process is dead."""
        with suppress(StreamError):  # then its leases end with their time
            self._client.bury(client)

    def end(self, groups: Iterable[GroupId]) -> None:
        """These groups are trained, filtered or failed: nobody needs them any more."""
        self._ended |= dict.fromkeys(groups)

    @_to_storage
    def flush(self) -> None:
        """Send what is durable now; what has ended goes first, for it makes room.

        Raises NoRoomError once: what comes later stays in the record, so that what was trained can be saved.
        """
        if self._is_full:
            return
        ended, self._ended = self._ended, {}
        if ended:
            self.drop(ended)
        whole, self._whole = self._whole, []
        self._send_answers([t for group in whole for t in self._answers.pop(group, ())])
        self._send_judged({r: judged for r, judged in self._judged.items() if r.group not in ended})

    def close(self) -> None:
        self._client.close()
        self.storage.close()

    def _send_answers(self, answers: Sequence[Trajectory]) -> None:
        if not answers:
            return
        rows = [NewRow(t.request, t.version, len(t.prompt_ids) + len(t.token_ids)) for t in answers]
        indices = self._put_rows(rows, _columns(answers))
        for trajectory, index in zip(answers, indices, strict=True):
            self._indices.setdefault(trajectory.request.group, {})[trajectory.request.sibling] = index

    def _send_judged(self, judged: Mapping[RequestId, tuple[float, float | None]]) -> None:
        self._judged = {}
        if not judged:
            return
        rewards, advantages = zip(*judged.values(), strict=True)
        columns = {
            "reward": np.array(rewards, np.float64),
            "advantage": np.array([math.nan if a is None else a for a in advantages], np.float64),
        }
        self._fill([self._indices[request.group][request.sibling] for request in judged], columns)

    def _put_rows(self, rows: Sequence[NewRow], columns: Mapping[str, Any]) -> range:
        indices = self._client.put(rows, columns, WAIT_S)
        if isinstance(indices, Waited):  # it has no limit, but the memory has
            self._is_full = True
            raise no_room(self.folder, indices.why)
        return indices

    def _fill(self, indices: Sequence[int], columns: Given) -> None:
        try:
            fill(self._client, self.folder, indices, columns, tell=lambda: None)
        except NoRoomError:
            self._is_full = True
            raise


class GroupReader:
    """The trainer's side: groups by name, on lease until the step they belong to is done."""

    def __init__(self, folder: Path, consumer: str = ACTOR, wait_s: float | None = None) -> None:
        """`wait_s` is how long a group may take to come. Raises RunError if the stream does not answer."""
        self._consumer, self._wait_s = consumer, WAIT_S if wait_s is None else wait_s
        self._folder, self._client = folder, StreamClient(wire.endpoint_of(folder), STOPPED_S)
        self._leased: dict[GroupId, Batch] = {}

    def group(self, group: GroupId) -> list[StoredSample]:
        """The samples of a scored group, in sibling order. Raises RunError if it does not come."""
        if group not in self._leased:
            try:
                batch = self._get(group)
            except RunError:  # the storage has ended; another one takes its place, or the run ends
                self._client.close()
                self._client = _next_client(self._folder)
                self._leased.clear()
                batch = self._get(group)
            if isinstance(batch, Waited):
                raise RunError(f"the sample stream has not handed it out for {batch.wait_s:g} s: {batch.why}")
            self._leased[group] = batch
        return _samples(self._leased[group])

    def fill(self, group: GroupId, rows: Sequence[NDArray[np.float32]]) -> None:
        """What this consumer makes of a group that it has read, sibling by sibling. Raises as `fill`."""
        indices, columns = self._leased[group].indices, {self._consumer: rows}
        fill(self._client, self._folder, indices, columns, tell=lambda: None)

    def rows(self, indices: Sequence[int]) -> list[StoredSample]:
        """Samples by their `stream_index`, which another reader of this consumer holds meanwhile."""
        return _samples(self._client.look(self._consumer, indices))

    def commit(self, groups: Iterable[GroupId]) -> None:
        """The step with these groups is done. A storage that has ended need not know, nor need the next."""
        for group in groups:
            if (batch := self._leased.pop(group, None)) is not None:
                with suppress(RunError):
                    self._client.commit(batch)

    def close(self) -> None:
        """Give back what is on lease."""
        self._client.close()

    def _get(self, group: GroupId) -> Batch | Waited:
        return self._client.get(self._consumer, Want(groups=(group,)), self._wait_s)


def _next_client(folder: Path) -> StreamClient:
    """Of the storage that is there by now; one that ends meanwhile has a next one, or the run is over."""
    until_s = time.monotonic() + STOPPED_S
    while True:
        try:
            return StreamClient(wire.endpoint_of(folder), STOPPED_S)
        except RunError:
            if time.monotonic() > until_s:
                raise


def _columns(answers: Sequence[Trajectory]) -> dict[str, Any]:
    none = np.zeros(0, np.int16)
    return {
        "prompt_ids": [np.asarray(t.prompt_ids, np.int32) for t in answers],
        "token_ids": [np.asarray(t.token_ids, np.int32) for t in answers],
        "logprobs": [np.asarray(t.logprobs, np.float32) for t in answers],
        "routes": [none if t.routes is None else t.routes.astype(np.int16).reshape(-1) for t in answers],
        "weight_digest": [np.frombuffer(t.weight_digest.encode(), np.uint8) for t in answers],
        "loss_mask": [
            np.ones(len(t.token_ids), np.uint8) if t.loss_mask is None else np.array([*t.loss_mask], np.uint8)
            for t in answers
        ],
    }


def _samples(batch: Batch) -> list[StoredSample]:
    """Copies, for a trainer may keep them longer than the lease."""
    columns = {field.name: batch.rows(field.name) for field in FIELDS}
    made = {name: batch.rows(name) for name in COLUMNS if name in batch}
    samples = []
    for row, (index, version) in enumerate(zip(batch.indices, batch.versions, strict=True)):
        own = (columns[field.name][row] for field in FIELDS)
        prompt, tokens, logprobs, routes, digest, mask, reward, advantage = own
        by_token = routes.reshape(len(prompt) + len(tokens) - 1, -1).copy() if len(routes) else None
        samples.append(
            StoredSample(
                version=version,
                prompt_ids=prompt.tolist(),
                token_ids=tokens.tolist(),
                logprobs=logprobs[mask > 0].tolist(),
                reward=float(reward),
                advantage=None if math.isnan(advantage) else float(advantage),
                routes=by_token,
                weight_digest=digest.tobytes().decode(),
                stream_index=index,
                loss_mask=None if mask.all() else mask.tolist(),
                **{name: rows[row].tolist() for name, rows in made.items()},
            )
        )
    return samples
