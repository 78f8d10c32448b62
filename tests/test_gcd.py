import random
from pathlib import Path

import pytest

from dora.data import gcd
from dora.data.tokenizer import Tokenizer, save_character_tokenizer
from dora.errors import DataError, ModelError
from dora.rewards.gcd import reward


def test_the_true_chain_is_written_out_in_full() -> None:
    assert gcd.prompt(48, 36) == "48,36:"
    assert gcd.chain(48, 36) == "12,36;12,24;12,12=12"
    assert gcd.chain(7, 7) == "=07"


def test_every_true_chain_is_rewarded() -> None:
    rows = gcd.training_rows() + gcd.held_out_rows()
    assert all(reward(completion=gcd.chain(row["a"], row["b"]), **row) == 1.0 for row in rows)


@pytest.mark.parametrize(
    "completion",
    ["=12", "12,36;12,24;12,12=06", "12,36;24,12;12,12=12", "12,36;12,24;12,12=12;", "12,36;12,12=12", ""],
)
def test_anything_but_the_whole_chain_is_not_rewarded(completion: str) -> None:
    assert reward("48,36:", completion) == 0.0


def test_no_held_out_pair_is_trained_on_in_either_order() -> None:
    held_out = {frozenset((row["a"], row["b"])) for row in gcd.held_out_rows()}
    trained = {frozenset((row["a"], row["b"])) for row in gcd.training_rows()}
    assert len(gcd.held_out_rows()) == len(held_out) == 512
    assert not held_out & trained
    assert len(held_out | trained) == 60 * 59 // 2
    assert gcd.held_out_rows()[:2] == [gcd.row(59, 28), gcd.row(42, 55)]


def test_a_slipping_teacher_is_wrong_at_the_stated_rate_and_always_ends() -> None:
    source = random.Random(0)
    rows = gcd.training_rows()
    right = sum(
        reward(row["prompt"], gcd.slipping_chain(row["a"], row["b"], 0.11, source)) for row in rows
    ) / len(rows)
    assert 0.35 < right < 0.45


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


def test_a_character_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, "ab")
    with pytest.raises(DataError, match="use characters of the vocabulary"):
        Tokenizer(tmp_path).encode("abc")
