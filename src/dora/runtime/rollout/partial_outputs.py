"""The outputs of unfinished requests, so that these continue after the loss of an engine or of the whole run.

Engines report new tokens every `runtime.output_interval_s`, and at the end of each turn of an episode. The
driver keeps them in memory and appends them to a file of the run, which survives SIGKILL because the kernel
has the bytes. After the loss of the whole run an episode continues if its environment can be restored, so the
file also has the states of environments. A request that restarts from its prompt has a record of that, so
that no resumed run continues an attempt that has failed. A record that is torn or damaged ends the file.
"""

from __future__ import annotations

import base64
import io
import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dora.atomic_file import write_bytes_atomically
from dora.core.types import Chunk, RequestId
from dora.engine.decode_batch import NUM_LOGPROBS, PartialOutput
from dora.engine.messages import OutputPart

FILE_NAME = "partial_outputs.bin"
_MIN_FILE_BYTES = 2**24  # a smaller file is not compacted
_HEADER = np.dtype([("checksum", "<u4"), ("num_bytes", "<u4")])
_FIELDS = np.dtype(
    [("request", "<i8", 3), ("version", "<i8"), ("start", "<i8"), ("num_tokens", "<i8"), ("digest", "S128")]
)
_OUTPUT, _EPISODE, _RESTART = b"O", b"E", b"R"  # first byte of a record


class SavedEpisode(NamedTuple):
    """An episode between two turns: after `num_turns` turns, when its output has `num_tokens` tokens.

    `state` restores the environment.
    """

    prompt_ids: tuple[int, ...]
    num_turns: int
    num_tokens: int
    state: bytes


class PartialOutputs:
    """Outputs by request, in memory and in a file, and the episodes that can be restored."""

    def __init__(self, path: Path) -> None:
        """Nothing is written before the first tokens."""
        self._path = path
        self._parts: dict[RequestId, OutputPart] = {}
        self._episodes: dict[RequestId, SavedEpisode] = {}
        self._file: int | None = None

    def read(self, unfinished: Collection[RequestId], *, are_episodes: bool = False) -> None:
        """Keep what the file has of these requests, which are those of a resumed run.

        Of episodes, keep what can be restored.
        """
        if not unfinished or not self._path.exists():
            return
        for request, record in read_records(self._path.read_bytes()):
            if request not in unfinished:
                continue
            if isinstance(record, OutputPart):
                self._merge(record)
            elif isinstance(record, SavedEpisode):
                self._episodes[request] = record
            else:
                self.forget(request)
        if are_episodes:
            for request in {*self._parts, *self._episodes}:
                self._keep_saved(request)

    def add(self, parts: Iterable[OutputPart]) -> None:
        """Keep new tokens of an engine's requests, in one write."""
        self._append(b"".join([_record(part) for part in parts if self._merge(part)]))

    def add_observation(self, request: RequestId, start: int, token_ids: Sequence[int]) -> None:
        """Keep the observation tokens after the first `start` tokens of an output, if these are kept."""
        if (kept := self._parts.get(request)) is not None:
            logprobs = np.full((len(token_ids), NUM_LOGPROBS), np.nan, np.float32)
            tokens = np.array(token_ids, np.int32)
            self.add([kept._replace(start=start, token_ids=tokens, logprobs=logprobs)])

    def save(self, request: RequestId, episode: SavedEpisode) -> None:
        """Keep an episode, with what is kept of its output, for a resume of the run."""
        self._episodes[request] = episode
        self._append(_episode_record(request, episode))

    def saved(self, request: RequestId) -> SavedEpisode | None:
        """The episode of a request, as last saved."""
        return self._episodes.get(request)

    def forget(self, request: RequestId) -> bool:
        """Drop what a request keeps, as after its end; returns whether it kept anything."""
        part, episode = self._parts.pop(request, None), self._episodes.pop(request, None)
        return part is not None or episode is not None

    def restart(self, request: RequestId) -> bool:
        """Drop what a request keeps, because it restarts from its prompt, in a resumed run as well.

        Returns whether it kept anything.
        """
        if is_kept := self.forget(request):
            self._append(_with_header(_RESTART + json.dumps(request).encode()))
        return is_kept

    def lengths(self, requests: Iterable[RequestId]) -> tuple[tuple[RequestId, int], ...]:
        """How many tokens of the requests are kept, without those that have none."""
        found = ((request, self._parts[request]) for request in requests if request in self._parts)
        return tuple((request, len(part.token_ids)) for request, part in found)

    def of(self, requests: Iterable[RequestId]) -> dict[RequestId, PartialOutput]:
        """What the requests can continue; the engine compares the digest with that of its weights."""
        found = ((r, part) for r in requests if (part := self._parts.get(r)) is not None)
        return {
            request: PartialOutput(
                part.token_ids.astype(np.int64),
                part.logprobs,
                (Chunk(part.version, part.digest, len(part.token_ids)),),
            )
            for request, part in found
        }

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _merge(self, part: OutputPart) -> bool:
        """Add a part to the output of its request; False if it has no new tokens or tokens before it miss."""
        kept, stop = self._parts.get(part.request), part.start + len(part.token_ids)
        if kept is None or (kept.version, kept.digest) != (part.version, part.digest):
            if part.start > 0:
                return False
            self._parts[part.request] = part
            return True
        if part.start > len(kept.token_ids) or stop <= len(kept.token_ids):
            return False
        tokens = np.concatenate([kept.token_ids[: part.start], part.token_ids])
        logprobs = np.concatenate([kept.logprobs[: part.start], part.logprobs])
        self._parts[part.request] = kept._replace(token_ids=tokens, logprobs=logprobs)
        return True

    def _keep_saved(self, request: RequestId) -> None:
        """Cut an episode's output after the last saved turn and a part of the next one, or forget it.

        The next turn loses its last token: it may be whole, and an engine reports a turn as it ends it.
        """
        saved, part = self._episodes.get(request), self._parts.get(request)
        if saved is None or (0 if part is None else len(part.token_ids)) < saved.num_tokens:
            self.forget(request)
        elif part is not None:
            is_observed = np.isnan(part.logprobs[saved.num_tokens :, 0])
            num_sampled = int(is_observed.argmax()) if is_observed.any() else len(is_observed)
            stop = saved.num_tokens + max(0, num_sampled - 1)
            kept = part._replace(token_ids=part.token_ids[:stop], logprobs=part.logprobs[:stop])
            self._parts[request] = kept
            if not stop:
                del self._parts[request]

    def _append(self, data: bytes) -> None:
        """Append the records of what is kept since the last call."""
        if not data:
            return
        if self._file is None:
            self._rewrite()
            return
        os.write(self._file, data)
        self._num_bytes += len(data)
        if self._num_bytes > max(_MIN_FILE_BYTES, 4 * self._num_rewritten):
            self.close()
            self._rewrite()

    def _rewrite(self) -> None:
        """Write a file without the records of finished requests, and append to it from now on."""
        records = [_episode_record(*item) for item in self._episodes.items()]
        data = b"".join([*records, *map(_record, self._parts.values())])
        write_bytes_atomically(self._path, data)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._num_bytes = self._num_rewritten = len(data)


