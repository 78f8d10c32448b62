from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dora.engine.block_manager import BLOCK_SIZE, BlockManager, block_hashes, hash_seed, num_blocks_for

NUM_BLOCKS = 24
SEEDS = [hash_seed("model", f"weights {i}") for i in range(2)]
prompts = st.builds(lambda start, length: (1,) * start + (2,) * (length - start), *[st.integers(0, 60)] * 2)


class BlockManagerMachine(RuleBasedStateMachine):
    """The reference model: a table is a list of blocks, and a block is in use while a table has it.

    A block keeps its hash until it is allocated again; the least recently released one is evicted first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.hashes: dict[str, int] = {}
        self.cached: list[int] = []  # registered blocks that no table has, in order of release

    @property
    def used(self) -> set[int]:
        return {block for table in self.tables for block in table}

    def check_allocated(self, blocks: list[int]) -> None:
        """The allocated blocks were in no table, and the expected ones were evicted."""
        assert self.used.isdisjoint(blocks)
        assert len(set(blocks)) == len(blocks)
        num_unregistered = NUM_BLOCKS - len(self.used) - len(self.cached)
        num_evicted = max(0, len(blocks) - num_unregistered)
        evicted, self.cached = self.cached[:num_evicted], self.cached[num_evicted:]
        assert set(blocks) & {*evicted, *self.cached} == set(evicted)
        self.hashes = {name: block for name, block in self.hashes.items() if block not in evicted}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        table = self.manager.allocate(data.draw(st.integers(0, self.manager.num_free)))
        self.check_allocated(table)
        self.tables.append(table)

    @rule(seed=st.sampled_from(SEEDS), prompt=prompts)
    def allocate_a_prompt(self, seed: str, prompt: tuple[int, ...]) -> None:
        hashes = block_hashes(seed, prompt)
        cached = self.manager.lookup(hashes)
        num_new = num_blocks_for(len(prompt)) - len(cached)
        num_free = self.manager.num_free - sum(block in self.cached for block in cached)
        assert self.manager.num_free_after_sharing(cached) == num_free
        if num_new > num_free:
            return
        self.manager.share(cached)
        self.cached = [block for block in self.cached if block not in cached]
        self.tables.append(cached)
        own = self.manager.allocate(num_new)
        self.check_allocated(own)
        self.tables[-1] = table = cached + own
        self.manager.register(table[: len(hashes)], hashes)
        self.hashes = dict(zip(hashes[len(cached) :], own, strict=False)) | self.hashes

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.tables))
        table = source[: data.draw(st.integers(0, len(source)))]
        assert self.manager.num_free_after_sharing(table) == self.manager.num_free
        self.manager.share(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.manager.release(table)
        registered, used = set(self.hashes.values()), self.used
        self.cached += [block for block in reversed(table) if block in registered and block not in used]

    @rule(seed=st.sampled_from(SEEDS))
    def unregister(self, seed: str) -> None:
        self.manager.unregister(seed)
        self.hashes = {name: block for name, block in self.hashes.items() if not name.startswith(seed)}
        self.cached = [block for block in self.cached if block in self.hashes.values()]

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.manager.check(self.tables)
        assert self.manager.num_free == NUM_BLOCKS - len(self.used)

    @invariant()
    def exactly_the_registered_hashes_are_found(self) -> None:
        assert all(self.manager.lookup([name]) == [block] for name, block in self.hashes.items())
        all_hashes = {
            name for seed in SEEDS for token in (1, 2) for name in block_hashes(seed, (token,) * 60)
        }
        assert all(self.manager.lookup([name]) == [] for name in all_hashes - self.hashes.keys())


BlockManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_the_block_manager_behaves_like_its_reference_model = BlockManagerMachine.TestCase


@given(prompts, prompts, st.sampled_from(SEEDS), st.sampled_from(SEEDS))
def test_hashes_are_equal_exactly_if_all_tokens_so_far_are(
    one: tuple[int, ...], other: tuple[int, ...], one_seed: str, other_seed: str
) -> None:
    pairs = zip(block_hashes(one_seed, one), block_hashes(other_seed, other), strict=False)
    for number, (first, second) in enumerate(pairs, start=1):
        stop = number * BLOCK_SIZE
        assert (first == second) == (one_seed == other_seed and one[:stop] == other[:stop])


def test_the_hash_seed_differs_between_models_and_weights() -> None:
    seeds = {hash_seed(model, weights) for model in ("m1", "m2") for weights in ("w1", "w2")}
    assert len(seeds) == 4


def test_the_last_block_of_a_prompt_is_evicted_first() -> None:
    manager = BlockManager(3)
    hashes = block_hashes(SEEDS[0], (1,) * 48)
    table = manager.allocate(3)
    manager.register(table, hashes)
    manager.release(table)
    assert manager.lookup(hashes) == table
    assert manager.allocate(1) == table[2:]
    assert manager.lookup(hashes) == table[:2]
