"""Who owns which KV block.

A block holds the keys and values of BLOCK_SIZE tokens in every layer. Full blocks of a
prompt are shared by counting references; the block a prompt ends in is copied, for its
owners will write different tokens behind the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

BLOCK_SIZE = 16  # tokens


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class BlockManager:
    """Reference counts and the free list of a pool of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._num_references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks; the caller has made sure that there are enough."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked for, {self.num_free} free"
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def fork(
        self, source: Sequence[int], num_tokens: int, num_blocks: int
    ) -> tuple[list[int], tuple[int, int] | None]:
        """A table of `num_blocks` blocks that begins with the `num_tokens` tokens held in `source`.

        Returns the table and, where the tokens end inside a block, the copy (from, to) to make.
        """
        num_full, rest = divmod(num_tokens, BLOCK_SIZE)
        shared = list(source[:num_full])
        for block in shared:
            self._num_references[block] += 1
        own = self.allocate(num_blocks - num_full)
        return shared + own, (source[num_full], own[0]) if rest else None

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block; those without any are free again."""
        for block in blocks:
            self._num_references[block] -= 1
            assert self._num_references[block] >= 0, f"block {block} released once too often"
            if self._num_references[block] == 0:
                self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Every block is either free or held by exactly as many `tables` as its count says."""
        held = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        for block, count in enumerate(self._num_references):
            assert held[block] == count, f"block {block}: {held[block]} owners, {count} references"
            assert free[block] == (count == 0), f"block {block} is {free[block]} times free, {count} used"