def _record(part: OutputPart) -> bytes:
    fields = np.zeros((), _FIELDS)
    fields["request"], fields["version"], fields["start"] = part.request, part.version, part.start
    fields["num_tokens"], fields["digest"] = len(part.token_ids), part.digest.encode()
    arrays = part.token_ids.astype("<i4").tobytes() + part.logprobs.astype("<f4").tobytes()
    return _with_header(_OUTPUT + fields.tobytes() + arrays)


def _episode_record(request: RequestId, episode: SavedEpisode) -> bytes:
    fields = episode._replace(state=base64.b64encode(episode.state))._asdict()
    fields["state"] = fields["state"].decode()
    return _with_header(_EPISODE + json.dumps({"request": request, **fields}).encode())


def _with_header(body: bytes) -> bytes:
    return np.array((zlib.crc32(body), len(body)), _HEADER).tobytes() + body


def read_records(data: bytes) -> Iterator[tuple[RequestId, OutputPart | SavedEpisode | None]]:
    """The records of a file, up to its first damaged one; None: the request restarts."""
    file = io.BytesIO(data)
    while len(head := file.read(_HEADER.itemsize)) == _HEADER.itemsize:
        checksum, num_bytes = np.frombuffer(head, _HEADER)[0].item()
        body = file.read(num_bytes)
        if len(body) < max(num_bytes, 1) or zlib.crc32(body) != checksum:
            return
        kind, content = body[:1], body[1:]
        if kind == _EPISODE:
            episode = json.loads(content)
            request, state = RequestId(*episode.pop("request")), base64.b64decode(episode.pop("state"))
            prompt_ids = tuple(episode.pop("prompt_ids"))
            yield request, SavedEpisode(**episode, prompt_ids=prompt_ids, state=state)
        elif kind == _RESTART:
            yield RequestId(*json.loads(content)), None
        else:
            part = _parse_part(content)
            yield part.request, part


def _parse_part(content: bytes) -> OutputPart:
    fields = np.frombuffer(content, _FIELDS, 1)[0]
    num_tokens = int(fields["num_tokens"])
    tokens = np.frombuffer(content, "<i4", num_tokens, _FIELDS.itemsize)
    logprobs = np.frombuffer(content, "<f4", offset=_FIELDS.itemsize + tokens.nbytes)
    return OutputPart(
        RequestId(*fields["request"].tolist()),
        int(fields["version"]),
        fields["digest"].decode(),
        int(fields["start"]),
        tokens,
        logprobs.reshape(num_tokens, NUM_LOGPROBS),
    )
