"""What a run sends through its stream: each answer as it is finished, its reward once it is judged.

`samples.sqlite` is the record; the driver sends what is durable there, and a run that goes on sends again
what was not trained. The trainer takes the groups that the core has chosen, and commits them with its step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dora.core.records import GroupId, RequestId
from dora.errors import RunError
from dora.stream import wire
from dora.stream.batch import Batch, Waited
from dora.stream.client import StreamClient
from dora.stream.fields import Field
from dora.stream.lines import NewRow, Want
from dora.stream.samples import StoredSample, Trajectory
from dora.stream.server import Server
from dora.stream.stream import Stream

ACTOR = "actor"
_ANSWER = (
    Field("prompt_ids", "<i4", (None,)),
    Field("token_ids", "<i4", (None,)),
    Field("logprobs", "<f4", (None,)),
    Field("routes", "<i2", (None,)),  # of all tokens, end to end; none where they are not known
    Field("weight_digest", "u1", (None,)),  # ASCII
)
_JUDGEMENT = (Field("reward", "<f8"), Field("advantage", "<f8"))  # NaN: it needs the whole batch
FIELDS = (*_ANSWER, *_JUDGEMENT)
WAIT_S = 10.0  # for a group that is committed, and so was sent


class Feed:
    """The driver's side: the storage in a thread, and the rows that are on their way to it."""

    def __init__(self, folder: Path, group_size: int) -> None:
        """Blocks and the socket lie in `folder`, which is made."""
        self.folder = folder
        folder.mkdir()
        self._server = Server(Stream(FIELDS, folder), [wire.endpoint_of(folder)])
        self._thread = self._server.start()
        self._client = StreamClient(wire.endpoint_of(folder))
        self._client.declare(ACTOR, [field.name for field in FIELDS], group_size=group_size)
        self._indices: dict[GroupId, dict[int, int]] = {}  # by sibling
        self._answers: list[Trajectory] = []
        self._judged: dict[RequestId, tuple[float, float | None]] = {}
        self._ended: dict[GroupId, None] = {}

    def put(self, trajectory: Trajectory) -> None:
        """An answer is finished. Those to held-out prompts are not trained, so nobody would take them."""
        if not trajectory.request.is_held_out:
            self._answers.append(trajectory)

    def score(self, group: GroupId, rewards: Sequence[float], advantages: Sequence[float | None]) -> None:
        """A group is judged, sibling by sibling."""
        if group.is_held_out:
            return
        for sibling, judged in enumerate(zip(rewards, advantages, strict=True)):
            self._judged[RequestId(*group, sibling)] = judged

    def end(self, groups: Iterable[GroupId]) -> None:
        """These groups are trained, filtered or failed: nobody needs them any more."""
        self._ended |= dict.fromkeys(groups)

    def flush(self) -> None:
        """Send what is durable now."""
        if self._answers:
            self._put()
        if self._judged:
            self._fill()
        if self._ended:
            self._client.clear(self._ended)
            for group in self._ended:
                self._indices.pop(group, None)
            self._ended = {}

    def close(self) -> None:
        self._client.close()
        self._server.stop()
        self._thread.join()

    def _put(self) -> None:
        answers, self._answers = self._answers, []
        rows = [NewRow(t.request, t.version, len(t.prompt_ids) + len(t.token_ids)) for t in answers]
        indices = self._client.put(rows, _columns(answers))
        assert not isinstance(indices, Waited), "a stream without a limit is never full"
        for trajectory, index in zip(answers, indices, strict=True):
            self._indices.setdefault(trajectory.request.group, {})[trajectory.request.sibling] = index

    def _fill(self) -> None:
        judged, self._judged = self._judged, {}
        rewards, advantages = zip(*judged.values(), strict=True)
        columns = {
            "reward": np.array(rewards, np.float64),
            "advantage": np.array([math.nan if a is None else a for a in advantages], np.float64),
        }
        self._client.fill([self._indices[request.group][request.sibling] for request in judged], columns)


class GroupReader:
    """The trainer's side: groups by name, on lease until the step they belong to is done."""

    def __init__(self, folder: Path) -> None:
        """Raises RunError if the driver's stream does not answer."""
        self._client = StreamClient(wire.endpoint_of(folder))
        self._leased: dict[GroupId, Batch] = {}

    def group(self, group: GroupId) -> list[StoredSample]:
        """The samples of a scored group, in sibling order. Raises RunError if it does not come."""
        if group not in self._leased:
            batch = self._client.get(ACTOR, Want(groups=(group,)), WAIT_S)
            if isinstance(batch, Waited):
                raise RunError(f"the sample stream has not handed it out for {batch.wait_s:g} s: {batch.why}")
            self._leased[group] = batch
        return _samples(self._leased[group])

    def commit(self, groups: Iterable[GroupId]) -> None:
        """The step with these groups is done."""
        for group in groups:
            if (batch := self._leased.pop(group, None)) is not None:
                self._client.commit(batch)

    def close(self) -> None:
        """Give back what is on lease."""
        self._client.close()


def _columns(answers: Sequence[Trajectory]) -> dict[str, Any]:
    none = np.zeros(0, np.int16)
    return {
        "prompt_ids": [np.asarray(t.prompt_ids, np.int32) for t in answers],
        "token_ids": [np.asarray(t.token_ids, np.int32) for t in answers],
        "logprobs": [np.asarray(t.logprobs, np.float32) for t in answers],
        "routes": [none if t.routes is None else t.routes.astype(np.int16).reshape(-1) for t in answers],
        "weight_digest": [np.frombuffer(t.weight_digest.encode(), np.uint8) for t in answers],
    }


def _samples(batch: Batch) -> list[StoredSample]:
    """Copies, for a trainer may keep them longer than the lease."""
    columns = {field.name: batch.rows(field.name) for field in FIELDS}
    samples = []
    for row, version in enumerate(batch.versions):
        prompt, tokens, logprobs, routes, digest, reward, advantage = (columns[f.name][row] for f in FIELDS)
        by_token = routes.reshape(len(prompt) + len(tokens) - 1, -1).copy() if len(routes) else None
        samples.append(
            StoredSample(
                version=version,
                prompt_ids=prompt.tolist(),
                token_ids=tokens.tolist(),
                logprobs=logprobs.tolist(),
                reward=float(reward),
                advantage=None if math.isnan(advantage) else float(advantage),
                routes=by_token,
                weight_digest=digest.tobytes().decode(),
            )
        )
    return samples
