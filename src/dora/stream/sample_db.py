"""The sample store: `samples.sqlite` of the run folder, one row per sibling.

The driver is its only writer. It commits a payload before it sends the event that names it, so a crash loses
no finished response. A subscriber, the run's stream, receives every sample as soon as it is durable.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dora.core.types import Branch, Chunk, GroupId, RequestId

TokenIds = Sequence[int] | NDArray[np.int32]
DIGEST_SEPARATOR = "+"
FINAL_STATES = ("trained", "filtered", "failed")  # prefixes: a sample in such a state is not used again
_SCHEMA = """
create table if not exists samples (
    group_id text not null, sibling integer not null,
    version integer not null, weight_digest text not null,
    prompt_ids blob not null, token_ids blob not null, logprobs blob not null,
    routes blob, loss_mask blob, segments text, branches text, reward real, advantage real, task_rewards blob,
    state text not null, trained_step integer, finish_reason text, turn_rewards text,
    primary key (group_id, sibling)) without rowid
"""
LATER_COLUMNS = ("finish_reason", "turn_rewards")  # which the store of an earlier release does not have

# Columns that do not change once a response has finished; its `RequestFinished` event has their digest.
PAYLOAD = (
    "version",
    "weight_digest",
    "prompt_ids",
    "token_ids",
    "logprobs",
    "routes",
    "loss_mask",
    "segments",
    "branches",
    "turn_rewards",
)
_NUM_FIRST = PAYLOAD.index("branches")  # columns that every release has


def payload_digest(values: Iterable[int | str | bytes | None]) -> str:
    """Digest (32 hex digits) of the columns PAYLOAD of a row.

    Without branches and rewards of turns it is that of the columns before.
    """
    columns = [value if isinstance(value, bytes) else repr(value).encode() for value in values]
    while len(columns) > _NUM_FIRST and columns[-1] == b"None":
        columns.pop()
    data = b"".join([part for column in columns for part in (b"%d:" % len(column), column)])
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class TokenSequence(NamedTuple):
    """The tokens `start` to `stop` of a response, which follow the tokens `context`."""

    context: list[int]
    start: int
    stop: int


def split_branches(
    prompt_ids: TokenIds, token_ids: TokenIds, branches: Sequence[Branch]
) -> list[TokenSequence]:
    """The sequences of a response: each of its tokens is in one of them, after all tokens it follows.

    The tokens of an episode are an append-only tree: a branch shares the tokens up to its parent, and those
    after the parent stay as the end of another sequence.
    """
    tokens = [*map(int, prompt_ids), *map(int, token_ids)]
    num_prompt = len(prompt_ids)
    starts = [num_prompt, *(branch.start for branch in branches)]
    parents = [num_prompt, *(branch.parent for branch in branches)]
    stops = [*starts[1:], len(tokens)]
    return [
        TokenSequence(tokens_before(tokens, branches, parent), start - num_prompt, stop - num_prompt)
        for parent, start, stop in zip(parents, starts, stops, strict=True)
    ]


def tokens_before(tokens: Sequence[int], branches: Sequence[Branch], position: int) -> list[int]:
    """The tokens that lead to a position of a tree, whose `tokens` are in the order in which they came."""
    parts: list[Sequence[int]] = []
    for branch in reversed(branches):
        if branch.start < position:
            parts.append(tokens[branch.start : position])
            position = branch.parent
    return [token for part in reversed([*parts, tokens[:position]]) for token in part]


class Trajectory(NamedTuple):
    """A finished request: its tokens, their log-probs and, if known, the experts they were routed to. The
    columns of a run are arrays.

    `loss_mask` is 1 for each token that the policy generated, 0 for each token of an observation (its
    log-prob is 0); None: all were generated. `reward` is that of an episode, before its group is scored;
    `turn_rewards` are its parts by turn, if they are known. A response that continues with newer versions has
    `segments` (version, number of tokens): `version` is that of the first segment, and `weight_digest` has
    the digests of all, joined by DIGEST_SEPARATOR. An episode whose history was changed has `branches`; see
    `split_branches`.
    """

    request: RequestId
    version: int
    weight_digest: str
    prompt_ids: TokenIds
    token_ids: TokenIds
    logprobs: Sequence[float] | NDArray[np.float32]
    routes: NDArray[np.int16] | None = None  # [tokens - 1, ...], tokens of prompt and response
    loss_mask: Sequence[int] | NDArray[np.uint8] | None = None
    reward: float | None = None
    segments: Sequence[tuple[int, int]] | None = None
    branches: Sequence[Branch] | None = None
    finish_reason: str | None = None  # see `Completion`; None: stored by an earlier version of DORA-RL
    turn_rewards: Sequence[float] = ()


def answer_source(chunks: Sequence[Chunk]) -> tuple[int, str, list[tuple[int, int]] | None]:
    """`version`, `weight_digest` and `segments` of a Trajectory, from the chunks that the engine reported,
    oldest first.
    """
    segments = [(c.version, c.num_tokens) for c in chunks] if len(chunks) > 1 else None
    return chunks[0].version, DIGEST_SEPARATOR.join(c.digest for c in chunks), segments


def count_turns(mask: NDArray[np.uint8] | None, num_prompt: int, branches: Sequence[Branch]) -> int:
    """Turns of a response with this `loss_mask`: each ends where an observation or a branch begins."""
    starts = [branch.start - num_prompt for branch in branches]
    if mask is None:
        return 1 + len(starts)
    return sum(int(np.count_nonzero(np.diff(part, prepend=0) == 1)) for part in np.split(mask, starts))


def is_sum_of_turns(turn_rewards: Sequence[float], reward: float) -> bool:
    """Whether the rewards of an episode's turns give its reward, up to the rounding of float32."""
    return math.isclose(math.fsum(turn_rewards), reward, rel_tol=1e-6, abs_tol=1e-6)


