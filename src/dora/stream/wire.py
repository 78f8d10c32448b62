"""Messages of the stream: a JSON header and raw buffers behind it. Nothing is unpickled.

A request is {"n": number, "do": verb, ...}; its answer has the same number, and `error` if it was refused.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora.core.records import GroupId
from dora.errors import StreamError
from dora.stream.fields import Buffer, Field
from dora.stream.lines import Want
from dora.stream.segments import Place

TO_ANY = -1  # the number of an answer to a message that was not understood
LONGEST_WAIT_S = 86400.0  # of one look at a socket, which takes no more; then it is looked at again
TOKEN = "token"  # a file: who can read it shares memory with the storage

Answer = tuple[dict[str, Any], Sequence[Any]]  # a header and buffers


def frames_of(header: Mapping[str, Any], buffers: Sequence[Any]) -> list[Any]:
    """What is sent."""
    return [json.dumps(header).encode(), *buffers]


def refusal(error: StreamError) -> list[Any]:
    """The answer to a message that cannot be read."""
    return frames_of({"n": TO_ANY, "error": str(error)}, ())


def header_of(frames: Sequence[Buffer]) -> dict[str, Any]:
    """Raises ValueError if there is none."""
    try:
        header = json.loads(str(frames[0], "utf8")) if frames else None
    except (RecursionError, MemoryError) as error:
        raise ValueError("a header that is nested too deeply, or is too long") from error
    if not isinstance(header, dict):
        raise ValueError("a message begins with a JSON object")
    return header


def seconds(given: Any) -> float:
    """How long to wait: infinity is for ever, below 0 not at all. Raises StreamError if it is no number."""
    wait_s = float(given)
    if math.isnan(wait_s):
        raise StreamError("wait_s = nan: give a number of seconds, or math.inf")
    return max(0.0, wait_s)


def integers(buffer: Buffer, dtype: Any, width: int) -> NDArray[Any]:
    """[n, width] of a buffer. Raises ValueError if it does not divide."""
    return np.frombuffer(buffer, dtype).reshape(-1, width)


def field_to_json(field: Field) -> list[Any]:
    return [field.name, field.dtype, [*field.shape]]


def field_from_json(name: str, dtype: str, shape: Sequence[int | None]) -> Field:
    return Field(name, dtype, tuple(shape))


def want_from_json(given: Sequence[Any]) -> Want:
    """Raises StreamError or ValueError if it cannot be wanted."""
    num_rows, num_tokens, at_least, groups = given
    for number in (num_rows, at_least, *(() if num_tokens is None else (num_tokens,))):
        if type(number) is not int or number < 1:
            raise StreamError(f"{number!r} rows or tokens were asked for: ask for a whole number above 0")
    if at_least > num_rows:
        raise StreamError(f"at_least = {at_least} is more than num_rows = {num_rows}: raise num_rows")
    return Want(num_rows, num_tokens, at_least, groups_from_json(groups))


def groups_from_json(groups: Sequence[Sequence[int]]) -> tuple[GroupId, ...]:
    return tuple(GroupId(int(epoch), int(row)) for epoch, row in groups)


def place_from_json(given: Sequence[Any]) -> Place:
    segment, offset, num_bytes = given
    return Place(str(segment), int(offset), int(num_bytes))


def endpoint_of(folder: Path) -> str:
    """Where the stream of a folder listens on this host."""
    return local_endpoint(folder / "stream.sock")


def local_endpoint(path: Path) -> str:
    """Of a Unix socket."""
    return f"ipc://{path}"


def is_local(endpoint: str) -> bool:
    return endpoint.startswith("ipc://")


def path_of(endpoint: str) -> Path:
    """The Unix socket of a local endpoint."""
    return Path(endpoint.removeprefix("ipc://"))


def shares_memory(folder: str, token: str, place: str) -> bool:
    """Whether the storage's folder is the one that is seen here under its name."""
    try:
        return place == platform.node() and (Path(folder) / TOKEN).read_text() == token
    except OSError:
        return False
