"""`dora init-model`: a small random model of a supported family, with a tokenizer.

To try a pipeline without a download: `dora train` and transformers load the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dora.data.bpe import MIN_VOCAB_SIZE, save_bpe_tokenizer
from dora.data.files import read_rows
from dora.data.tokenizer import Tokenizer
from dora.errors import InputError
from dora.model.config import ModelConfig
from dora.model.folder import save_folder
from dora.model.weights import initial_weights

FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe")
# What a tokenizer is made of; the first is needed, and one of the others must name the end token.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def main(
    folder: Path,
    family: str,
    tokenizer: Path | None,
    tokenizer_from: Path | None,
    vocab_size: int,
    seed: int,
    **shape: int,
) -> str:
    """Write a model folder and its tokenizer; returns what the command prints. Raises InputError.

    `shape` are fields of `ModelConfig`; those of the experts are used by qwen3_moe alone.
    """
    if family not in FAMILIES:
        raise InputError(f"--family {family}: must be one of {', '.join(FAMILIES)}")
    if tokenizer is not None and tokenizer_from is not None:
        raise InputError("give --tokenizer, which copies one, or --tokenizer-from, which trains one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty; name a new folder or remove it")
    experts = {"num_experts", "num_experts_per_tok", "moe_intermediate_size"}
    kept: dict[str, Any] = {k: v for k, v in shape.items() if family == "qwen3_moe" or k not in experts}
    config = ModelConfig(vocab_size=vocab_size, model_type=family, **kept)
    if tokenizer is not None:
        _copy_tokenizer(tokenizer, folder)
    else:
        _train_tokenizer(tokenizer_from, folder, vocab_size)
    # The model has the tokenizer's tokens and no more: every id it can sample has a meaning.
    config = replace(config, vocab_size=Tokenizer(folder).vocab_size)
    flat = initial_weights(config, seed)
    save_folder(folder, config, flat)
    return f"{folder}: a random {family} of {flat.numel():,} parameters with {config.vocab_size} tokens"


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files of a folder, or those beside a tokenizer.json. Raises InputError."""
    source = source.parent if source.is_file() else source
    if not (source / TOKENIZER_FILES[0]).is_file():
        raise InputError(
            f"--tokenizer {source} has no {TOKENIZER_FILES[0]}; name a model folder or that file"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _train_tokenizer(data: Path | None, folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE on every text of a dataset; without one its tokens are the bytes."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise InputError(
            f"--vocab-size {vocab_size}: a byte-level tokenizer has at least {MIN_VOCAB_SIZE} tokens, "
            "256 bytes and 3 special ones; raise it"
        )
    save_bpe_tokenizer(folder, [] if data is None else _texts(data), vocab_size)


def _texts(data: Path) -> Iterator[str]:
    for row in read_rows(data):
        yield from (value for value in row.values() if isinstance(value, str))
