"""Tokenizers of model folders, as others have saved them."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from dora.data import gcd
from dora.data.tokenizer import Tokenizer, save_character_tokenizer


def test_a_tokenizer_saved_with_truncation_and_padding_neither_cuts_nor_pads(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, gcd.ALPHABET)
    path = str(tmp_path / "tokenizer.json")
    saved = tokenizers.Tokenizer.from_file(path)
    saved.enable_truncation(4)
    saved.enable_padding(length=64)
    saved.save(path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("12,30:12;18")) == "12,30:12;18"
    assert len(tokenizer.encode("12,30:12;18")) == 11
