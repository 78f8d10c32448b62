"""Reference counts and the prefix cache of the KV blocks.

A block holds the keys and values of BLOCK_SIZE tokens in every layer. Full blocks of a prompt are shared
by reference count and registered under a hash of all tokens up to their end. The hash is seeded by the
model and the weights, so KV of one version never serves another. A registered block without references
stays in the cache until the free list is empty; then the least recently released one is evicted. The
partial block at the end of a prompt is copied, because its owners write different tokens behind it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

BLOCK_SIZE = 16  # tokens
_STAGING_BYTES = 64 * 2**20  # of one engine, for all its exports in progress
_MIN_STAGING_BLOCKS = 8


def num_staging_blocks(num_bytes: int, num_blocks: int) -> int:
    """Blocks in the staging area of an engine whose KV is private: `num_blocks` blocks of `num_bytes`."""
    return min(num_blocks, max(_MIN_STAGING_BLOCKS, _STAGING_BYTES // num_bytes))


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def hash_seed(model_digest: str, weight_digest: str) -> str:
    """Prefix of the hashes of all blocks that these weights compute."""
    return blake2b(f"{model_digest}/{weight_digest}".encode(), digest_size=8).hexdigest()


@lru_cache(maxsize=64)
def block_hashes(seed: str, token_ids: tuple[int, ...]) -> tuple[str, ...]:
    """A hash for every full block of `token_ids`: the seed, then a digest of it and all tokens so far."""
    ids, digest = array("q", token_ids), blake2b(seed.encode(), digest_size=16)
    hashes = []
    for stop in range(BLOCK_SIZE, len(ids) + 1, BLOCK_SIZE):
        digest.update(ids[stop - BLOCK_SIZE : stop].tobytes())
        hashes.append(seed + digest.hexdigest())
    return tuple(hashes)


class BlockManager:
    """A pool of `num_blocks` blocks: each is free, cached (registered, no references) or in use."""

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # in order of release, the next one to evict first
        self._block_of: dict[str, int] = {}  # by hash
        self._hash_of: dict[int, str] = {}  # the inverse

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones that would be evicted."""
        return len(self._free) + len(self._cached)

    def num_free_after_sharing(self, blocks: Iterable[int]) -> int:
        """Blocks that could be allocated after `share(blocks)`, which takes cached ones out of the cache."""
        return self.num_free - sum(self._ref_counts[block] == 0 for block in blocks)

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks; the caller has checked `num_free`."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks requested, {self.num_free} free"
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self._ref_counts[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block; a block without references is cached if registered, else free.

        Blocks are released last to first, because a block is useless without those before it.
        """
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} released once too often"
            if self._ref_counts[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, blocks: Iterable[int], hashes: Iterable[str]) -> None:
        """Make blocks findable by the hash of their content; a hash that is registered keeps its block."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash not in self._block_of and block not in self._hash_of:
                self._block_of[block_hash], self._hash_of[block] = block, block_hash

    def lookup(self, hashes: Iterable[str]) -> list[int]:
        """The blocks of the longest registered prefix of `hashes`."""
        found = []
        for block_hash in hashes:
            if block_hash not in self._block_of:
                break
            found.append(self._block_of[block_hash])
        return found

    def unregister(self, seed: str) -> None:
        """Remove all hashes that begin with `seed`; their cached blocks become free."""
        for block_hash in [x for x in self._block_of if x.startswith(seed)]:
            block = self._block_of.pop(block_hash)
            del self._hash_of[block]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that reference counts match `block_tables` and every block is free, cached or in use."""
        used = Counter(block for table in block_tables for block in table)
        free = Counter(self._free)
        for block, count in enumerate(self._ref_counts):
            assert used[block] == count, f"block {block}: {used[block]} owners, {count} references"
            num_states = free[block] + (block in self._cached) + (count > 0)
            assert num_states == 1, f"block {block} is in {num_states} of free, cached and used"
        assert self._cached.keys() <= self._hash_of.keys(), "a cached block has no hash"
        assert not free.keys() & self._hash_of.keys(), "a free block has a hash"
        assert {x: block for block, x in self._hash_of.items()} == self._block_of, "hash tables disagree"

    def _evict(self) -> int:
        """The least recently released cached block, without its hash."""
        block = next(iter(self._cached))
        del self._cached[block], self._block_of[self._hash_of.pop(block)]
        return block
