"""Engine processes behind real pipes, without a driver: what they do when told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from tests.runtime.tiny import MODEL, save_start

from dora.core.types import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.request import Completion, Request, SamplingParams
from dora.model.weights import initial_weights
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import Worker, WorkerMessages
from dora.runtime.rollout.engine_worker import run_engine
from dora.weights.store import WeightStore

WEIGHTS = initial_weights(MODEL, seed=0)
WAIT_S = 30
Message = TypeVar("Message")


class Pair:
    """Two engine processes and what they say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told: list[WorkerMessages] = [WorkerMessages(), WorkerMessages()]
        self.workers = [self._start(number) for number in range(2)]
        WeightStore(folder).publish(0, WEIGHTS)
        for number in range(2):
            ready = self.hear(number, m.WorkerReady)
            assert ready.pool == self.pool(number)
            self.tell(number, m.LoadWeights(0))
            self.hear(number, m.WeightsLoaded)

    def pool(self, number: int) -> Path:
        return self.folder / f"pool-{number}.kv"

    def tell(self, number: int, message: object) -> None:
        self.workers[number].send(message)

    def hear(self, number: int, kind: type[Message]) -> Message:
        """What an engine says next that is no beat; it must be of this kind."""
        while True:
            _, message = self._told[number].get(timeout=WAIT_S)
            if not isinstance(message, m.EngineReport):
                assert isinstance(message, kind), message
                return message

    def _start(self, number: int) -> Worker:
        spec = m.EngineSpec(
            model=save_start(self.folder / f"model-{number}"),
            weights=self.folder,
            pool=self.pool(number),
            max_rows=2,
            max_context=64,
            version_slots=2,
            kernels="eager",
            pace_s=0.005,
        )
        return Worker(f"engine {number}", run_engine, spec, self._told[number])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    for worker in made.workers:
        worker.kill()


def ask(sibling: int, max_tokens: int = 40) -> Request:
    return Request(
        RequestId(0, 0, sibling), GroupId(0, 0), tuple(range(20)), 0, sibling, SamplingParams(1.0, max_tokens)
    )


def answer(asked: Request) -> Completion:
    """By one engine without any pipe."""
    engine = Engine(MODEL, max_rows=1, max_context=64, version_slots=1, kernels="eager")
    engine.load(0, WEIGHTS)
    engine.submit([asked])
    while True:
        if completions := engine.step():
            return completions[0]


def test_requests_move_between_processes_and_keep_every_token(pair: Pair) -> None:
    asked = ask(0)
    pair.tell(0, m.SubmitRequests([asked]))
    for move, (source, destination) in enumerate([(0, 1), (1, 0), (0, 1)]):
        pair.tell(destination, m.ReserveMigration(move, asked, pair.pool(source), pair.folder, WAIT_S))
        place = pair.hear(destination, m.MigrationReserved)
        known = place.num_cached_blocks, place.cached_prefix_hash
        assert bool(place.num_cached_blocks) == (move > 0)
        pair.tell(source, m.StartExport(move, asked.id, pair.folder, *known, WAIT_S))
        received = pair.hear(destination, m.ImportFinished)
        assert (received.migration_id, received.request_id) == (move, asked.id)
        assert 0 <= received.stop_s < WAIT_S
        assert pair.hear(source, m.ExportFinished) == m.ExportFinished(move)
    (completion,) = pair.hear(1, m.RequestsCompleted).completions
    assert completion == answer(asked)


def test_an_engine_obeys_while_it_pauses_and_ends_when_it_may_leave(pair: Pair) -> None:
    asked = [ask(0), ask(1, max_tokens=4)]
    pair.tell(0, m.SubmitRequests([asked[0]]))
    pair.tell(0, m.PauseDecoding())
    pair.hear(0, m.DecodingPaused)
    pair.tell(0, m.SubmitRequests([asked[1]]))
    pair.tell(0, m.LoadWeights(7))
    assert "7.f32" in pair.hear(0, m.LoadRejected).reason
    pair.tell(0, m.SetDecodeOnly((asked[1].id,)))
    pair.tell(0, m.ResumeDecoding())
    first, second = pair.hear(0, m.RequestsCompleted), pair.hear(0, m.RequestsCompleted)
    assert [completion.id for completion in first.completions] == [asked[1].id]
    assert second.completions == [answer(asked[0])]
    pair.tell(0, m.Shutdown())
    pair.hear(0, m.WorkerExited)
    assert pair.workers[0].exit_reason == "engine 0 ended with exit code 0"


def test_a_move_that_is_cancelled_is_answered_by_both_sides(pair: Pair) -> None:
    asked = ask(0)
    pair.tell(0, m.PauseDecoding())
    pair.hear(0, m.DecodingPaused)
    pair.tell(0, m.SubmitRequests([asked]))
    pair.tell(1, m.ReserveMigration(5, asked, pair.pool(0), pair.folder, WAIT_S))
    pair.hear(1, m.MigrationReserved)
    pair.tell(
        0, m.StartExport(5, asked.id, pair.folder, 0, "", WAIT_S)
    )  # it waits for a row, and moves later
    pair.tell(0, m.CancelMigration(5))
    assert pair.hear(0, m.ExportFailed) == m.ExportFailed(5, "the migration was cancelled")
    pair.tell(1, m.CancelMigration(5))
    assert pair.hear(1, m.ImportFailed) == m.ImportFailed(5, "the migration was cancelled")
    pair.tell(0, m.ResumeDecoding())
    assert pair.hear(0, m.RequestsCompleted).completions == [answer(asked)]
