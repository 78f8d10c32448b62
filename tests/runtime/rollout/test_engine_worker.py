"""Two engine worker processes behind real pipes, without a driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
from tests.engine import tiny
from tests.engine.engine_cluster import EngineCluster
from tests.runtime.running import wait_until
from tests.runtime.tiny import MODEL, save_start

from dora.core.types import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.kv_transfer.handoff import HandoffSlots
from dora.engine.request import Completion, Request, SamplingParams
from dora.model.weights import initial_weights, parameter_shapes
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import Worker, WorkerMessages
from dora.runtime.rollout.engine_worker import OutputReporter, run_engine
from dora.weights.store import WeightStore

WEIGHTS = initial_weights(MODEL, seed=0)
WAIT_S = 60
Message = TypeVar("Message")


class Engines:
    """Engine processes and their messages."""

    def __init__(self, folder: Path, *paces_s: float) -> None:
        """Start an engine for each pace."""
        self.folder = folder
        self._messages = [WorkerMessages() for _ in paces_s]
        self.workers = [self._start(number, pace_s) for number, pace_s in enumerate(paces_s)]
        WeightStore(folder, shapes=parameter_shapes(MODEL)).publish(0, WEIGHTS)
        for number in range(len(paces_s)):
            ready = self.receive(number, m.WorkerReady)
            assert (ready.pool, ready.continues_outputs) == (self.pool(number), True)
            self.send(number, m.LoadWeights(0))
            self.receive(number, m.WeightsLoaded)

    def pool(self, number: int) -> Path:
        return self.folder / f"pool-{number}.kv"

    def send(self, number: int, message: object) -> None:
        self.workers[number].send(message)

    def receive(self, number: int, kind: type[Message]) -> Message:
        """The next message of an engine that is not a report; it must be of this kind."""
        while True:
            _, message = self._messages[number].get(timeout=WAIT_S)
            if not isinstance(message, m.EngineReport | m.OutputsReported):
                assert isinstance(message, kind), message
                return message

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()

    def _start(self, number: int, pace_s: float) -> Worker:
        spec = m.EngineSpec(
            model=save_start(self.folder / f"model-{number}"),
            weights=self.folder,
            pool=self.pool(number),
            max_rows=2,
            max_context=64,
            version_slots=2,
            kernels="eager",
            pace_s=pace_s,
        )
        return Worker(f"engine {number}", run_engine, spec, self._messages[number])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Engines]:
    with closing(Engines(tmp_path, 0.005, 0.005)) as pair:
        yield pair


def make_request(sibling: int, max_tokens: int = 40) -> Request:
    return Request(
        RequestId(0, 0, sibling), GroupId(0, 0), tuple(range(20)), 0, sibling, SamplingParams(1.0, max_tokens)
    )


def completion_of(request: Request) -> Completion:
    """The completion of one engine in this process, without the columns that a run does not store."""
    engine = Engine(MODEL, max_rows=1, max_context=64, version_slots=1, kernels="eager")
    engine.load(0, WEIGHTS)
    engine.submit([request])
    while True:
        if completions := engine.step():
            return completions[0].without_filtered_logprobs()


def test_a_request_that_migrates_between_processes_keeps_every_token(tmp_path: Path) -> None:
    """The first two engines would need 6 s for it, so that it does not finish between its migrations."""
    request, slots = make_request(0), HandoffSlots(tmp_path)
    with closing(Engines(tmp_path, 0.15, 0.15, 0.0)) as engines:
        engines.send(0, m.SubmitRequests([request]))
        for migration, (source, destination) in enumerate([(0, 1), (1, 0), (0, 2)]):
            slot, pool = slots.allocate(migration, request), engines.pool(source)
            engines.send(destination, m.ReserveMigration(migration, request, pool, slot, WAIT_S))
            engines.send(source, m.StartExport(migration, request.id, slot, WAIT_S))
            imported = engines.receive(destination, m.ImportFinished)
            assert (imported.migration_id, imported.request_id) == (migration, request.id)
            assert 0 <= imported.stop_s < WAIT_S
            assert engines.receive(source, m.ExportFinished) == m.ExportFinished(migration)
        (completion,) = engines.receive(2, m.RequestsCompleted).completions
        assert completion == completion_of(request)


def test_a_paused_engine_handles_messages_and_shuts_down(pair: Engines) -> None:
    requests = [make_request(0), make_request(1, max_tokens=4)]
    pair.send(0, m.PauseDecoding())
    pair.receive(0, m.DecodingPaused)
    pair.send(0, m.SubmitRequests(requests))
    pair.send(0, m.LoadWeights(7))
    assert "7.safetensors" in pair.receive(0, m.LoadRejected).reason
    pair.send(0, m.SetDecodeOnly((requests[1].id,)))
    pair.send(0, m.ResumeDecoding())
    first, second = pair.receive(0, m.RequestsCompleted), pair.receive(0, m.RequestsCompleted)
    assert [completion.id for completion in first.completions] == [requests[1].id]
    assert second.completions == [completion_of(requests[0])]
    pair.send(0, m.Shutdown())
    pair.receive(0, m.WorkerExited)
    assert pair.workers[0].exit_reason == "engine 0 exited with code 0"


def test_both_sides_reply_to_a_cancelled_migration(pair: Engines) -> None:
    request = make_request(0)
    pair.send(0, m.PauseDecoding())
    pair.receive(0, m.DecodingPaused)
    pair.send(0, m.SubmitRequests([request]))
    slot = HandoffSlots(pair.folder).allocate(5, request)
    pair.send(1, m.ReserveMigration(5, request, pair.pool(0), slot, WAIT_S))
    # The paused request has no row yet, so the export waits.
    pair.send(0, m.StartExport(5, request.id, slot, WAIT_S))
    pair.send(0, m.CancelMigration(5))
    assert pair.receive(0, m.ExportFailed) == m.ExportFailed(5, "the migration was cancelled")
    pair.send(1, m.CancelMigration(5))
    assert pair.receive(1, m.ImportFailed) == m.ImportFailed(5, "the migration was cancelled")
    pair.send(0, m.ResumeDecoding())
    assert pair.receive(0, m.RequestsCompleted).completions == [completion_of(request)]


def test_the_output_of_a_request_that_comes_again_is_reported_from_its_first_token(tmp_path: Path) -> None:
    """It is here, starts again elsewhere and migrates here, within one interval of reports."""
    engines = EngineCluster(tmp_path)
    here, elsewhere = engines.add_engine("here"), engines.add_engine("elsewhere")
    reporter, request = OutputReporter(here, 3600.0), tiny.make_request(0, prompt_length=20)
    here.submit([request])
    engines.step("here", 5)
    (part,) = reporter.new_parts({request.id})
    assert (part.start, len(part.token_ids)) == (0, 5)
    here.abort([request.id])
    elsewhere.submit([request])
    engines.step("elsewhere", 2)
    slot = HandoffSlots(tmp_path).allocate(0, request)
    reporter.on_message(m.ReserveMigration(0, request, None, slot, WAIT_S))
    engines.migrate(request, "elsewhere", "here")
    engines.step("here")
    (part,) = reporter.new_parts({request.id})
    assert (part.start, len(part.token_ids)) == (0, 3)


SLOW_ENGINE = """
import time
from contextlib import closing
from pathlib import Path
from dora.engine.engine import Engine
from dora.engine.interface import Capabilities
from dora.model.pretrained import load_config

