"""Datasets refuse invalid rows; an epoch has every row once, in an order given by rows, epoch and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.data.dataset import Cursor, Dataset, Prompt, epoch_order, last_text
from dora.data.images import ImageSource
from dora.errors import DataError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_of_a_jsonl_file_are_read_completely(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1", "answer": 2}, {"prompt": "2+2", "answer": 4}]
    path = write(tmp_path / "sums.jsonl", "\n".join(json.dumps(row) for row in rows))
    dataset = Dataset.from_path(path)
    assert [dataset.row(i) for i in range(len(dataset))] == rows
    assert dataset.prompt(1) == "2+2"
    assert dataset.fields(1) == {"answer": 4}


def test_the_prompt_may_be_in_another_column(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", '{"question": "why?"}\n')
    assert Dataset.from_path(path, "question").prompt(0) == "why?"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no rows"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: is not JSON"),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "line 1: cannot be read (Exceeds the limit"),
        ('{"prompt": "a", "tree": ' + "[" * 99999 + "]" * 99999 + "}", "line 1: cannot be read (maximum"),
        ('{"prompt": "a"}\n\n{"prompt": "b"}\n', "line 2: is empty"),
        ('{"prompt": "a"}\n["b"]\n', "line 2: is a list"),
        (
            '{"text": "a", "n": 1}\n',
            "has no column 'prompt'; name the prompt's column with prompt_key (dora sft: --prompt-key); "
            "columns: text, n",
        ),
        ("{}\n", "columns: none"),
        ('{"prompt": 7}\n', "prompt is a int, must be a string"),
        ('{"prompt": "a", "completion": "b"}\n', "the column 'completion' has the name of an argument"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(DataError) as refusal:
        Dataset.from_path(write(tmp_path / "bad.jsonl", text))
    assert complaint in str(refusal.value)
    assert "bad.jsonl" in str(refusal.value)


def test_the_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "\xe9"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl, line 3: is not UTF-8 \(byte 0xe9 .* iconv -f latin1"):
        Dataset.from_path(path)


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    dataset = Dataset.from_path(path)
    assert [dataset.prompt(index) for index in range(2)] == ["a", "b"]


def test_a_prompt_may_be_a_conversation() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why?"}]
    assert Dataset([{"prompt": messages}]).prompt(0) == messages
    assert [last_text(prompt) for prompt in (messages, "why?")] == ["why?", "why?"]


@pytest.mark.parametrize(
    "prompt", [[], ["why?"], [{"role": "user"}], [{"role": "user", "content": ["why?"]}]]
)
def test_a_conversation_without_roles_and_texts_is_refused(prompt: list[object]) -> None:
    with pytest.raises(DataError, match=r"row 0: prompt is a .* must be a string, or messages such as"):
        Dataset([{"prompt": prompt}])


def test_the_error_for_a_content_in_parts_names_its_message() -> None:
    """As other trainers have conversations with images; a user reads that a list must be a list."""
    parts = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "why?"}]},
    ]
    with pytest.raises(DataError, match=r"prompt is a list whose message 1 has a list as content, must be a"):
        Dataset([{"prompt": parts}])


@pytest.mark.parametrize("column", ["prompt", "prompts", "completions", "completion_ids", "finish_reason"])
def test_a_column_named_like_an_argument_of_rewards_is_refused(column: str) -> None:
    with pytest.raises(DataError, match=f"the column '{column}' has the name of an argument .* rename it"):
        Dataset([{"question": "why?", column: 1}], "question")


def test_the_head_of_a_dataset_is_its_first_rows() -> None:
    dataset = Dataset([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], origin="letters")
    assert [dataset.head(2).prompt(index) for index in range(2)] == ["a", "b"]
    assert len(dataset.head(4)) == 3


def length(prompt: Prompt, images: Sequence[ImageSource]) -> int:
    return len(prompt)


def test_a_prompt_longer_than_the_limit_is_named() -> None:
    dataset = Dataset([{"prompt": "ab"}, {"prompt": "abcd"}], origin="sums")
    dataset.check_prompt_lengths(length, max_prompt_length=4)
    with pytest.raises(DataError, match=r"sums, row 1: the prompt has 4 tokens.*max_prompt_length = 3"):
        dataset.check_prompt_lengths(length, max_prompt_length=3)


def test_an_empty_prompt_is_named() -> None:
    with pytest.raises(DataError, match="row 0: the prompt has 0 tokens; it needs at least one, so"):
        Dataset([{"prompt": ""}]).check_prompt_lengths(length, max_prompt_length=3)


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 2**31), st.booleans())
def test_every_epoch_has_every_row_once(num_rows: int, epoch: int, seed: int, shuffle: bool) -> None:
    cursor = Cursor(num_rows, seed, shuffle)
    groups = [cursor.group_at(i) for i in range(epoch * num_rows, (epoch + 1) * num_rows)]
    assert {e for e, _ in groups} == {epoch}
    assert sorted(row for _, row in groups) == list(range(num_rows))


@given(st.integers(1, 20), st.integers(0, 50))
def test_a_cursor_resumes_from_its_index(num_rows: int, num_taken: int) -> None:
    first = Cursor(num_rows, seed=3)
    groups = [first.next_group() for _ in range(num_taken)]
    assert len(set(groups)) == num_taken
    assert Cursor(num_rows, seed=3, index=first.index).next_group() == first.next_group()


def test_the_order_is_the_same_on_every_machine() -> None:
    assert epoch_order(6, 0, 1) != epoch_order(6, 1, 1)
    assert epoch_order(6, 0, 0) == (0, 3, 4, 1, 5, 2)


def test_without_shuffling_rows_are_in_file_order() -> None:
    assert [Cursor(3, seed=0, shuffle=False).group_at(i) for i in range(4)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]


def test_overlong_prompts_are_left_out_and_rows_keep_their_numbers() -> None:
    rows = [{"prompt": text, "id": number} for number, text in enumerate(("aaaa", "a", "aaa", "aa"))]
    kept = Dataset(rows, origin="x.jsonl", is_jsonl=True).without_overlong(length, max_prompt_length=2)
    assert [(kept.prompt(index), kept.fields(index)) for index in range(len(kept))] == [
        ("a", {"id": 1}),
        ("aa", {"id": 3}),
    ]
    assert kept.num_overlong == 2
    assert (kept.location(1), kept.head(1).location(0)) == ("x.jsonl, line 4", "x.jsonl, line 2")
    with pytest.raises(DataError, match=r"all prompts have more than data\.max_prompt_length = 0 tokens"):
        kept.without_overlong(length, max_prompt_length=0)
    with pytest.raises(DataError, match=r"line 1: the prompt has 0 tokens"):
        Dataset([{"prompt": ""}], is_jsonl=True).without_overlong(length, max_prompt_length=2)
