"""The words of a move: what the two engines are asked, and what they answer.

A move carries a running request and its KV from one engine to another one that holds the same
version. The driver carries these words; the KV goes from pool to pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dora.core.records import RequestId
from dora.engine.sequence import Request


@dataclass(frozen=True)
class Receive:
    """To the destination: reserve a place for a request that another engine is decoding.

    Both engines meet in `folder`. Either side gives up once nothing has been copied for `lease_s`.
    """

    move: int
    request: Request
    source_pool: Path
    folder: Path
    lease_s: float


@dataclass(frozen=True)
class Send:
    """To the source, once the destination has answered `Reserved`: hand the request over.

    The destination holds the first `num_known_blocks` blocks already, the last of them under the
    name `known_hash`.
    """

    move: int
    request: RequestId
    folder: Path
    num_known_blocks: int
    known_hash: str
    lease_s: float


@dataclass(frozen=True)
class Reserved:
    """The destination has a row and blocks; it holds the first `num_known_blocks` blocks already."""

    move: int
    num_known_blocks: int
    known_hash: str


@dataclass(frozen=True)
class Received:
    """The destination has taken the request: it alone owns it.

    It got `num_tokens` of the answer and `num_bytes` of KV; copying took `copy_s`, and `stop_s`
    passed from the source's last step to the request's seat here.
    """

    move: int
    request: RequestId
    num_tokens: int
    num_bytes: int
    copy_s: float
    stop_s: float


@dataclass(frozen=True)
class NotReceived:
    """The destination has given up and freed its reservation."""

    move: int
    reason: str


@dataclass(frozen=True)
class Sent:
    """The source saw that the request was taken, and has freed its row and blocks."""

    move: int


@dataclass(frozen=True)
class Kept:
    """The source has given up; the request, if unfinished, goes on there."""

    move: int
    reason: str


Answer = Reserved | Received | NotReceived | Sent | Kept
