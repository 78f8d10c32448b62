"""The outputs of unfinished requests, so that these continue after the loss of an engine or of the whole run.

Engines report new tokens once per second. The driver keeps them in memory and appends them to a file of the
run, which survives SIGKILL because the kernel has the bytes. A record that is torn or damaged ends the file.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dora.core.types import Chunk, RequestId
from dora.engine.decode_batch import NUM_LOGPROBS, PartialOutput
from dora.engine.messages import OutputPart
from dora.engine.request import Request

FILE_NAME = "partial_outputs.bin"
_MIN_FILE_BYTES = 2**24  # a smaller file is not compacted
_HEADER = np.dtype([("checksum", "<u4"), ("num_bytes", "<u4")])
_FIELDS = np.dtype(
    [("request", "<i8", 3), ("version", "<i8"), ("start", "<i8"), ("num_tokens", "<i8"), ("digest", "S128")]
)
_TOKEN_BYTES = 4 * (1 + NUM_LOGPROBS)


class PartialOutputs:
    """Outputs by request, in memory and in a file."""

    def __init__(self, path: Path) -> None:
        """Nothing is written before the first tokens."""
        self._path = path
        self._parts: dict[RequestId, OutputPart] = {}
        self._file: int | None = None

    def read(self, unfinished: Collection[RequestId]) -> None:
        """Keep what the file has of these requests, which are those of a resumed run."""
        if unfinished and self._path.exists():
            for part in _read(self._path.read_bytes()):
                if part.request in unfinished:
                    self._merge(part)

    def add(self, parts: Iterable[OutputPart]) -> None:
        """Keep new tokens of an engine's requests, in one write."""
        data = b"".join([_record(part) for part in parts if self._merge(part)])
        if not data:
            return
        if self._file is None:
            self._rewrite()
            return
        os.write(self._file, data)
        self._num_bytes += len(data)
        if self._num_bytes > max(_MIN_FILE_BYTES, 4 * self._num_live_bytes()):
            self.close()
            self._rewrite()

    def add_observation(self, request: RequestId, start: int, token_ids: Sequence[int]) -> None:
        """Keep the observation tokens after the first `start` tokens of an output, if these are kept."""
        if (kept := self._parts.get(request)) is not None:
            logprobs = np.full((len(token_ids), NUM_LOGPROBS), np.nan, np.float32)
            tokens = np.array(token_ids, np.int32)
            self.add([kept._replace(start=start, token_ids=tokens, logprobs=logprobs)])

    def forget(self, request: RequestId) -> None:
        """Drop a request that has finished, failed or was aborted."""
        self._parts.pop(request, None)

    def lengths(self, requests: Iterable[RequestId]) -> tuple[tuple[RequestId, int], ...]:
        """How many tokens of the requests are kept, without those that have none."""
        found = ((request, self._parts[request]) for request in requests if request in self._parts)
        return tuple((request, len(part.token_ids)) for request, part in found)

    def of(self, requests: Sequence[Request]) -> dict[RequestId, PartialOutput]:
        """What the requests can continue; the engine compares the digest with that of its weights."""
        found = ((r.id, part) for r in requests if (part := self._parts.get(r.id)) is not None)
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

    def _num_live_bytes(self) -> int:
        return sum(_TOKEN_BYTES * len(part.token_ids) for part in self._parts.values())

    def _rewrite(self) -> None:
        """Write a file without the records of finished requests, and append to it from now on."""
        data = b"".join(map(_record, self._parts.values()))
        draft = self._path.with_name(self._path.name + ".draft")
        draft.write_bytes(data)
        os.replace(draft, self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._num_bytes = len(data)


def _record(part: OutputPart) -> bytes:
    fields = np.zeros((), _FIELDS)
    fields["request"], fields["version"], fields["start"] = part.request, part.version, part.start
    fields["num_tokens"], fields["digest"] = len(part.token_ids), part.digest.encode()
    arrays = part.token_ids.astype("<i4").tobytes() + part.logprobs.astype("<f4").tobytes()
    body = fields.tobytes() + arrays
    return np.array((zlib.crc32(body), len(body)), _HEADER).tobytes() + body


def _read(data: bytes) -> Iterator[OutputPart]:
    """The parts of a file up to its first damaged record."""
    file = io.BytesIO(data)
    while len(head := file.read(_HEADER.itemsize)) == _HEADER.itemsize:
        checksum, num_bytes = np.frombuffer(head, _HEADER)[0].item()
        body = file.read(num_bytes)
        if len(body) < max(num_bytes, _FIELDS.itemsize) or zlib.crc32(body) != checksum:
            return
        fields = np.frombuffer(body, _FIELDS, 1)[0]
        num_tokens = int(fields["num_tokens"])
        tokens = np.frombuffer(body, "<i4", num_tokens, _FIELDS.itemsize)
        logprobs = np.frombuffer(body, "<f4", offset=_FIELDS.itemsize + tokens.nbytes)
        yield OutputPart(
            RequestId(*fields["request"].tolist()),
            int(fields["version"]),
            fields["digest"].decode(),
            int(fields["start"]),
            tokens,
            logprobs.reshape(num_tokens, NUM_LOGPROBS),
        )
