from hypothesis import given
from hypothesis import strategies as st

from dora.engine.blocks import BLOCK_SIZE, BlockManager, num_blocks_for

NUM_BLOCKS = 24


@given(st.data())
def test_blocks_behave_like_sets_of_pages(data: st.DataObject) -> None:
    """The model: a table is a list of pages; a page is in use while a table has it."""
    manager = BlockManager(NUM_BLOCKS)
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        used = {page for table in tables for page in table}
        action = data.draw(st.sampled_from(["allocate", "fork", "release"]))
        if action == "allocate":
            table = manager.allocate(data.draw(st.integers(0, manager.num_free)))
            assert used.isdisjoint(table)
            assert len(set(table)) == len(table)
            tables.append(table)
        elif tables and action == "fork":
            source = data.draw(st.sampled_from(tables))
            num_tokens = data.draw(st.integers(0, len(source) * BLOCK_SIZE))
            num_full, num_held = num_tokens // BLOCK_SIZE, num_blocks_for(num_tokens)
            if manager.num_free < num_held - num_full:
                continue
            num_blocks = data.draw(st.integers(num_held, num_full + manager.num_free))
            table, copy = manager.fork(source, num_tokens, num_blocks)
            assert len(table) == num_blocks
            assert table[:num_full] == source[:num_full]
            assert used.isdisjoint(table[num_full:])
            assert copy == ((source[num_full], table[num_full]) if num_tokens % BLOCK_SIZE else None)
            tables.append(table)
        elif tables:
            manager.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        manager.check(tables)
        assert manager.num_free == NUM_BLOCKS - len({page for table in tables for page in table})
    for table in tables:
        manager.release(table)
    manager.check([])
    assert manager.num_free == NUM_BLOCKS
