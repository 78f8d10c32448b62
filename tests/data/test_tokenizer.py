"""Tokenizers of model folders: those that DORA saves, and those saved by other tools."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from dora.data import gcd
from dora.data.tokenizer import Tokenizer, save_character_tokenizer
from dora.errors import DataError, ModelError


def test_saved_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, gcd.ALPHABET)
    path = str(tmp_path / "tokenizer.json")
    saved = tokenizers.Tokenizer.from_file(path)
    saved.enable_truncation(4)
    saved.enable_padding(length=64)
    saved.save(path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("12,30:12;18")) == "12,30:12;18"
    assert len(tokenizer.encode("12,30:12;18")) == 11


def test_a_character_tokenizer_reads_back_what_it_writes(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, gcd.ALPHABET)
    tokenizer = Tokenizer(tmp_path)
    text = gcd.prompt(48, 36) + gcd.chain(48, 36)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    assert tokenizer.vocab_size == len(gcd.ALPHABET) + 1
    assert tokenizer.stop_ids == (len(gcd.ALPHABET),)


def test_a_character_tokenizer_loads_with_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_character_tokenizer(tmp_path, gcd.ALPHABET)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path)
    assert theirs("48,36:").input_ids == ours.encode("48,36:")
    assert theirs.eos_token_id == ours.eos_id


def test_the_end_token_is_found_in_tokenizer_config_too(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, "ab")
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer(tmp_path).eos_id == 2
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="eos"):
        Tokenizer(tmp_path)


def test_an_empty_list_names_no_end_token_and_other_values_are_refused(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, "ab")
    generation_config = tmp_path / "generation_config.json"
    generation_config.write_text('{"eos_token_id": []}')
    assert Tokenizer(tmp_path).stop_ids == (2,)  # of tokenizer_config.json
    generation_config.write_text('{"eos_token_id": [2, "1"]}')
    with pytest.raises(ModelError, match=r"eos_token_id = \[2, '1'\] must be a token id or a list of them"):
        Tokenizer(tmp_path)


def test_a_character_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, "ab")
    with pytest.raises(DataError, match="use characters of the vocabulary") as refusal:
        Tokenizer(tmp_path).encode("abça")
    assert "'ç' (U+00E7) is not in the tokenizer's vocabulary" in str(refusal.value)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffa"])
def test_a_lone_surrogate_is_named(text: str, tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, "ab")
    with pytest.raises(DataError, match=r"the text has the lone surrogate U\+D(800|FFF), .*; remove it"):
        Tokenizer(tmp_path).encode(text)
