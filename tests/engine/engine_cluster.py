"""Engines that a test migrates requests between, message by message, on a fake clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.tiny import TINY, all_close, make_engine, run, weights

from dora.core.types import RequestId
from dora.engine.engine import Engine
from dora.engine.interface import KVTransfer
from dora.engine.kv_transfer.handoff import Handoff, HandoffSlot, HandoffSlots, HandoffState
from dora.engine.kv_transfer.transfer import KVTransport
from dora.engine.messages import (
    ExportFailed,
    ExportFinished,
    ImportFailed,
    ImportFinished,
    MigrationReply,
    ReserveMigration,
    StartExport,
)
from dora.engine.request import Completion, Request
from dora.model.config import ModelConfig

LEASE_S = 10.0


class EngineCluster:
    """Engines by name with their pools in `folder`, and everything that they have replied and finished."""

    def __init__(
        self,
        folder: Path,
        kernels: str = "eager",
        exact: bool = False,
        dtype: str = "float32",
        kv_transfer: KVTransfer = "shared",
    ) -> None:
        self.kv_transfer = kv_transfer
        self.folder, self.kernels, self.exact, self.dtype = folder, kernels, exact, dtype
        self.now_s = 100.0
        self.engines: dict[str, Engine] = {}
        self.replies: list[tuple[str, MigrationReply]] = []
        self.finished: dict[RequestId, Completion] = {}
        self._slots: list[HandoffSlot] = []  # of all migrations
        self._memory = HandoffSlots(folder)

    def add_engine(
        self,
        name: str,
        *,
        versions: tuple[int, ...] = (0,),
        config: ModelConfig = TINY,
        **settings: Any,
    ) -> Engine:
        given = {"max_rows": 8, "max_context": 96, "version_slots": 2} | settings
        engine = self.engines[name] = Engine(
            config,
            kernels=self.kernels,
            exact=self.exact,
            dtype=self.dtype,
            pool=self.pool_path(name),
            kv_transfer=self.kv_transfer,
            clock=lambda: self.now_s,
            transport=self.transport(),
            **given,
        )
        for version in versions:
            engine.load(version, weights(version))
        return engine

    def begin(self, request: Request, num_steps: int = 1) -> tuple[Engine, Engine]:
        """New engines "a" and "b", of which "a" has computed the first steps of a request."""
        source, destination = self.add_engine("a"), self.add_engine("b")
        source.submit([request])
        self.step("a", num_steps)
        return source, destination

    def pool_path(self, name: str) -> Path:
        return self.folder / f"pool-{name}.kv"

    def transport(self) -> KVTransport | None:
        """How a new engine reaches the others."""
        return None

    def source_pool(self, name: str) -> Any:
        """Where other engines read the KV of this one."""
        return self.pool_path(name)

    def handoff(self, migration_id: int) -> Handoff:
        """The shared state of a migration."""
        return self._memory.open(migration_id, self._slots[migration_id])

    def is_imported(self, migration_id: int) -> bool:
        return self.handoff(migration_id).state is HandoffState.IMPORTED

    def step(self, name: str, num_steps: int = 1) -> None:
        """Step one engine. No request may finish twice."""
        for _ in range(num_steps):
            for completion in self.engines[name].step():
                assert completion.id not in self.finished
                self.finished[completion.id] = completion
            self.engines[name].check()

    def poll(self, name: str) -> None:
        """Poll the migrations of one engine."""
        self.replies += [(name, reply) for reply in self.engines[name].poll_migrations()]
        self.engines[name].check()

    def try_reserve(self, request: Request, source: str, destination: str) -> ImportFailed | None:
        """The destination's reply to a new migration, if it rejects it."""
        migration_id = len(self._slots)
        self._slots.append(self._memory.allocate(migration_id, request))
        pool = self.source_pool(source)
        command = ReserveMigration(migration_id, request, pool, self._slots[-1], LEASE_S)
        return self.engines[destination].reserve_migration(command)

    def reserve(self, request: Request, source: str, destination: str) -> int:
        """Begin a migration; the destination must accept. Returns the migration's id."""
        assert self.try_reserve(request, source, destination) is None
        return len(self._slots) - 1

    def start_export(self, request: Request, source: str, migration_id: int) -> ExportFailed | None:
        command = StartExport(migration_id, request.id, self._slots[migration_id], LEASE_S)
        return self.engines[source].start_export(command)

    def start_migration(self, request: Request, source: str, destination: str) -> int:
        """Reserve and start the export. Returns the migration's id."""
        migration_id = self.reserve(request, source, destination)
        assert self.start_export(request, source, migration_id) is None
        return migration_id

    def migrate(self, request: Request, source: str, destination: str) -> ImportFinished:
        """A whole migration, while no engine decodes."""
        migration_id = self.start_migration(request, source, destination)
        for name in (source, destination, source, destination, source):
            self.poll(name)
        assert self.reply_of(source, migration_id) == ExportFinished(migration_id)
        imported = self.reply_of(destination, migration_id)
        assert isinstance(imported, ImportFinished), imported
        return imported

    def reply_of(self, name: str, migration_id: int) -> MigrationReply | None:
        """What an engine has replied about a migration; it may reply only once."""
        replies = [
            reply for engine, reply in self.replies if engine == name and reply.migration_id == migration_id
        ]
        assert len(replies) <= 1
        return replies[0] if replies else None

    def run_to_end(self) -> dict[RequestId, Completion]:
        """Step and poll all engines until no request and no migration is left. Returns all completions.

        A round takes half a second, so that every lease expires in the end.
        """
        while any(not engine.is_idle or engine.num_migrations for engine in self.engines.values()):
            for name in self.engines:
                self.poll(name)
                self.step(name)
            self.now_s += 0.5
        for engine in self.engines.values():
            engine.check()
            assert engine.kv_usage == 0
        return self.finished

    def check_answers(self, requests: list[Request]) -> None:
        """Run to the end: the requests have the answers of one engine without migrations."""
        assert all_close(self.run_to_end(), self._expected(requests))

    def check_bits(self, request: Request) -> None:
        """Run to the end: a request that was alone on each engine has the bits of one that stays."""
        assert self.run_to_end() == self._expected([request])

    def _expected(self, requests: list[Request]) -> dict[RequestId, Completion]:
        num_versions = 1 + max(request.version for request in requests)
        return run(make_engine(self.kernels, num_versions=num_versions), requests)
