"""KV block pools in files."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.engine.kv_transfer.pool import (
    MappedPool,
    bytes_per_block,
    checksum_blocks,
    copy_blocks,
    create_pool,
    view_as_blocks,
)

block_tables = st.lists(st.integers(0, 19), unique=True, max_size=20)


@given(block_tables, st.randoms(use_true_random=False))
def test_blocks_are_copied_and_checksummed_in_any_order(sources: list[int], source: random.Random) -> None:
    noise = np.random.default_rng(0)
    peer, pool = (noise.integers(0, 2**64, (20, 6), np.uint64) for _ in range(2))
    targets = sorted(range(20), key=lambda _: source.random())[: len(sources)]
    expected = pool.copy()
    expected[targets] = peer[sources]
    checksums = copy_blocks(peer, sources, pool, targets).tolist()
    assert (pool == expected).all()
    assert checksums == [sum(map(int, peer[block])) % 2**64 for block in sources]
    assert checksum_blocks(pool, targets).tolist() == checksums


def test_an_engine_reads_what_another_one_writes(tmp_path: Path) -> None:
    written = view_as_blocks(create_pool(tmp_path / "pool", 3 * 2 * 4 * 4), 3)
    mapped = MappedPool(tmp_path / "pool", bytes_per_block(written)).blocks
    written[1] = 25
    assert mapped.shape == (3, 4)
    assert (mapped[1] == 25).all()
    assert not mapped.flags.writeable
    with pytest.raises(FileNotFoundError):
        MappedPool(tmp_path / "missing", 32)
