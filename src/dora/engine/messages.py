"""Messages that an engine exchanges with the driver during a live migration and during an episode.

A migration moves a running request from a source engine to a destination engine that holds the same version:

    driver -> destination   ReserveMigration
    driver -> source        StartExport
    source -> driver        ExportFinished, or ExportFailed
    destination -> driver   ImportFinished, or ImportFailed

All else goes through shared memory, a slot of which the driver allocates to each migration
(`dora.engine.kv_transfer.handoff`). KV is copied from the source's block pool to the destination's. Where the
destination cannot read the source's pool the migration is token-only: the destination prefills the tokens
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dora.core.types import RequestId
from dora.engine.request import Request

if TYPE_CHECKING:
    from dora.engine.decode_batch import PartialOutput
    from dora.engine.kv_transfer.handoff import Handoff, HandoffSlot


@dataclass(frozen=True)
class ReserveMigration:
    """To the destination: reserve a row and KV blocks for a request that another engine decodes.

    `slot` has the state of the migration. Each side ends the migration if no block is copied for `lease_s`.
    `source_pool` is the address of the source's KV for the engines' `KVTransport`, or None in a token-only
    migration.
    """

    migration_id: int
    request: Request
    source_pool: Any
    slot: HandoffSlot
    lease_s: float


@dataclass(frozen=True)
class StartExport:
    """To the source: export a running request once the destination has reserved a row."""

    migration_id: int
    request_id: RequestId
    slot: HandoffSlot
    lease_s: float
    carries_kv: bool = True


@dataclass(frozen=True)
class ImportFinished:
    """The destination has committed the import and owns the request.

    It received `num_tokens` tokens of the response and `num_bytes` of KV, copied in `copy_s`. The request was
    not decoded for `stop_s`, from the source's last step until it got its row. The KV of `num_prefilled`
    tokens of prompt and response is computed again.
    """

    migration_id: int
    request_id: RequestId
    num_tokens: int
    num_bytes: int
    copy_s: float
    stop_s: float
    num_prefilled: int = 0


@dataclass(frozen=True)
class ImportFailed:
    """The destination has ended the migration and freed its reservation."""

    migration_id: int
    reason: str


@dataclass(frozen=True)
class ExportFinished:
    """The source has seen the import committed and has freed the request's row and blocks."""

    migration_id: int


@dataclass(frozen=True)
class ExportFailed:
    """The source has ended the migration. It keeps the request, unless that is finished."""

    migration_id: int
    reason: str


MigrationReply = ImportFinished | ImportFailed | ExportFinished | ExportFailed


@runtime_checkable
class SupportsMigration(Protocol):
    """What an engine implements beside `InferenceEngine` so that its running requests can migrate.

    Its `progress` omits requests that another engine may have imported.
    """

    @property
    def num_migrations(self) -> int:
        """Migrations in progress, in both directions."""

    def reserve_migration(self, command: ReserveMigration) -> ImportFailed | None:
        """Reserve a row and KV blocks for a request that another engine decodes.

        Returns ImportFailed if that is impossible.
        """

    def start_export(self, command: StartExport) -> ExportFailed | None:
        """Begin to export a request. Returns ExportFailed if that is impossible."""

    def cancel_migration(self, migration_id: int) -> None:
        """End a migration whose import is not committed yet; `poll_migrations` returns the reply."""

    def poll_migrations(self) -> list[MigrationReply]:
        """Advance all migrations and return new replies. The caller calls it between steps."""


OpenHandoff = Callable[[int, "HandoffSlot"], "Handoff"]  # by the number of a migration


@runtime_checkable
class MigratesBetweenMachines(Protocol):
    """What an engine of another class implements beside `SupportsMigration` if a run may have several
    machines.
    """

    @property
    def kv_address(self) -> str | None:
        """Where engines of other machines read its KV; None: requests migrate there without it."""

    def connect(self, open_handoff: OpenHandoff, clock: Callable[[], float]) -> None:
        """Open the shared state of migrations by `open_handoff`, which raises OSError.

        All machines have the same `clock`. Called once, before the first migration.
        """


@runtime_checkable
class SharesKV(Protocol):
    """What an engine of another backend implements beside `SupportsMigration` to move requests with their KV.

    It has the capability `kv_transfer`. The driver gives its pool to other engines of its backend on the
    machine as `ReserveMigration.source_pool`.
    """

    @property
    def kv_pool(self) -> Path | None:
        """The path in memory through which its KV leaves; None if this engine's KV cannot."""


@dataclass(frozen=True)
class TurnFinished:
    """A request has generated a turn, `token_ids`, and waits. See `Completion` for `finish_reason`.

    The request may have `num_left` more tokens, of which at least one must be generated. `logprobs` are those
    of the distribution that the tokens were sampled from, in nats; empty: unknown.
    """

    request_id: RequestId
    token_ids: list[int]
    finish_reason: str
    num_left: int
    logprobs: Sequence[float] = ()


@dataclass(frozen=True)
class ContinueEpisode:
    """Append these observation tokens, at least one, and generate the next turn."""

    request_id: RequestId
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EndEpisode:
    """The response ends with its last turn."""

    request_id: RequestId


@runtime_checkable
class SupportsEpisodes(Protocol):
    """What an engine implements beside `InferenceEngine` to generate responses of several turns."""

    def pop_finished_turns(self) -> list[TurnFinished]:
        """The turns that have finished since the last call."""

    def continue_episode(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Append observation tokens to a waiting request, which generates its next turn."""

    def end_episode(self, request_id: RequestId) -> None:
        """End a response with its last turn; the next step returns its completion."""


class OutputPart(NamedTuple):
    """Tokens [N] of an unfinished output from number `start` on, with log-probs [N, 3] as in `PartialOutput`.

    All tokens of the output are from the weights of `version` with this digest, or observations for them.
    """

    request: RequestId
    version: int
    digest: str
    start: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@runtime_checkable
class ContinuesOutputs(Protocol):
    """What an engine implements beside `InferenceEngine` so that requests survive its loss."""

    def partial_outputs(self, ids: Collection[RequestId] | None = None) -> dict[RequestId, PartialOutput]:
        """A copy of the output so far of each of these requests (None: of all) that another engine could
        continue.
        """

    def submit(
        self, requests: Collection[Request], outputs: Mapping[RequestId, PartialOutput] | None = None
    ) -> None:
        """As `InferenceEngine.submit`; requests with an output of the same weights continue it.

        An episode whose output ends with a whole turn waits for `continue_episode` or `end_episode`.
        """
