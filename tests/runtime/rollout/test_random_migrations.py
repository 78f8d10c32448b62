"""Requests that migrate at random between engines, some of which crash, finish as on an engine alone."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from random import Random

import pytest
from tests.engine.engine_cluster import EngineCluster
from tests.engine.tiny import all_close, make_engine, make_request, run

import dora.engine.engine as engine_module
from dora.core.actions import Migrate
from dora.core.events import Event, Migrated, MigrationFailed, RequestFinished
from dora.core.types import RequestId
from dora.engine.cuda_graphs import CUDAGraphRunner
from dora.engine.engine import Engine
from dora.engine.kv_transfer import transfer
from dora.engine.messages import MigrationReply
from dora.engine.request import Completion, Request
from dora.runtime.process import messages as m
from dora.runtime.rollout.migration import Migrations

NUM_RANDOM_ROUNDS, MAX_ROUNDS = 120, 3000
LEASE_S = 5.0


class RandomRun:
    """Three engines, whose messages are delayed, and the driver of their migrations."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.events = Random(seed), deque[Event]()
        self.cluster = EngineCluster(folder, "numba", kv_transfer="staged")
        self.migrations = Migrations(folder, LEASE_S, self.events, self.send)
        self.inboxes: dict[int, list[object]] = {}
        self.outboxes: dict[int, list[MigrationReply | Completion]] = {}
        self.lost: set[int] = set()
        self.num_started = 0
        self.requests = [
            make_request(
                i, version=i // 4 % 2, max_tokens=(2, 17, 30)[i % 3], prompt_length=(14, 16, 20)[i // 4]
            )
            for i in range(12)
        ]
        self.waiting = [*self.requests]
        self.running: dict[RequestId, tuple[Request, int]] = {}  # and the engine
        self.migrating: set[RequestId] = set()
        self.finished: dict[RequestId, Completion] = {}
        for _ in range(3):
            self.start_engine()

    def start_engine(self) -> None:
        number, rng = self.num_started, self.rng
        self.num_started += 1
        self.cluster.add_engine(
            f"{number}",
            versions=(0, 1),
            max_rows=rng.choice((2, 4)),
            num_blocks=rng.choice((8, 14, None)),
            prefill_budget=rng.choice((7, 20, 512)),
        )
        self.inboxes[number], self.outboxes[number] = [], []

    def engine(self, number: int) -> Engine:
        return self.cluster.engines[f"{number}"]

    def send(self, number: int, message: object) -> bool:
        if number in self.inboxes:
            self.inboxes[number].append(message)
        return number in self.inboxes

    def run(self) -> dict[RequestId, Completion]:
        """Act at random for some rounds, and then until all requests have finished."""
        for number in range(MAX_ROUNDS):
            if number < NUM_RANDOM_ROUNDS:
                self.act()
            elif not (self.waiting or self.running or self.migrations.in_progress):
                break
            else:
                self.submit()
            self.cluster.now_s += 0.1
            for each in [*self.inboxes]:
                self.advance(each)
                self.deliver(each, self.rng.randrange(len(self.outboxes[each]) + 1))
        assert all(self.engine(each).is_idle for each in self.inboxes)
        return self.finished

    def act(self) -> None:
        rng = self.rng
        match rng.choice(("submit", "migrate", "migrate", "cancel", "decode only", "wait", "crash")):
            case "submit":
                self.submit()
            case "migrate":
                self.migrate()
            case "cancel":
                for migration in self.migrations.in_progress.values():
                    self.send(migration.action.source, m.CancelMigration(migration.id))
            case "decode only":
                number = rng.choice([*self.inboxes])
                ids = [request_id for request_id in self.running if rng.random() < 0.3]
                self.engine(number).decode_only(ids)
            case "wait":
                self.cluster.now_s += rng.choice((0.0, LEASE_S))
            case _ if rng.random() < 0.2:
                self.crash(rng.choice([*self.inboxes]))

    def submit(self) -> None:
        if self.waiting:
            request, number = self.waiting.pop(), self.rng.choice([*self.inboxes])
            self.running[request.id] = request, number
            self.send(number, m.SubmitRequests([request]))

    def migrate(self) -> None:
        able = [each for each, (_, number) in self.running.items() if number in self.inboxes]
        if able := [each for each in able if each not in self.migrating]:
            request, source = self.running[self.rng.choice(able)]
            destination = self.rng.choice([each for each in self.inboxes if each != source])
            pool = self.cluster.pool_path(f"{source}") if self.rng.random() < 0.8 else None
            self.migrating.add(request.id)
            action = Migrate(request.id, source, destination, request.version, "a test")
            self.migrations.start(action, request, pool)

    def crash(self, number: int) -> None:
        """Some of its last messages are lost."""
        del self.inboxes[number]
        self.deliver(number, self.rng.randrange(len(self.outboxes[number]) + 1))
        del self.cluster.engines[f"{number}"]
        self.lost.add(number)
        self.migrations.on_engine_lost(number)
        self.handle_events()
        self.start_engine()

    def advance(self, number: int) -> None:
        """Let an engine do what its process does in a round."""
        engine, outbox = self.engine(number), self.outboxes[number]
        messages, self.inboxes[number] = self.inboxes[number], []
        for message in messages:
            reply: MigrationReply | None = None
            match message:
                case m.SubmitRequests(requests):
                    engine.submit(requests)
                case m.ReserveMigration():
                    reply = engine.reserve_migration(message)
                case m.StartExport():
                    reply = engine.start_export(message)
                case m.CancelMigration(migration_id):
                    engine.cancel_migration(migration_id)
            outbox += [] if reply is None else [reply]
        outbox += [*engine.poll_migrations(), *engine.step()]
        engine.check()

    def deliver(self, number: int, num_messages: int) -> None:
        """Let the driver handle an engine's next messages."""
        outbox = self.outboxes[number]
        for _ in range(num_messages):
            message = outbox.pop(0)
            if isinstance(message, Completion):
                assert message.id not in self.finished
                self.finished[message.id] = message
                num_tokens, chunks = len(message.token_ids), message.chunks
                self.migrations.report(
                    RequestFinished(number, message.id, message.version, num_tokens, chunks, "")
                )
            else:
                self.migrations.on_reply(message)
            self.handle_events()

    def handle_events(self) -> None:
        while self.events:
            match self.events.popleft():
                case Migrated(request_id, source, destination):
                    assert self.running[request_id][1] == source
                    self.running[request_id] = self.running[request_id][0], destination
                    self.migrating.remove(request_id)
                case MigrationFailed(request_id):
                    self.migrating.remove(request_id)
                case RequestFinished(number, request_id):
                    assert self.running.pop(request_id)[1] == number
        for number in [each for each in self.lost if not self.migrations.is_involved(each)]:
            self.lost.remove(number)
            again = [request for request, engine in self.running.values() if engine == number]
            self.waiting += again
            for request in again:
                del self.running[request.id]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_requests_finish_once_and_as_if_they_had_stayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    monkeypatch.setattr(transfer, "_MAX_STOPPED_BYTES", 0)
    if is_ahead:
        monkeypatch.setattr(engine_module, "ModelRunner", CUDAGraphRunner)
    for seed in range(4):
        (tmp_path / f"{seed}").mkdir()
        random_run = RandomRun(tmp_path / f"{seed}", seed)
        expected = run(make_engine(num_versions=2), random_run.requests)
        assert all_close(random_run.run(), expected), seed
