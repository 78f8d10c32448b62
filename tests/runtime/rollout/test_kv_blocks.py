"""An engine with few KV blocks swaps requests out, and gives the same tokens."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.tiny import MODEL

from dora.config import load
from dora.core.types import RequestId
from dora.engine.engine import Engine
from dora.model.weights import initial_weights
from dora.runtime.rollout.engine_worker import build_engine
from dora.runtime.run_setup import RunSetup


def answers(task: Path, folder: Path, *changes: str) -> tuple[dict[RequestId, list[int]], int, int]:
    """Tokens of 16 answers of one engine, how many were swapped out, and the bytes of its KV."""
    folder.mkdir()
    setup = RunSetup.make(load.read_config(task, ["sampling.max_response_length=56", *changes]), folder)
    engine = build_engine(setup.engine_spec(folder, 0))
    assert isinstance(engine, Engine)
    assert (folder / "pool-0.kv").stat().st_size == setup.pool_bytes
    engine.load(0, initial_weights(MODEL, seed=0))
    engine.submit(setup.requests([RequestId(0, row, sibling) for row in range(4) for sibling in range(4)], 0))
    tokens: dict[RequestId, list[int]] = {}
    while len(tokens) < 16:
        tokens |= {completion.id: completion.token_ids.tolist() for completion in engine.step()}
    return tokens, engine.num_swapped, setup.kv_bytes


def test_requests_that_are_swapped_out_give_the_same_tokens(task: Path, tmp_path: Path) -> None:
    roomy, num_swapped, num_bytes = answers(task, tmp_path / "roomy")
    assert num_swapped == 0
    tight, num_swapped, num_tight = answers(task, tmp_path / "tight", "engine.num_kv_blocks=5")
    assert num_swapped > 0
    assert (tight, num_tight) == (roomy, num_bytes // 4)  # 5 of 4 rows x (4 + 1)


def test_an_engine_whose_requests_never_migrate_shares_no_kv(task: Path, tmp_path: Path) -> None:
    """So a server has no KV connector, which costs time in each step."""
    for placement, name in (("static", None), ("dynamic", "pool-0.kv")):
        setup = RunSetup.make(load.read_config(task, [f"orchestrator.placement={placement}"]), tmp_path)
        pool = setup.engine_spec(tmp_path, 0).pool
        assert (pool and pool.name, setup.pool_bytes > 0) == (name, name is not None)
