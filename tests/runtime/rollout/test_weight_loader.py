"""Weight loads of an engine in this process: synchronous, and deferred with a prefetcher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runtime.tiny import MODEL

from dora.core.types import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.request import EngineError, Request, SamplingParams
from dora.model.weights import initial_weights, parameter_shapes, weight_digest
from dora.runtime.process.messages import LoadRejected, WeightsLoaded
from dora.runtime.rollout.engine_worker import WeightLoader
from dora.weights.store import Prefetcher, WeightStore


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore(tmp_path, shapes=parameter_shapes(MODEL))
    for version in range(3):
        store.publish(version, initial_weights(MODEL, seed=version))
    return store


def make_engine() -> Engine:
    return Engine(MODEL, max_rows=2, max_context=40, version_slots=2, kernels="eager")


def deferred(store: WeightStore) -> tuple[Engine, WeightLoader]:
    """An engine whose loads are deferred."""
    engine = make_engine()
    return engine, WeightLoader(engine, store, Prefetcher(store, is_pinned=False))


def request(version: int) -> Request:
    sampling = SamplingParams(temperature=1.0, max_tokens=20)
    return Request(RequestId(0, 0, 0), GroupId(0, 0), (1, 2, 3), version, seed=1, sampling=sampling)


def loaded(loader: WeightLoader) -> WeightsLoaded:
    """Wait for the reply to the load in progress."""
    while not (replies := loader.poll()):
        assert loader.is_busy
    (reply,) = replies
    assert isinstance(reply, WeightsLoaded)
    return reply


def test_a_load_without_prefetcher_is_finished_at_once(store: WeightStore) -> None:
    engine = make_engine()
    loader = WeightLoader(engine, store, None)
    loader.prefetch(0)
    loader.load(0)
    assert not loader.is_busy
    assert loader.poll() == [WeightsLoaded(0, weight_digest(initial_weights(MODEL, seed=0)))]
    assert loader.poll() == []


def test_a_deferred_version_is_active_once_its_digest_is_known(store: WeightStore) -> None:
    engine, loader = deferred(store)
    loader.prefetch(1)
    loader.load(1)
    assert engine.versions == {}
    assert loaded(loader) == WeightsLoaded(1, weight_digest(initial_weights(MODEL, seed=1)))
    assert engine.versions.keys() == {1}


def test_the_digest_is_of_the_bytes_in_the_engine(store: WeightStore) -> None:
    engine, loader = deferred(store)
    copy_to_slot = engine.copy_to_slot

    def copy_damaged(version: int, source: torch.Tensor) -> torch.Tensor:
        weights = copy_to_slot(version, source)
        weights[3] += 1.0
        return weights

    engine.copy_to_slot = copy_damaged  # type: ignore[method-assign]
    loader.prefetch(1)
    loader.load(1)
    assert loaded(loader).digest != weight_digest(initial_weights(MODEL, seed=1))


def test_a_load_reports_a_pause_only_if_rows_were_decoding(store: WeightStore) -> None:
    engine, loader = deferred(store)
    loader.load(0)
    assert loaded(loader).stop_s == 0.0
    engine.submit([request(0)])
    loader.load(1)
    assert loaded(loader).stop_s > 0.0


def test_rows_decode_during_a_deferred_load_and_give_the_same_tokens(store: WeightStore) -> None:
    answers = []
    for is_deferred in (False, True):
        engine, loader = deferred(store)
        if not is_deferred:
            loader = WeightLoader(engine, store)
        loader.load(0)
        loader.wait_for({0})
        engine.submit([request(0)])
        engine.step()
        loader.load(1)
        while not (done := engine.step()):
            engine.check()
        answers.append(done[0].token_ids.tolist())
    assert answers[0] == answers[1]


def test_requests_for_a_version_wait_until_it_is_loaded(store: WeightStore) -> None:
    engine, loader = deferred(store)
    loader.load(2)
    loader.wait_for({0, 1})
    assert loader.is_busy
    loader.wait_for({2})
    engine.submit([request(2)])
    assert [reply.version for reply in loader.poll() if isinstance(reply, WeightsLoaded)] == [2]


def test_a_version_may_be_dropped_and_loaded_again_before_the_reply(store: WeightStore) -> None:
    engine, loader = deferred(store)
    for _ in range(3):
        loader.load(0)
        loader.drop(0)
    loader.load(0)
    loader.load(1)
    loader.wait_for({1})
    assert engine.versions.keys() == {0, 1}
    assert len(loader.poll()) == 5
    engine.check()


def test_a_missing_version_is_rejected_and_its_slot_is_free(store: WeightStore) -> None:
    _, loader = deferred(store)
    loader.prefetch(7)
    loader.load(7)
    (reply,) = loader.poll()
    assert isinstance(reply, LoadRejected)
    loader.drop(7)
    loader.load(0)
    assert loaded(loader).version == 0


def test_a_version_without_a_digest_takes_no_requests() -> None:
    engine = make_engine()
    engine.copy_to_slot(0, initial_weights(MODEL, seed=0))
    engine.check()
    with pytest.raises(EngineError, match="version 0"):
        engine.submit([request(0)])
    with pytest.raises(EngineError, match="loaded already"):
        engine.load(0, initial_weights(MODEL, seed=0))
