"""The orchestrator gets one event about each migration, the true outcome, whichever engine crashes when."""

from __future__ import annotations

import shutil
from collections import Counter, deque
from pathlib import Path
from random import Random

import pytest
from tests.runtime.rollout.migration_model import NUM_TOKENS, REQUEST, Destination, Engine, Source

from dora.core.actions import Migrate
from dora.core.events import Event, Migrated, MigrationFailed, RequestFinished
from dora.engine.request import Request, SamplingParams
from dora.runtime.process import messages as m
from dora.runtime.rollout.migration import Migrations

SOURCE, DESTINATION = 3, 5
ACTION = Migrate(REQUEST, SOURCE, DESTINATION, 0, "a test")
FINISHED = RequestFinished(DESTINATION, REQUEST, 0, 9, (), "stop")
SUBMITTED = Request(REQUEST, REQUEST.group, (1, 2), 0, 0, SamplingParams(1.0, 8))


class Cluster:
    """One migration between two modelled engines."""

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir()
        self.rng, self.folder = Random(seed), folder
        self.num_replies = 0
        self.destination = Destination(self.rng)
        self.engines: dict[int, Engine] = {SOURCE: Source(self.rng), DESTINATION: self.destination}
        self.events: deque[Event] = deque()
        self.migrations = Migrations(folder, 1.0, self.events, self.send)

    def send(self, engine: int, message: object) -> bool:
        if engine not in self.engines:
            return False
        self.engines[engine].inbox.append(message)
        return True

    def start(self) -> None:
        if SOURCE in self.engines:
            self.migrations.start(ACTION, SUBMITTED, self.folder / "pool")
        else:
            self.migrations.reject(ACTION)

    def receive(self, engine: int) -> None:
        """Deliver the next reply of an engine."""
        reply = self.engines[engine].outbox.popleft()
        assert isinstance(reply, m.ImportFinished | m.ImportFailed | m.ExportFinished | m.ExportFailed)
        self.migrations.on_reply(reply)
        self.num_replies += 1

    def reuses_slot(self) -> bool:
        """Whether the next migration gets the slot of the first one, to which no process may write then."""
        destination = Destination(self.rng)
        self.engines = {SOURCE: Source(self.rng), DESTINATION: destination}
        self.migrations.start(ACTION, SUBMITTED, None)
        (reservation,) = destination.inbox
        assert isinstance(reservation, m.ReserveMigration)
        return reservation.slot.offset == 0

    def kill(self, engine: int) -> None:
        """Crash an engine; its last replies are delivered or lost."""
        while self.engines[engine].outbox and self.rng.random() < 0.7:
            self.receive(engine)
        del self.engines[engine]
        self.migrations.on_engine_lost(engine)

    def run(self, kill_probability: float) -> None:
        """Run until the migration has ended or no engine is left."""
        while self.engines and self.migrations.in_progress:
            self.step(kill_probability)

    def step(self, kill_probability: float) -> None:
        """Let a random engine crash, deliver a reply or act."""
        engine = self.rng.choice(sorted(self.engines))
        if self.rng.random() < kill_probability:
            self.kill(engine)
        elif self.engines[engine].outbox and self.rng.random() < 0.5:
            self.receive(engine)
        else:
            self.engines[engine].act()


@pytest.mark.parametrize("kill_probability", [0.0, 0.02, 0.1, 0.4])
def test_each_migration_gets_one_event_with_its_true_outcome(tmp_path: Path, kill_probability: float) -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        cluster = Cluster(tmp_path / f"{seed}", seed)
        cluster.start()
        cluster.run(kill_probability)
        (event,) = cluster.events
        assert isinstance(event, Migrated if cluster.destination.has_imported else MigrationFailed), seed
        assert not isinstance(event, Migrated) or event.num_tokens == NUM_TOKENS, seed
        assert not cluster.migrations.in_progress, seed
        assert not any(cluster.migrations.is_involved(engine) for engine in (SOURCE, DESTINATION))
        seen[type(event).__name__ + f" {len(cluster.engines)}"] += 1
        assert cluster.reuses_slot() == (cluster.num_replies == 2), seed
        shutil.rmtree(cluster.folder)
    assert {"Migrated 2", "MigrationFailed 2"} <= seen.keys() or kill_probability == 0.4


def test_a_lost_source_stays_involved_until_its_migrations_have_ended(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", seed=1)
    cluster.start()
    cluster.kill(SOURCE)
    assert cluster.migrations.is_involved(SOURCE)
    assert not cluster.events
    cluster.run(0.0)
    assert not cluster.migrations.is_involved(SOURCE)
    assert isinstance(cluster.events[0], MigrationFailed)


def test_events_of_the_destination_are_reported_after_migrated(tmp_path: Path) -> None:
    for seed in range(50):
        cluster = Cluster(tmp_path / f"{seed}", seed)
        cluster.start()
        while not cluster.destination.has_imported and cluster.migrations.in_progress:
            cluster.step(0.0)
        if cluster.destination.has_imported:
            cluster.migrations.report(FINISHED)
            assert not cluster.events, "the source has not replied yet"
            cluster.run(0.0)
            assert isinstance(cluster.events[0], Migrated)
            assert list(cluster.events)[1:] == [FINISHED]


def test_events_of_the_source_are_reported_at_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", seed=1)
    cluster.start()
    cluster.migrations.report(at_source := RequestFinished(SOURCE, REQUEST, 0, 9, (), "stop"))
    assert list(cluster.events) == [at_source]


@pytest.mark.parametrize("lost", [SOURCE, DESTINATION])
def test_a_migration_of_a_lost_engine_fails_before_all_queued_events(tmp_path: Path, lost: int) -> None:
    cluster = Cluster(tmp_path / "run", seed=1)
    cluster.events.append(Migrated(REQUEST, 0, 1, 2, 3, 0.1, 0.1))
    cluster.kill(lost)
    cluster.start()
    assert cluster.events[0] == MigrationFailed(REQUEST, SOURCE, DESTINATION, "an engine is lost")
    assert not cluster.migrations.in_progress


def test_a_late_reply_about_a_finished_migration_is_ignored(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", seed=1)
    cluster.migrations.on_reply(m.ImportFailed(17, "late"))
    assert not cluster.events
