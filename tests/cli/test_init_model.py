"""`dora init-model` creates folders that transformers and `dora train` load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.cli.test_main import exit_code
from transformers import AutoModelForCausalLM, AutoTokenizer

from dora.data.tokenizer import Tokenizer
from dora.model.pretrained import load_pretrained

SMALL = ("--hidden-size", "16", "--intermediate-size", "24", "--num-hidden-layers", "1", "--head-dim", "8")
FAMILIES = ["qwen3", "qwen2", "llama", "qwen3_moe"]
TEXTS = [{"question": "How many are two and two?", "answer": "Two and two are four.\n#### 4"}] * 3


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_family(family: str, tmp_path: Path, data: Path) -> None:
    folder = tmp_path / family
    assert exit_code("init-model", folder, "--family", family, *SMALL, "--tokenizer-from", data) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == family
    assert model.config.vocab_size == len(tokenizer) == Tokenizer(folder).vocab_size
    assert tokenizer.convert_ids_to_tokens(list(Tokenizer(folder).stop_ids)) == [
        "<|im_end|>",
        "<|endoftext|>",
    ]
    ids = tokenizer.encode("Two and two are four.")
    assert len(ids) < 10  # the tokenizer is trained on the texts
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), len(tokenizer))


def test_a_tokenizer_is_trained_on_conversations(tmp_path: Path) -> None:
    """Other values, and half of a character, are left out."""
    turns = [{"role": "user", "content": "Two and two are four. \ud800"}]
    rows = [{"prompt": turns, "answer": 4, "tests": ["f(2) == 4"]}] * 3 + [["Two and two"], 5]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--tokenizer-from", tmp_path / "data.jsonl")
    assert exit_code("init-model", tmp_path / "out", *SMALL, *given) == 0
    tokenizer = Tokenizer(tmp_path / "out")
    assert len(tokenizer.encode("Two and two are four.")) < 10
    assert len(tokenizer.encode("f(2) == 4")) < len("f(2) == 4")


def test_equal_seeds_give_equal_models(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, "112", strict=True):
        assert exit_code("init-model", folder, *SMALL, "--seed", seed) == 0
    a, b, c = (load_pretrained(folder)[1] for folder in folders)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_without_texts_the_tokens_are_the_bytes(tmp_path: Path) -> None:
    assert exit_code("init-model", tmp_path / "m", *SMALL) == 0
    tokenizer = Tokenizer(tmp_path / "m")
    assert tokenizer.vocab_size == 256 + 3
    assert tokenizer.decode(tokenizer.encode("naïve €")) == "naïve €"


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_tokenizer_is_copied_with_its_chat_template(name: str, tmp_path: Path, data: Path) -> None:
    assert exit_code("init-model", tmp_path / "a", *SMALL, "--tokenizer-from", data) == 0
    assert exit_code("init-model", tmp_path / "b", *SMALL, "--tokenizer", tmp_path / "a" / name) == 0
    first, second = (AutoTokenizer.from_pretrained(tmp_path / letter) for letter in "ab")
    assert first.get_vocab() == second.get_vocab()
    assert second.chat_template == first.chat_template


@pytest.mark.parametrize("names_end_in", ["tokenizer_config.json", "config.json"])
def test_a_tokenizer_file_may_have_any_name(names_end_in: str, tmp_path: Path) -> None:
    assert exit_code("init-model", tmp_path / "a", *SMALL) == 0
    own = tmp_path / "own"
    own.mkdir()
    shutil.copyfile(tmp_path / "a" / "tokenizer.json", own / "my.tok")
    (own / names_end_in).write_text(json.dumps({"eos_token": "<|im_end|>", "eos_token_id": 2}))
    assert exit_code("init-model", tmp_path / "b", *SMALL, "--tokenizer", own / "my.tok") == 0
    assert Tokenizer(tmp_path / "b").stop_ids == (2,)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "my.json: names no eos token; write it into a tokenizer_config.json beside the file"),
        ("{", "my.json is not a tokenizer"),
        ("train", "data.jsonl, line 2: is empty"),
    ],
)
def test_a_failure_leaves_no_folder(
    content: str | None, message: str, exists: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("init-model", tmp_path / "a", *SMALL) == 0
    own, option = tmp_path / "own" / "my.json", "--tokenizer"
    own.parent.mkdir()
    if content == "train":
        own, option = tmp_path / "own" / "data.jsonl", "--tokenizer-from"
        own.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    else:
        own.write_text(content or (tmp_path / "a" / "tokenizer.json").read_text())
    if exists:
        (tmp_path / "m").mkdir()
    assert exit_code("init-model", tmp_path / "m", *SMALL, option, own) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "m").exists() == exists
    assert not exists or not [*(tmp_path / "m").iterdir()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "gpt2"], "--family gpt2: must be one of qwen3, qwen2, llama, qwen3_moe"),
        (["--vocab-size", "100"], "a byte-level tokenizer has at least 259 tokens"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere has no tokenizer.json"),
        (["--tokenizer-from", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--tokenizer", "a", "--tokenizer-from", "b"], "give --tokenizer to copy a tokenizer, or"),
        (["--num-attention-heads", "3"], "num_attention_heads = 3 is not a multiple"),
    ],
)
def test_invalid_options_are_refused_and_leave_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("init-model", tmp_path / "m", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_a_folder_in_use_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("1")
    assert exit_code("init-model", tmp_path) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
