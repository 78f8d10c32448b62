"""What only real processes can do wrong: bytes that change on their way, calls that never return."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.runtime.tiny import write_task

from dora import settings
from dora.core.actions import Load, Publish
from dora.core.events import EngineLost, Event, Loaded, Published
from dora.errors import RunError
from dora.runtime.evaluate import evaluate
from dora.runtime.local import LocalHands
from dora.runtime.plan import Plan


@pytest.fixture
def hands(task: Path, tmp_path: Path) -> Iterator[LocalHands]:
    made = LocalHands(Plan.make(settings.read(task), tmp_path), notice=print)
    made.wait_until_ready()
    yield made
    made.close()


def hear(hands: LocalHands) -> Event:
    fact = hands.next_fact(hands.now + 30)
    assert fact is not None
    return fact


def test_an_engine_that_holds_other_bytes_than_the_published_ones_is_lost(hands: LocalHands) -> None:
    hands.perform(Publish(0))
    assert isinstance(hear(hands), Published)
    hands.perform(Load(0, 0))
    assert isinstance(hear(hands), Loaded)
    stored = hands.weights.folder / "0.f32"
    stored.write_bytes(bytes(stored.stat().st_size))
    hands.perform(Load(1, 0))
    assert hear(hands) == EngineLost(1, "its bytes of version 0 are not the published ones")
    assert list(hands.engines) == [0]
    hands.perform(Load(1, 0))  # an order to an engine that is lost goes nowhere
    hands.engines[0].process.kill()
    assert hear(hands) == EngineLost(0, "engine 0 was killed by SIGKILL")
    with pytest.raises(RunError, match="the last engine is lost: engine 0 was killed by SIGKILL"):
        hear(hands)


def test_evaluation_leaves_no_fact_of_a_slow_engine_behind(tmp_path: Path) -> None:
    config = settings.read(write_task(tmp_path), ["eval.source=prompts.jsonl", "eval.num_prompts=1"])
    hands = LocalHands(Plan.make(config, tmp_path), notice=print)
    try:
        hands.wait_until_ready()
        hands.perform(Publish(0))
        assert isinstance(hear(hands), Published)
        slow = psutil.Process(hands.engines[1].process.pid)
        slow.suspend()
        resumed = threading.Timer(1.0, slow.resume)
        resumed.start()
        assert evaluate(hands, 0, {}) is not None
        resumed.join()
        assert [hands.next_fact(hands.now + 0.5)] == [None]
    finally:
        hands.close()