class Slow(Engine):
    capabilities = Capabilities()

    def __init__(self, *, model, max_rows, max_context, version_slots, device, dtype, folder):
        super().__init__(load_config(Path(model)), max_rows=max_rows, max_context=max_context,
                         version_slots=version_slots, device=device, dtype=dtype, kernels="eager")
        self.folder = Path(folder)

    def wait_for(self, name):
        (self.folder / f"{name} begun").touch()
        while not (self.folder / name).exists():
            time.sleep(0.01)

    def warm_up(self):
        self.wait_for("warm-up")
        super().warm_up()

    def load(self, version, source):
        self.wait_for("load")
        return super().load(version, source)
"""


def test_an_engine_sends_heartbeats_while_it_warms_up_or_a_load_blocks_it(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_ENGINE)
    WeightStore(tmp_path, shapes=parameter_shapes(MODEL)).publish(0, WEIGHTS)
    messages = WorkerMessages()
    spec = m.EngineSpec(
        model=save_start(tmp_path / "model"),
        weights=tmp_path,
        pool=tmp_path / "pool.kv",
        max_rows=2,
        max_context=64,
        version_slots=1,
        kernels="eager",
        pace_s=0.0,
        backend=f"{tmp_path / 'slow.py'}:Slow",
        backend_options={"folder": str(tmp_path)},
    )
    worker = Worker("engine 0", run_engine, spec, messages)
    try:
        worker.send(m.LoadWeights(0))
        for blocked, reply in (("warm-up", m.WorkerReady), ("load", m.WeightsLoaded)):
            wait_until((tmp_path / f"{blocked} begun").exists)
            for _ in range(2):
                worker.has_sent = False
                wait_until(lambda: worker.has_sent)
            assert messages.empty()
            (tmp_path / blocked).touch()
            assert isinstance(messages.get(timeout=WAIT_S)[1], reply)
    finally:
        worker.kill()
