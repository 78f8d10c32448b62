"""The words of a move: what the two engines are asked, and what they answer.

A move carries a running request and its KV from one engine to another one that holds the same
version. The driver carries these words; the KV goes from pool to pool. Where one of the two cannot
read the other's, tokens and log-probs move alone, and the destination computes the KV again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dora.core.records import RequestId
from dora.engine.sequence import Request


@dataclass(frozen=True)
class Receive:
    """To the destination: reserve a place for a request that another engine is decoding.

    Both engines meet in `folder`. Either side gives up once nothing has been copied for `lease_s`.
    Where its KV is, `Ways` know by `source_pool`; without one the request comes without its KV.
    """

    move: int
    request: Request
    source_pool: Any
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
    carries_kv: bool = True


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
    passed from the source's last step to the request's seat here. The KV of `num_prefilled` tokens, of
    prompt and answer, is computed again.
    """

    move: int
    request: RequestId
    num_tokens: int
    num_bytes: int
    copy_s: float
    stop_s: float
    num_prefilled: int = 0


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


@runtime_checkable
class MovesRequests(Protocol):
    """What an engine offers beside `InferenceEngine` whose running requests can move to others.

    Requests that another engine may have taken are left out of its `progress`.
    """

    @property
    def num_moves(self) -> int:
        """Moves under way, out and in."""

    def receive(self, order: Receive) -> Reserved | NotReceived:
        """Reserve a place for a request that another engine is decoding."""

    def send(self, order: Send) -> Kept | None:
        """Begin to hand a request over. Kept says why that cannot be."""

    def cancel_move(self, move: int) -> None:
        """End a move, unless its request has been taken by then; it is answered by `poll_moves`."""

    def poll_moves(self) -> list[Answer]:
        """Take all moves a step further; what is to be answered. To be called between steps."""


Answer = Reserved | Received | NotReceived | Sent | Kept
