"""Of each move the core is told once how it ended, and that is how it ended, whoever dies when."""

from __future__ import annotations

import shutil
from collections import Counter, deque
from pathlib import Path
from random import Random

import pytest
from tests.runtime.migration_model import REQUEST, Destination, End, Source

from dora.core.actions import Migrate
from dora.core.events import Event, Migrated, MigrationFailed, RequestFinished
from dora.engine.request import Request, SamplingParams
from dora.runtime.process import messages as m
from dora.runtime.rollout.migration import Migrations

SOURCE, DESTINATION = 3, 5
ORDER = Migrate(REQUEST, SOURCE, DESTINATION, 0, "a test")
FINISHED = RequestFinished(DESTINATION, REQUEST, 0, 9, (), "stop")
ASKED = Request(REQUEST, REQUEST.group, (1, 2), 0, 0, SamplingParams(1.0, 8))


class Stage:
    """One move between two modelled engines."""

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir()
        self.rng, self.folder = Random(seed), folder
        self.destination = Destination(folder, self.rng)
        self.ends: dict[int, End] = {SOURCE: Source(folder, self.rng), DESTINATION: self.destination}
        self.facts: deque[Event] = deque()
        self.moves = Migrations(folder, 1.0, self.facts, self.send, lambda request: 7)

    def send(self, engine: int, message: object) -> bool:
        if engine not in self.ends:
            return False
        self.ends[engine].orders.append(message)
        return True

    def begin(self) -> None:
        if SOURCE in self.ends:
            self.moves.start(ORDER, ASKED, self.folder / "pool")
        else:
            self.moves.reject(ORDER)

    def listen(self, engine: int) -> None:
        """Hear the next word of an engine."""
        word = self.ends[engine].words.popleft()
        assert isinstance(
            word, m.MigrationReserved | m.ImportFinished | m.ImportFailed | m.ExportFinished | m.ExportFailed
        )
        self.moves.on_reply(word)

    def kill(self, engine: int) -> None:
        """The engine dies; what it said last is heard, or is lost with it."""
        while self.ends[engine].words and self.rng.random() < 0.7:
            self.listen(engine)
        del self.ends[engine]
        self.moves.on_engine_lost(engine)

    def play(self, share_killed: float) -> None:
        """Until nobody has anything left to say or do."""
        while self.ends and self.moves.in_progress:
            self.step(share_killed)

    def step(self, share_killed: float) -> None:
        """Somebody does something."""
        engine = self.rng.choice(sorted(self.ends))
        if self.rng.random() < share_killed:
            self.kill(engine)
        elif self.ends[engine].words and self.rng.random() < 0.5:
            self.listen(engine)
        else:
            self.ends[engine].act()


@pytest.mark.parametrize("share_killed", [0.0, 0.02, 0.1, 0.4])
def test_the_core_hears_once_how_a_move_ended(tmp_path: Path, share_killed: float) -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        stage = Stage(tmp_path / f"{seed}", seed)
        stage.begin()
        stage.play(share_killed)
        (fact,) = stage.facts
        assert isinstance(fact, Migrated if stage.destination.has_taken else MigrationFailed), seed
        assert not stage.moves.in_progress, seed
        assert not any(stage.moves.is_involved(engine) for engine in (SOURCE, DESTINATION))
        assert list(stage.folder.iterdir()) == [], seed
        seen[type(fact).__name__ + f" {len(stage.ends)}"] += 1
        shutil.rmtree(stage.folder)
    assert {"Migrated 2", "MigrationFailed 2"} <= seen.keys() or share_killed == 0.4


def test_the_loss_of_a_source_waits_for_what_becomes_of_its_moves(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "run", seed=1)
    stage.begin()
    stage.kill(SOURCE)
    assert stage.moves.is_involved(SOURCE)
    assert not stage.facts
    stage.play(0.0)
    assert not stage.moves.is_involved(SOURCE)
    assert isinstance(stage.facts[0], MigrationFailed)


def test_what_the_destination_says_of_a_request_is_told_after_its_arrival(tmp_path: Path) -> None:
    for seed in range(50):
        stage = Stage(tmp_path / f"{seed}", seed)
        stage.begin()
        while not stage.destination.has_taken and stage.moves.in_progress:
            stage.step(0.0)
        if stage.destination.has_taken:
            stage.moves.report(FINISHED)
            assert not stage.facts, "the source has not let go yet"
            stage.play(0.0)
            assert isinstance(stage.facts[0], Migrated)
            assert list(stage.facts)[1:] == [FINISHED]


def test_what_the_source_says_of_a_request_is_told_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "run", seed=1)
    stage.begin()
    stage.moves.report(at_source := RequestFinished(SOURCE, REQUEST, 0, 9, (), "stop"))
    assert list(stage.facts) == [at_source]


@pytest.mark.parametrize("gone", [SOURCE, DESTINATION])
def test_a_move_of_an_engine_that_is_gone_fails_before_all_else_is_told(tmp_path: Path, gone: int) -> None:
    stage = Stage(tmp_path / "run", seed=1)
    stage.facts.append(Migrated(REQUEST, 0, 1, 2, 3, 0.1, 0.1))
    stage.kill(gone)
    stage.begin()
    assert stage.facts[0] == MigrationFailed(REQUEST, SOURCE, DESTINATION, "an engine is lost")
    assert not stage.moves.in_progress


def test_a_late_word_about_a_move_that_is_over_changes_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "run", seed=1)
    stage.moves.on_reply(m.ImportFailed(17, "late"))
    assert not stage.facts
