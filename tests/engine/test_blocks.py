from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dora.engine.blocks import BLOCK_SIZE, BlockManager, chain_hashes, kv_seed, num_blocks_for

NUM_BLOCKS = 24
SEEDS = [kv_seed("model", f"weights {i}") for i in range(2)]
prompts = st.builds(lambda start, length: (1,) * start + (2,) * (length - start), *[st.integers(0, 60)] * 2)


class SetsOfPages(RuleBasedStateMachine):
    """The model: a table is a list of pages, a page is in use while a table has it.

    A page keeps the name it was given until somebody writes to it, who takes the page that
    was left alone longest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.names: dict[str, int] = {}
        self.unused: list[int] = []  # named pages that no table has, the longest unused first

    @property
    def used(self) -> set[int]:
        return {page for table in self.tables for page in table}

    def written(self, pages: list[int]) -> None:
        """These pages were handed out: they were in no table, and the right ones lost their names."""
        assert self.used.isdisjoint(pages)
        assert len(set(pages)) == len(pages)
        num_plain = NUM_BLOCKS - len(self.used) - len(self.unused)
        num_evicted = max(0, len(pages) - num_plain)
        evicted, self.unused = self.unused[:num_evicted], self.unused[num_evicted:]
        assert set(pages) & {*evicted, *self.unused} == set(evicted)
        self.names = {name: page for name, page in self.names.items() if page not in evicted}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        table = self.manager.allocate(data.draw(st.integers(0, self.manager.num_free)))
        self.written(table)
        self.tables.append(table)

    @rule(seed=st.sampled_from(SEEDS), prompt=prompts)
    def hold_a_prompt(self, seed: str, prompt: tuple[int, ...]) -> None:
        hashes = chain_hashes(seed, prompt)
        known = self.manager.find(hashes)
        num_new = num_blocks_for(len(prompt)) - len(known)
        num_free = self.manager.num_free - sum(page in self.unused for page in known)
        assert self.manager.num_free_beside(known) == num_free
        if num_new > num_free:
            return
        self.manager.share(known)
        self.unused = [page for page in self.unused if page not in known]
        self.tables.append(known)
        own = self.manager.allocate(num_new)
        self.written(own)
        self.tables[-1] = table = known + own
        self.manager.name(table[: len(hashes)], hashes)
        self.names = dict(zip(hashes[len(known) :], own, strict=False)) | self.names

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share_a_beginning(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.tables))
        table = source[: data.draw(st.integers(0, len(source)))]
        assert self.manager.num_free_beside(table) == self.manager.num_free
        self.manager.share(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.manager.release(table)
        named, used = set(self.names.values()), self.used
        self.unused += [page for page in reversed(table) if page in named and page not in used]

    @rule(seed=st.sampled_from(SEEDS))
    def forget(self, seed: str) -> None:
        self.manager.forget(seed)
        self.names = {name: page for name, page in self.names.items() if not name.startswith(seed)}
        self.unused = [page for page in self.unused if page in self.names.values()]

    @invariant()
    def pages_are_conserved(self) -> None:
        self.manager.check(self.tables)
        assert self.manager.num_free == NUM_BLOCKS - len(self.used)

    @invariant()
    def exactly_what_has_a_name_is_found_by_it(self) -> None:
        assert all(self.manager.find([name]) == [page] for name, page in self.names.items())
        every = {name for seed in SEEDS for token in (1, 2) for name in chain_hashes(seed, (token,) * 60)}
        assert all(self.manager.find([name]) == [] for name in every - self.names.keys())


SetsOfPages.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_blocks_behave_like_sets_of_pages = SetsOfPages.TestCase


@given(prompts, prompts, st.sampled_from(SEEDS), st.sampled_from(SEEDS))
def test_names_are_equal_exactly_where_everything_so_far_is(
    one: tuple[int, ...], other: tuple[int, ...], one_seed: str, other_seed: str
) -> None:
    pairs = zip(chain_hashes(one_seed, one), chain_hashes(other_seed, other), strict=False)
    for number, (first, second) in enumerate(pairs, start=1):
        stop = number * BLOCK_SIZE
        assert (first == second) == (one_seed == other_seed and one[:stop] == other[:stop])


def test_the_seed_tells_models_and_weights_apart() -> None:
    seeds = {kv_seed(model, weights) for model in ("m1", "m2") for weights in ("w1", "w2")}
    assert len(seeds) == 4


def test_the_end_of_a_chain_is_reused_before_its_beginning() -> None:
    manager = BlockManager(3)
    names = chain_hashes(SEEDS[0], (1,) * 48)
    table = manager.allocate(3)
    manager.name(table, names)
    manager.release(table)
    assert manager.find(names) == table
    assert manager.allocate(1) == table[2:]
    assert manager.find(names) == table[:2]
