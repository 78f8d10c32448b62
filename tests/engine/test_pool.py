import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.handover.pool import add_up, as_blocks, block_bytes, copy_blocks, make_pool, open_pool

tables = st.lists(st.integers(0, 19), unique=True, max_size=20)


@given(tables, st.randoms(use_true_random=False))
def test_blocks_are_copied_and_added_up_wherever_they_lie(sources: list[int], source: random.Random) -> None:
    noise = np.random.default_rng(0)
    peer, pool = (noise.integers(0, 2**64, (20, 6), np.uint64) for _ in range(2))
    targets = sorted(range(20), key=lambda _: source.random())[: len(sources)]
    expected = pool.copy()
    expected[targets] = peer[sources]
    copy_blocks(peer, sources, pool, targets)
    assert (pool == expected).all()
    assert add_up(pool, targets) == [sum(map(int, peer[block])) % 2**64 for block in sources]


def test_an_engine_reads_what_another_one_writes(tmp_path: Path) -> None:
    made = as_blocks(make_pool(tmp_path / "pool", 3 * 2 * 4 * 4), 3)
    found = open_pool(tmp_path / "pool", block_bytes(made))
    made[1] = 25
    assert found.shape == (3, 4)
    assert (found[1] == 25).all()
    assert not found.flags.writeable
    with pytest.raises(FileNotFoundError):
        open_pool(tmp_path / "elsewhere", 32)