class StoredSample(NamedTuple):
    """A scored trajectory as the trainer reads it; `advantage` is None where it needs the whole batch.

    `logprobs` has one entry per generated token (see `loss_mask` of Trajectory). `reference`, `proximal` and
    `values` are columns of the auxiliary workers, one entry per response token. `stream_row` names the
    row if the sample is from the stream. `turn_rewards` is empty where only the sum is known.
    """

    version: int
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    reward: float
    advantage: float | None
    routes: NDArray[np.int16] | None  # [tokens - 1, MoE layers * k]
    weight_digest: str
    reference: NDArray[np.float32] | None = None
    proximal: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    stream_row: RequestId | None = None
    loss_mask: NDArray[np.uint8] | None = None
    branches: Sequence[Branch] | None = None
    finish_reason: str | None = None
    turn_rewards: Sequence[float] = ()

    @property
    def is_truncated(self) -> bool:
        """Whether the response ended because it had its maximum length."""
        return self.finish_reason == "length"

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequences of the response; see `split_branches`."""
        return split_branches(self.prompt_ids, self.token_ids, self.branches or ())


class HeldOutResponse(NamedTuple):
    """A response to a held-out prompt, as rewards need it."""

    token_ids: TokenIds
    finish_reason: str | None


class FinishedSample(NamedTuple):
    """The fields of a sample that the driver reads again; `reward` is an episode's own until its group
    `is_scored`.
    """

    sibling: int
    token_ids: NDArray[np.int32]
    reward: float | None
    is_scored: bool
    task_rewards: dict[str, float]  # by task, if there are several
    version: int
    finish_reason: str | None = None


class SampleSubscriber(Protocol):
    """Receives samples; `flush` follows once everything before it is durable."""

    def put(self, trajectory: Trajectory) -> None:
        """A trajectory is stored."""

    def score(self, group: GroupId, rewards: Sequence[float], advantages: Sequence[float | None]) -> None:
        """A group is scored, sibling by sibling."""

    def finish(self, groups: Iterable[GroupId]) -> None:
        """These groups are in a final state."""

    def flush(self) -> None:
        """All calls before this one are durable."""


class SampleStore:
    """Rows are (group_id, sibling); `state` is finished, scored, committed, or a final state."""

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        """Open for writing; creates the file. With `fsync`, commits survive a loss of power."""
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute(f"pragma synchronous = {'full' if fsync else 'off'}")
        self._db.execute(_SCHEMA)
        present = {row[1] for row in self._db.execute("pragma table_info(samples)")}
        for name in (name for name in LATER_COLUMNS if name not in present):
            self._db.execute(f"alter table samples add column {name} text")
        self._in_transaction = False
        self._has_payload = False  # written in this transaction; the next event may name it
        self._subscriber: SampleSubscriber | None = None
        self._resent: dict[GroupId, None] = {}  # trained groups whose step is redone

    def subscribe(self, subscriber: SampleSubscriber | None) -> None:
        """Send all samples that are not in a final state, and all later changes; None: unsubscribe."""
        self._subscriber = subscriber
        if subscriber is None:
            return
        self.commit()
        self._send(subscriber, self._rows("state in ('finished', 'scored', 'committed')"))
        for group in self._resent:
            self._send(subscriber, self._rows("group_id = ? and state = 'trained'", str(group)))

    def resend(self, groups: Iterable[GroupId]) -> None:
        """Have the subscriber drop scored groups, whatever their state, and send them again."""
        if self._subscriber is None:
            return
        self.commit()
        self._resent |= dict.fromkeys(groups)
        self._subscriber.finish(groups)
        self._subscriber.flush()
        for group in groups:
            self._send(self._subscriber, self._rows("group_id = ?", str(group)))

    @staticmethod
    def _send(
        subscriber: SampleSubscriber, rows: Iterable[tuple[Trajectory, float | None, float | None]]
    ) -> None:
        scored: dict[GroupId, list[tuple[float, float | None]]] = {}
        for trajectory, reward, advantage in rows:
            subscriber.put(trajectory)
            if reward is not None:
                scored.setdefault(trajectory.request.group, []).append((reward, advantage))
        for group, siblings in scored.items():
            rewards, advantages = zip(*siblings, strict=True)
            subscriber.score(group, rewards, advantages)
        subscriber.flush()

    def put(self, trajectory: Trajectory) -> str:
        """Add a finished trajectory; returns the digest of its columns PAYLOAD.

        Raises sqlite3.IntegrityError if its row exists.
        """
        t = trajectory
        payload = (
            t.version,
            t.weight_digest,
            np.asarray(t.prompt_ids, dtype="<i4").tobytes(),
            np.asarray(t.token_ids, dtype="<i4").tobytes(),
            np.asarray(t.logprobs, dtype="<f4").tobytes(),
            None if t.routes is None else t.routes.astype("<i2").tobytes(),
            None if t.loss_mask is None else np.asarray(t.loss_mask, np.uint8).tobytes(),
            None if t.segments is None else json.dumps(t.segments),
            None if not t.branches else json.dumps(t.branches),
            json.dumps([*t.turn_rewards]) if len(t.turn_rewards) else None,
        )
        self._has_payload = True
        self._write(
            f"insert into samples (group_id, sibling, {', '.join(PAYLOAD)}, reward, finish_reason, state) "
            "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'finished')",
            (str(t.request.group), t.request.sibling, *payload, t.reward, t.finish_reason),
        )
        if self._subscriber is not None:
            self._subscriber.put(t)
        return payload_digest(payload)

    def score(
        self,
        group: GroupId,
        rewards: Sequence[float],
        advantages: Sequence[float | None],
        by_task: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Set rewards and advantages of a group, sibling by sibling; `by_task`: the rewards of each task."""
        self._has_payload = True
        for sibling, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
            parts = {task: own[sibling] for task, own in (by_task or {}).items()}
            self._write(
                "update samples set reward = ?, advantage = ?, task_rewards = ?, state = 'scored' "
                "where group_id = ? and sibling = ?",
                (reward, advantage, json.dumps(parts) if parts else None, str(group), sibling),
            )
        if self._subscriber is not None:
            self._subscriber.score(group, rewards, advantages)

    def set_state(self, groups: Iterable[GroupId], state: str, trained_step: int | None = None) -> None:
        """Set the state of whole groups."""
        groups = [*groups]
        for group in groups:
            self._write(
                "update samples set state = ?, trained_step = ? where group_id = ?",
                (state, trained_step, str(group)),
            )
            if state.startswith(FINAL_STATES):
                self._resent.pop(group, None)
        if self._subscriber is not None and state.startswith(FINAL_STATES):
            self._subscriber.finish(groups)

    def remove_scores(self, group: GroupId) -> None:
        """Set the samples of a group back to finished."""
        self._write(
            "update samples set state = 'finished', trained_step = null, reward = null, advantage = null, "
            "task_rewards = null where group_id = ?",
            (str(group),),
        )

    def response_lengths(self, group: GroupId) -> list[int]:
        """Number of tokens of each response, observations included, in sibling order."""
        rows = self._db.execute(
            "select token_ids from samples where group_id = ? order by sibling", (str(group),)
        )
        return [len(_ids(response)) for (response,) in rows]

    def episode_sizes(self) -> dict[RequestId, tuple[int, int]]:
        """Response tokens that are observations, and turns, of every episode with an observation."""
        rows = self._db.execute(
            "select group_id, sibling, length(prompt_ids) / 4, loss_mask, branches from samples "
            "where loss_mask is not null"
        )
        sizes = {}
        for name, sibling, num_prompt, blob, branches in rows:
            mask = np.frombuffer(blob, np.uint8)
            num_turns = count_turns(mask, num_prompt, read_branches(branches) or ())
            sizes[RequestId(*GroupId.parse(name), sibling)] = len(mask) - int(mask.sum()), num_turns
        return sizes

    def finished(self, group: GroupId) -> list[FinishedSample]:
        """The finished siblings of a group, in order."""
        rows = self._db.execute(
            "select sibling, token_ids, reward, state != 'finished', coalesce(task_rewards, '{}'), version, "
            "finish_reason from samples where group_id = ? order by sibling",
            (str(group),),
        )
        return [
            FinishedSample(
                k, _ids(answer), reward, bool(is_scored), json.loads(parts), version, finish_reason
            )
            for k, answer, reward, is_scored, parts, version, finish_reason in rows
        ]

    def task_rewards(self, group: GroupId, group_size: int) -> dict[str, tuple[float, ...]]:
        """The rewards of a group by each task that has scored all its `group_size` siblings."""
        rows = self._db.execute(
            "select coalesce(task_rewards, '{}') from samples where group_id = ? order by sibling",
            (str(group),),
        )
        siblings: list[dict[str, float]] = [json.loads(parts) for (parts,) in rows]
        if len(siblings) != group_size:
            return {}
        tasks = [task for task in siblings[0] if all(task in parts for parts in siblings)]
        return {task: tuple(parts[task] for parts in siblings) for task in tasks}

    def prompts(self, limit: int) -> list[tuple[GroupId, list[int]]]:
        """Token ids of the prompts of up to `limit` training groups, and of as many held-out ones."""
        rows: list[tuple[str, bytes]] = []
        for of_kind in ("group_id >= '0'", "group_id < '0'"):  # the names of held-out groups begin with "-"
            query = f"select group_id, prompt_ids from samples where sibling = 0 and {of_kind} limit ?"
            rows += self._db.execute(query, (limit,))
        return [(GroupId.parse(name), _ids(prompt).tolist()) for name, prompt in rows]

    def states(self) -> list[tuple[RequestId, str, int | None]]:
        """State and trained step of every sample."""
        rows = self._db.execute("select group_id, sibling, state, trained_step from samples").fetchall()
        return [(RequestId(*GroupId.parse(name), k), state, step) for name, k, state, step in rows]

    def unscored(self) -> set[GroupId]:
        """Groups without rewards, and groups that are not in a final state and have no advantages."""
        rows = self._db.execute(
            "select distinct group_id from samples "
            "where state = 'finished' or (state in ('scored', 'committed') and advantage is null)"
        )
        return {GroupId.parse(name) for (name,) in rows}

    def delete(self, request: RequestId) -> None:
        """Delete a sample that no event names."""
        self._write(
            "delete from samples where group_id = ? and sibling = ?", (str(request.group), request.sibling)
        )

    def commit(self) -> None:
        """Make all writes durable and visible to readers, then flush the subscriber."""
        if self._in_transaction:
            self._in_transaction = self._has_payload = False  # a commit that fails has ended the transaction
            self._db.execute("commit")
            if self._subscriber is not None:
                self._subscriber.flush()

    def commit_payload(self) -> None:
        """Commit if there are responses or rewards to commit. States alone wait for the next commit, because
        a resumed run takes them from the journal.
        """
        if self._has_payload:
            self.commit()

    def close(self) -> None:
        self._subscriber = None
        self.commit()
        self._db.close()

    def _rows(self, condition: str, *values: str) -> Iterator[tuple[Trajectory, float | None, float | None]]:
        """Trajectories with reward and advantage, if known."""
        rows = self._db.execute(
            "select group_id, sibling, version, weight_digest, prompt_ids, token_ids, logprobs, routes, "
            "loss_mask, branches, finish_reason, turn_rewards, "
            "iif(state = 'finished', null, reward), advantage "
            f"from samples where {condition} order by group_id, sibling",
            values,
        )
        for name, sibling, version, digest, prompt, answer, logprobs, routes, mask, *others in rows:
            branches, finish_reason, turn_rewards, *scores = others
            prompt_ids, token_ids = _ids(prompt), _ids(answer)
            routes_by_token = None
            if routes is not None:
                num_rows = len(prompt_ids) + len(token_ids) - 1
                routes_by_token = np.frombuffer(routes, dtype="<i2").reshape(num_rows, -1)
            loss_mask = None if mask is None else np.frombuffer(mask, np.uint8)
            yield (
                Trajectory(
                    RequestId(*GroupId.parse(name), sibling),
                    version,
                    digest,
                    prompt_ids,
                    token_ids,
                    np.frombuffer(logprobs, dtype="<f4"),
                    routes_by_token,
                    loss_mask,
                    branches=read_branches(branches),
                    finish_reason=finish_reason,
                    turn_rewards=json.loads(turn_rewards or "[]"),
                ),
                *scores,
            )

    def _write(self, sql: str, values: tuple[object, ...]) -> None:
        if not self._in_transaction:
            self._db.execute("begin")
            self._in_transaction = True
        self._db.execute(sql, values)


def read_branches(column: str | None) -> list[Branch] | None:
    """The branches of a row from its column. Raises ValueError or TypeError for a damaged one."""
    return None if column is None else [Branch(*map(int, branch)) for branch in json.loads(column)]


def _ids(blob: bytes) -> NDArray[np.int32]:
    return np.frombuffer(blob, dtype="<i4")
