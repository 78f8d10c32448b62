"""Who owns which KV block, and which prompt the blocks that nobody owns still hold.

A block holds the keys and values of BLOCK_SIZE tokens in every layer. Full blocks of a prompt
are shared by counting references and have a name: a hash of all tokens up to their end, seeded
by the model and the weights, so that KV of one version can never serve another. A named block
without owners stays findable until the free list is empty; the one given up longest ago goes
first. The block a prompt ends in is copied, for its owners write different tokens behind it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

BLOCK_SIZE = 16  # tokens


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def kv_seed(model_digest: str, weight_digest: str) -> str:
    """What the names of all blocks begin with that these weights have computed."""
    return blake2b(f"{model_digest}/{weight_digest}".encode(), digest_size=8).hexdigest()


@lru_cache(maxsize=64)
def chain_hashes(seed: str, token_ids: tuple[int, ...]) -> tuple[str, ...]:
    """A name for every full block of `token_ids`: the seed, and a hash of it and all tokens so far."""
    ids, chain = array("q", token_ids), blake2b(seed.encode(), digest_size=16)
    hashes = []
    for stop in range(BLOCK_SIZE, len(ids) + 1, BLOCK_SIZE):
        chain.update(ids[stop - BLOCK_SIZE : stop].tobytes())
        hashes.append(seed + chain.hexdigest())
    return tuple(hashes)


class BlockManager:
    """Reference counts, names and the free list of a pool of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._num_references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # named blocks without owners, the longest unused first
        self._by_name: dict[str, int] = {}
        self._names: dict[int, str] = {}  # the inverse

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, those included that would lose their name by it."""
        return len(self._free) + len(self._cached)

    def num_free_beside(self, shared: Iterable[int]) -> int:
        """Blocks that can be allocated once `shared`, some of which nobody may own, have an owner."""
        return self.num_free - sum(self._num_references[block] == 0 for block in shared)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks; the caller has made sure that there are enough."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked for, {self.num_free} free"
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these blocks."""
        for block in blocks:
            self._num_references[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block; those without any are free again.

        The last block of a chain is given up first, for it is worth nothing without those before it.
        """
        for block in reversed(blocks):
            self._num_references[block] -= 1
            assert self._num_references[block] >= 0, f"block {block} released once too often"
            if self._num_references[block] == 0:
                if block in self._names:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def name(self, blocks: Iterable[int], hashes: Iterable[str]) -> None:
        """Make blocks findable that hold what their hashes say; a name that is known stays where it is."""
        for block, name in zip(blocks, hashes, strict=True):
            if name not in self._by_name and block not in self._names:
                self._by_name[name], self._names[block] = block, name

    def find(self, hashes: Iterable[str]) -> list[int]:
        """The blocks of the longest known beginning of a chain."""
        found = []
        for name in hashes:
            if name not in self._by_name:
                break
            found.append(self._by_name[name])
        return found

    def forget(self, seed: str) -> None:
        """Take the names that begin with `seed`; blocks that nobody owns are plainly free again."""
        for name in [name for name in self._by_name if name.startswith(seed)]:
            block = self._by_name.pop(name)
            del self._names[block]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Every block is free, cached or held by exactly as many `tables` as its count says."""
        held = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        for block, count in enumerate(self._num_references):
            assert held[block] == count, f"block {block}: {held[block]} owners, {count} references"
            num_places = free[block] + (block in self._cached) + (count > 0)
            assert num_places == 1, f"block {block} is in {num_places} of free, cached and used"
        assert self._cached.keys() <= self._names.keys(), "a cached block has no name"
        assert not free.keys() & self._names.keys(), "a free block has a name"
        assert {name: block for block, name in self._names.items()} == self._by_name, "names disagree"

    def _evict(self) -> int:
        """The cached block given up longest ago; it loses its name."""
        block = next(iter(self._cached))
        del self._cached[block], self._by_name[self._names.pop(block)]
        return block
