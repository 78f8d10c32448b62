from hypothesis import given
from hypothesis import strategies as st

from dora.trainer.packing import micro_batches

LENGTHS = st.lists(st.integers(1, 400), max_size=60)


def test_similar_lengths_share_a_micro_batch() -> None:
    assert micro_batches([3, 10, 4, 9], token_budget=20) == [[1, 3], [2, 0]]


def test_a_sequence_over_the_budget_travels_alone() -> None:
    assert micro_batches([50, 2, 2], token_budget=8) == [[0], [1, 2]]


@given(LENGTHS, st.integers(1, 1000))
def test_every_sequence_is_packed_once_and_padding_counts(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
