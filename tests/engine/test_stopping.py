"""An output ends at the token with which its text first contains a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from dora.engine.decode_batch import Detokenize, ends_with_stop_string

# Words, letters, single bytes of longer characters, and tokens without text.
PIECES = [b"", b"a", b"b", b"ab", b"abc", b" ", b"\n\n", b"ab ab ab ab ab ab", "€".encode(), "aé".encode()]
PIECES += [bytes([byte]) for byte in "é€😀".encode()] + [b"", b"\xf0\x9f", b"\x98\x80 a"]


def detokenize(ids: list[int]) -> str:
    """Like a byte-level tokenizer."""
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def first_end(detokenize: Detokenize, ids: list[int], stop_strings: Sequence[str]) -> int | None:
    """After how many tokens the output ends, by the function under test."""
    for num in range(1, len(ids) + 1):
        if ends_with_stop_string(detokenize, np.array(ids[:num]), stop_strings):
            return num
    return None


def naive_end(detokenize: Detokenize, ids: list[int], stop_strings: Sequence[str]) -> int | None:
    texts = (detokenize(ids[:num]) for num in range(1, len(ids) + 1))
    return next((i + 1 for i, text in enumerate(texts) if any(stop in text for stop in stop_strings)), None)


STOPS = ["ab", "b a", "abab", "ab\n\n", "é", "€é", "😀", "a😀 a", "ab ab ab", "c" + " " * 9, "😀😀😀€€é"]


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=60),
    stop_strings=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
)
@settings(max_examples=400)
def test_the_end_of_the_text_has_a_stop_string_when_the_whole_text_does(
    ids: list[int], stop_strings: list[str]
) -> None:
    assert first_end(detokenize, ids, stop_strings) == naive_end(detokenize, ids, stop_strings)


@given(stop=st.text("ab é€😀", min_size=1, max_size=12), before=st.text("ab é€😀", max_size=40))
@settings(max_examples=200)
def test_a_stop_string_in_single_bytes_is_found_with_its_last_byte(stop: str, before: str) -> None:
    ids = [PIECES.index(bytes([byte])) for byte in (before + stop).encode()]
    assert first_end(detokenize, ids, [stop]) == naive_end(detokenize, ids, [stop])


def test_tokens_without_text_may_lie_within_a_stop_string() -> None:
    ids = [1, *[0] * 100, 2, 0, 1]
    assert first_end(detokenize, ids, ["ab"]) == 102
    assert first_end(detokenize, ids, ["aba"]) == 104
    assert first_end(detokenize, [1, *[0] * 100, PIECES.index(b"ab ab ab ab ab ab")], ["aab ab"]) == 102


def test_byte_fallback_characters_are_joined() -> None:
    pieces = [f"<0x{byte:02X}>" for byte in "€🎉😀".encode()]
    tokenizer = Tokenizer(models.BPE({piece: pieces.index(piece) for piece in pieces}, []))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = [pieces.index(piece) for piece in pieces]
    assert tokenizer.decode(ids) == "€🎉😀"
    euro = ids[:3]
    for num in range(12):  # the decoded tail starts anywhere in a character
        assert first_end(tokenizer.decode, euro * num + ids, ["🎉😀"]) == 3 * num + 11
        assert first_end(tokenizer.decode, euro * num + ids, ["😀🎉"]) is None


@pytest.mark.parametrize("length", [100, 1000])
def test_only_the_end_of_a_long_output_is_decoded(length: int) -> None:
    seen: list[int] = []

    def spy(ids: list[int]) -> str:
        seen.append(len(ids))
        return detokenize(ids)

    assert not ends_with_stop_string(spy, np.full(length, 4), ["</answer>"])
    assert max(seen) <= 20
