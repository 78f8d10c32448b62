"""An engine of a run has the KV it is given; what does not fit waits, and is answered alike."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.tiny import MODEL

from dora.config import load
from dora.core.types import RequestId
from dora.engine.episodes import EpisodeEngine
from dora.model.weights import initial_weights
from dora.runtime.rollout.engine_worker import _make_engine
from dora.runtime.run_setup import RunSetup


def answers(task: Path, folder: Path, *changes: str) -> tuple[dict[RequestId, list[int]], int, int]:
    """Tokens of 16 answers by one engine, how often one was swapped out, and the bytes planned for KV."""
    folder.mkdir()
    plan = RunSetup.make(load.read_config(task, ["sampling.max_response_length=56", *changes]), folder)
    engine = _make_engine(plan.engine_spec(folder, 0))
    assert isinstance(engine, EpisodeEngine)
    assert (folder / "pool-0.kv").stat().st_size == plan.pool_bytes
    engine.load(0, initial_weights(MODEL, seed=0))
    engine.submit(plan.requests([RequestId(0, row, sibling) for row in range(4) for sibling in range(4)], 0))
    found: dict[RequestId, list[int]] = {}
    while len(found) < 16:
        found |= {done.id: done.token_ids for done in engine.step()}
    return found, engine.num_swapped, plan.kv_bytes


def test_answers_that_do_not_fit_wait_and_are_the_same(task: Path, tmp_path: Path) -> None:
    roomy, num_swapped, num_bytes = answers(task, tmp_path / "roomy")
    assert num_swapped == 0
    tight, num_swapped, num_tight = answers(task, tmp_path / "tight", "engine.num_kv_blocks=5")
    assert num_swapped > 0
    assert (tight, num_tight) == (roomy, num_bytes // 4)  # 5 of 4 rows x (4 + 1)
