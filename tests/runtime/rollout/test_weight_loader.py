"""How an engine takes versions, in one process: at once, or while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.tiny import MODEL

from dora.core.types import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.request import EngineError, Request, SamplingParams
from dora.model.weights import initial_weights, weight_digest
from dora.runtime.process.messages import LoadRejected, WeightsLoaded
from dora.runtime.rollout.engine_worker import WeightLoader
from dora.weights.store import Prefetcher, WeightStore


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore(tmp_path)
    for version in range(3):
        store.publish(version, initial_weights(MODEL, seed=version))
    return store


def make_engine(**settings: Any) -> Engine:
    return Engine(MODEL, max_rows=2, max_context=40, version_slots=2, kernels="eager", **settings)


def deferred(store: WeightStore, engine: Engine) -> WeightLoader:
    return WeightLoader(engine, store, Prefetcher(store, is_pinned=False))


def request(version: int) -> Request:
    sampling = SamplingParams(temperature=1.0, max_tokens=20)
    return Request(RequestId(0, 0, 0), GroupId(0, 0), (1, 2, 3), version, seed=1, sampling=sampling)


def told(taking: WeightLoader) -> WeightsLoaded:
    """What is said of the load that is under way, when it is said."""
    while not (replies := taking.poll()):
        assert taking.is_busy
    (reply,) = replies
    assert isinstance(reply, WeightsLoaded)
    return reply


def test_a_load_at_once_is_told_at_once(store: WeightStore) -> None:
    engine = make_engine()
    taking = WeightLoader(engine, store, None)
    taking.prefetch(0)
    taking.load(0)
    assert not taking.is_busy
    assert taking.poll() == [WeightsLoaded(0, weight_digest(initial_weights(MODEL, seed=0)))]
    assert taking.poll() == []


def test_a_deferred_version_is_held_once_its_bytes_are_digested(store: WeightStore) -> None:
    engine = make_engine()
    taking = deferred(store, engine)
    taking.prefetch(1)
    taking.load(1)
    assert engine.versions == {}
    assert told(taking) == WeightsLoaded(1, weight_digest(initial_weights(MODEL, seed=1)))
    assert engine.versions.keys() == {1}


def test_the_digest_is_of_the_bytes_in_the_engine(store: WeightStore) -> None:
    engine = make_engine()
    taking = deferred(store, engine)
    right = engine.copy_to_slot

    def damage(version: int, source: torch.Tensor) -> torch.Tensor:
        placed = right(version, source)
        placed[3] += 1.0
        return placed

    engine.copy_to_slot = damage  # type: ignore[method-assign]
    taking.prefetch(1)
    taking.load(1)
    assert told(taking).digest != weight_digest(initial_weights(MODEL, seed=1))


def test_rows_stand_still_for_a_load_only_where_there_are_any(store: WeightStore) -> None:
    engine = make_engine()
    taking = deferred(store, engine)
    taking.load(0)
    assert told(taking).stop_s == 0.0
    engine.submit([request(0)])
    taking.load(1)
    assert told(taking).stop_s > 0.0


def test_rows_decode_on_while_a_version_is_digested_and_give_the_same_tokens(store: WeightStore) -> None:
    answers = []
    for is_deferred in (False, True):
        engine = make_engine()
        loads = deferred(store, engine) if is_deferred else WeightLoader(engine, store, None)
        loads.load(0)
        loads.wait_for({0})
        engine.submit([request(0)])
        engine.step()
        loads.load(1)
        while not (done := engine.step()):
            engine.check()
        answers.append(done[0].token_ids)
    assert answers[0] == answers[1]


def test_whoever_asks_for_a_version_waits_until_it_is_held(store: WeightStore) -> None:
    engine = make_engine()
    taking = deferred(store, engine)
    taking.load(2)
    taking.wait_for({0, 1})
    assert taking.is_busy
    taking.wait_for({2})
    engine.submit([request(2)])
    assert [reply.version for reply in taking.poll() if isinstance(reply, WeightsLoaded)] == [2]


def test_a_version_may_be_dropped_and_loaded_again_before_its_load_is_told(store: WeightStore) -> None:
    engine = make_engine()
    taking = deferred(store, engine)
    for _ in range(3):
        taking.load(0)
        taking.drop(0)
    taking.load(0)
    taking.load(1)
    taking.wait_for({1})
    assert engine.versions.keys() == {0, 1}
    assert len(taking.poll()) == 5
    engine.check()


def test_a_version_that_is_not_there_is_refused_and_leaves_nothing(store: WeightStore) -> None:
    engine = make_engine()
    taking = deferred(store, engine)
    taking.prefetch(7)
    taking.load(7)
    (reply,) = taking.poll()
    assert isinstance(reply, LoadRejected)
    taking.drop(7)
    taking.load(0)
    assert told(taking).version == 0


def test_nothing_can_be_asked_of_a_version_that_is_only_placed() -> None:
    engine = make_engine()
    engine.copy_to_slot(0, initial_weights(MODEL, seed=0))
    engine.check()
    with pytest.raises(EngineError, match="version 0"):
        engine.submit([request(0)])
    with pytest.raises(EngineError, match="loaded already"):
        engine.load(0, initial_weights(MODEL, seed=0))
