"""The sample store: one row per sibling, in `samples.sqlite` of the run folder.

The driver is its only writer. A payload is committed before the fact that names it is told, so a dead
process loses no finished answer; who follows the store hears of it at that moment, the stream above all.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dora.core.records import Chunk, GroupId, RequestId

SEGMENT_JOINT = "+"
_SCHEMA = """
create table if not exists samples (
    group_id text not null, sibling integer not null,
    version integer not null, weight_digest text not null,
    prompt_ids blob not null, token_ids blob not null, logprobs blob not null,
    routes blob, loss_mask blob, segments text, reward real, advantage real, task_rewards blob,
    state text not null, trained_step integer,
    primary key (group_id, sibling)) without rowid
"""


class Trajectory(NamedTuple):
    """A finished request: its tokens, their log-probs, and the experts they were sent to if that is known.

    `loss_mask` is 1 for each token that was drawn, and 0 for those that an episode's other side said, whose
    log-probs are 0; None: all were drawn. `reward` is what an episode has earned, before its group is scored.
    One whose answer went on with newer versions has `segments` (version, number of tokens): `version` is that
    of the first, and `weight_digest` has the digests of all, joined by SEGMENT_JOINT.
    """

    request: RequestId
    version: int
    weight_digest: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    routes: NDArray[np.int16] | None = None  # [tokens - 1, ...], tokens of prompt and response
    loss_mask: Sequence[int] | None = None
    reward: float | None = None
    segments: Sequence[tuple[int, int]] | None = None


class Source(NamedTuple):
    """Whose weights drew an answer, as a Trajectory says it."""

    version: int
    weight_digest: str
    segments: list[tuple[int, int]] | None

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Source:
        """What the engine has stamped; the oldest comes first."""
        segments = [(c.version, c.num_tokens) for c in chunks] if len(chunks) > 1 else None
        return cls(chunks[0].version, SEGMENT_JOINT.join(c.digest for c in chunks), segments)


class StoredSample(NamedTuple):
    """A scored trajectory as the trainer reads it; `advantage` is None where it needs the whole batch.

    `logprobs` are those of tokens that were drawn, which `loss_mask` names (see Trajectory).

    `reference`, `proximal` and `values` are what stations beside the trainer make of each token, if there are
    any; `stream_index` is its row in the sample stream.
    """

    version: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    reward: float
    advantage: float | None
    routes: NDArray[np.int16] | None  # [tokens - 1, mixture layers * k]
    weight_digest: str
    reference: list[float] | None = None
    proximal: list[float] | None = None
    values: list[float] | None = None
    stream_index: int | None = None
    loss_mask: list[int] | None = None


class FinishedSample(NamedTuple):
    """What a run that goes on needs of an answer; `reward` is its own until its group `is_judged`."""

    sibling: int
    token_ids: list[int]
    reward: float | None
    is_judged: bool
    task_rewards: dict[str, float]  # by task, where there are several


class Follower(Protocol):
    """Who is told of what the store has, once it is durable."""

    def put(self, trajectory: Trajectory) -> None:
        """An answer is stored."""

    def score(self, group: GroupId, rewards: Sequence[float], advantages: Sequence[float | None]) -> None:
        """A group is judged."""

    def end(self, groups: Iterable[GroupId]) -> None:
        """Nobody needs these groups any more."""

    def flush(self) -> None:
        """All of it is durable."""


ENDS = ("trained", "filtered", "failed")  # what the state of a sample begins with that nobody needs any more


class SampleStore:
    """Rows are (group_id, sibling); `state` is finished, scored, committed, trained, or the end's name."""

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        """Open for writing; the file is made if it is not there. `fsync`: survive a loss of power."""
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute(f"pragma synchronous = {'full' if fsync else 'off'}")
        self._db.execute(_SCHEMA)
        names = [name for _, name, *_ in self._db.execute("pragma table_info(samples)")]
        for name in {"routes", "loss_mask", "segments", "task_rewards"} - {*names}:  # an older run
            self._db.execute(f"alter table samples add column {name} blob")
        self._in_transaction = False
        self._follower: Follower | None = None
        self._redone: dict[GroupId, None] = {}  # trained once, and offered again

    def follow(self, follower: Follower | None) -> None:
        """Tell somebody of all that has not ended, and of what comes; None: nobody any more."""
        self._follower = follower
        if follower is None:
            return
        self.commit()
        self._tell(follower, self._rows("state in ('finished', 'scored', 'committed')"))
        for group in self._redone:
            self._tell(follower, self._rows("group_id = ? and state = 'trained'", str(group)))

    def offer_again(self, groups: Iterable[GroupId]) -> None:
        """Have the follower forget scored groups, whatever was done with them, and tell it of them anew."""
        if self._follower is None:
            return
        self.commit()
        self._redone |= dict.fromkeys(groups)
        self._follower.end(groups)
        self._follower.flush()
        for group in groups:
            self._tell(self._follower, self._rows("group_id = ?", str(group)))

    @staticmethod
    def _tell(follower: Follower, rows: Iterable[tuple[Trajectory, float | None, float | None]]) -> None:
        judged: dict[GroupId, list[tuple[float, float | None]]] = {}
        for trajectory, reward, advantage in rows:
            follower.put(trajectory)
            if reward is not None:
                judged.setdefault(trajectory.request.group, []).append((reward, advantage))
        for group, siblings in judged.items():
            rewards, advantages = zip(*siblings, strict=True)
            follower.score(group, rewards, advantages)
        follower.flush()

    def put(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory. Raises sqlite3.IntegrityError if its row exists."""
        t = trajectory
        self._write(
            "insert into samples (group_id, sibling, version, weight_digest, prompt_ids, token_ids, "
            "logprobs, routes, loss_mask, segments, reward, state) "
            "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'finished')",
            (
                str(t.request.group),
                t.request.sibling,
                t.version,
                t.weight_digest,
                np.asarray(t.prompt_ids, dtype="<i4").tobytes(),
                np.asarray(t.token_ids, dtype="<i4").tobytes(),
                np.asarray(t.logprobs, dtype="<f4").tobytes(),
                None if t.routes is None else t.routes.astype("<i2").tobytes(),
                None if t.loss_mask is None else bytes(t.loss_mask),
                None if t.segments is None else json.dumps(t.segments),
                t.reward,
            ),
        )
        if self._follower is not None:
            self._follower.put(t)

    def score(
        self,
        group: GroupId,
        rewards: Sequence[float],
        advantages: Sequence[float | None],
        by_task: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Fill in rewards and advantages of a group, sibling by sibling; `by_task` is what rewards sum up."""
        for sibling, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
            parts = {task: own[sibling] for task, own in (by_task or {}).items()}
            self._write(
                "update samples set reward = ?, advantage = ?, task_rewards = ?, state = 'scored' "
                "where group_id = ? and sibling = ?",
                (reward, advantage, json.dumps(parts) if parts else None, str(group), sibling),
            )
        if self._follower is not None:
            self._follower.score(group, rewards, advantages)

    def mark(self, groups: Iterable[GroupId], state: str, trained_step: int | None = None) -> None:
        """Set the state of whole groups."""
        groups = [*groups]
        for group in groups:
            self._write(
                "update samples set state = ?, trained_step = ? where group_id = ?",
                (state, trained_step, str(group)),
            )
            if state.startswith(ENDS):
                self._redone.pop(group, None)
        if self._follower is not None and state.startswith(ENDS):
            self._follower.end(groups)

    def num_drawn(self, group: GroupId) -> list[int]:
        """Tokens of a group's responses that the model drew, in sibling order."""
        rows = self._db.execute(
            "select token_ids, loss_mask from samples where group_id = ? order by sibling", (str(group),)
        )
        return [len(_ids(response)) if mask is None else sum(mask) for response, mask in rows]

    def num_read(self) -> dict[RequestId, int]:
        """Tokens of episodes that the model did not draw."""
        rows = self._db.execute(
            "select group_id, sibling, loss_mask from samples where loss_mask is not null"
        )
        return {RequestId(*_group(name), k): len(mask) - sum(mask) for name, k, mask in rows}

    def finished(self, group: GroupId) -> list[FinishedSample]:
        """The finished siblings of a group, in order."""
        rows = self._db.execute(
            "select sibling, token_ids, reward, state != 'finished', coalesce(task_rewards, '{}') "
            "from samples where group_id = ? order by sibling",
            (str(group),),
        )
        return [
            FinishedSample(k, _ids(answer), reward, bool(is_judged), json.loads(parts))
            for k, answer, reward, is_judged, parts in rows
        ]

    def prompts(self, limit: int) -> list[tuple[GroupId, list[int]]]:
        """Token ids of the prompts of so many groups."""
        rows = self._db.execute(
            "select group_id, prompt_ids from samples where sibling = 0 limit ?", (limit,)
        )
        return [(_group(name), _ids(prompt)) for name, prompt in rows]

    def states(self) -> list[tuple[RequestId, str, int | None]]:
        """State and trained step of every sample."""
        rows = self._db.execute("select group_id, sibling, state, trained_step from samples").fetchall()
        return [(RequestId(*_group(name), sibling), state, step) for name, sibling, state, step in rows]

    def unscored(self) -> set[GroupId]:
        """Groups that lack rewards, or that have not ended and lack advantages: scored or not."""
        rows = self._db.execute(
            "select distinct group_id from samples "
            "where state = 'finished' or (state in ('scored', 'committed') and advantage is null)"
        )
        return {_group(name) for (name,) in rows}

    def forget(self, request: RequestId) -> None:
        """Remove a sample that nobody was told of."""
        self._write(
            "delete from samples where group_id = ? and sibling = ?", (str(request.group), request.sibling)
        )

    def commit(self) -> None:
        """Make what was written visible to readers and safe from the death of this process."""
        if self._in_transaction:
            self._db.execute("commit")
            self._in_transaction = False
            if self._follower is not None:
                self._follower.flush()

    def close(self) -> None:
        self._follower = None
        self.commit()
        self._db.close()

    def _rows(self, condition: str, *values: str) -> Iterator[tuple[Trajectory, float | None, float | None]]:
        """Answers with reward and advantage, where they are known."""
        rows = self._db.execute(
            "select group_id, sibling, version, weight_digest, prompt_ids, token_ids, logprobs, routes, "
            "loss_mask, iif(state = 'finished', null, reward), advantage from samples "
            f"where {condition} order by group_id, sibling",
            values,
        )
        for name, sibling, version, digest, prompt, answer, logprobs, routes, mask, reward, advantage in rows:
            prompt_ids, token_ids = _ids(prompt), _ids(answer)
            by_token = None
            if routes is not None:
                num_rows = len(prompt_ids) + len(token_ids) - 1
                by_token = np.frombuffer(routes, dtype="<i2").reshape(num_rows, -1)
            kept = np.frombuffer(logprobs, dtype="<f4").tolist()
            request = RequestId(*_group(name), sibling)
            yield (
                Trajectory(request, version, digest, prompt_ids, token_ids, kept, by_token, mask),
                reward,
                advantage,
            )

    def _write(self, sql: str, values: tuple[object, ...]) -> None:
        if not self._in_transaction:
            self._db.execute("begin")
            self._in_transaction = True
        self._db.execute(sql, values)


def _group(name: str) -> GroupId:
    epoch, row = name.split("/")
    return GroupId(int(epoch), int(row))


def _ids(blob: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(blob, dtype="<i4").tolist()
    return ids
