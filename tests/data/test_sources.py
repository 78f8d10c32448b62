"""Several datasets in one run: their ratios, epochs and rows."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.data.dataset import Cursor, Dataset, MixedCursor, MixedDataset, mixing_schedule
from dora.errors import DataError

ratios = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(ratios)
def test_every_prefix_has_the_ratios_to_within_one_group(given_ratios: list[int]) -> None:
    schedule = mixing_schedule(tuple(map(float, given_ratios)))
    counts = [*accumulate((Counter([source]) for source in schedule), lambda a, b: a + b)]
    total = sum(given_ratios)
    for length, found in enumerate(counts, start=1):
        for source, ratio in enumerate(given_ratios):
            assert abs(found[source] - length * ratio / total) <= 1
    assert [counts[-1][source] * total for source in range(len(given_ratios))] == [
        ratio * len(schedule) for ratio in given_ratios
    ]


def test_a_tiny_ratio_has_its_place() -> None:
    assert Counter(mixing_schedule((1.0, 1e-9))) == {0: 1000, 1: 1}
    assert Counter(mixing_schedule((3000.0, 1.0, 3000.0))) == {0: 500, 1: 1, 2: 500}


@given(ratios, st.integers(0, 200))
def test_each_source_has_epochs_of_its_own(given_ratios: list[int], start: int) -> None:
    """The groups of a source are those of a cursor over it alone, and a cursor may begin anywhere."""
    lengths = [3 + source for source in range(len(given_ratios))]
    options = sum(lengths), 7, True
    groups = [MixedCursor(*options, 0, lengths, given_ratios).group_at(index) for index in range(300)]
    later = MixedCursor(*options, start, lengths, given_ratios)
    assert [later.next_group() for _ in range(5)] == (groups + [later.group_at(300 + i) for i in range(5)])[
        start : start + 5
    ]
    assert len({*groups}) == len(groups)
    for source, length in enumerate(lengths):
        first = sum(lengths[:source])
        own = [(epoch, row - first) for epoch, row in groups if 0 <= row - first < length]
        alone = Cursor(length, 7, True)
        assert own == [alone.next_group() for _ in own]


def test_rows_know_their_source() -> None:
    parts = {
        "easy": Dataset([{"prompt": "1", "answer": "a", "hint": "h"}], origin="easy.jsonl", is_jsonl=True),
        "hard": Dataset([{"question": "2", "answer": "b"}, {"question": "3", "answer": "c"}], "question"),
    }
    mixed = MixedDataset(parts)
    assert [mixed.prompt(index) for index in range(len(mixed))] == ["1", "2", "3"]
    assert mixed.fields(2) == {"answer": "c", "source": "hard"}
    assert mixed.row(0) == {"prompt": "1", "answer": "a", "hint": "h", "source": "easy"}
    assert mixed.columns == ("answer", "source")
    assert [mixed.name_of(index) for index in range(3)] == ["easy", "hard", "hard"]
    assert [mixed.location(index) for index in (0, 2)] == [
        "source.easy: easy.jsonl, line 1",
        "source.hard: dataset, row 1",
    ]


def test_the_name_of_the_source_has_a_reserved_column() -> None:
    with pytest.raises(DataError, match=r"source\.a: dataset has a column 'source', which is reserved"):
        MixedDataset({"a": Dataset([{"prompt": "1", "source": "x"}])})


def test_overlong_prompts_of_each_source_are_left_out() -> None:
    parts = {
        "a": Dataset([{"prompt": "1"}, {"prompt": "123"}], origin="a.jsonl", is_jsonl=True),
        "b": Dataset([{"prompt": "123"}, {"prompt": "12"}], origin="b.jsonl", is_jsonl=True),
    }
    kept = MixedDataset(parts).without_overlong(lambda prompt, _: len(prompt), max_prompt_length=2)
    assert [kept.prompt(index) for index in range(len(kept))] == ["1", "12"]
    assert (kept.num_overlong, kept.rows_by_source) == (2, {"a": range(1), "b": range(1, 2)})
    assert kept.location(1) == "source.b: b.jsonl, line 2"
    with pytest.raises(DataError, match=r"source\.b: b.jsonl: all prompts have more than"):
        MixedDataset(parts).without_overlong(lambda prompt, _: len(prompt), max_prompt_length=1)
