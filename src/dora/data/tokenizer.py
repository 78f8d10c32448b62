"""Text to token ids and back, from the tokenizer.json of a model folder; and new tokenizers for small models.

Uses the `tokenizers` library alone: importing transformers takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from dora.errors import DataError, ModelError

# ChatML, as Qwen has it
END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- for tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}
{{ '<tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
MIN_VOCAB_SIZE = 256 + 3


class Tokenizer:
    """A model's tokenizer. `stop_ids` end a response; `eos_id` is the first of them."""

    def __init__(self, folder: Path) -> None:
        """Read a model folder. Raises ModelError if it has no tokenizer.json or names no end token."""
        if not folder.is_dir():
            raise ModelError(f"model folder {folder} does not exist; name a folder in Hugging Face format")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(
                f"{path} is not a tokenizer: {error}; save the model's tokenizer again"
            ) from error
        # Files saved after supervised training often request truncation or padding, which prompts must not
        # get.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.stop_ids = _stop_ids(folder, self._tokenizer)
        self.eos_id = self.stop_ids[0]

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises DataError for a character that is not in the vocabulary."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises bare Exception
            raise DataError(self._why_not_encodable(text, error)) from error
        return ids

    def _why_not_encodable(self, text: str, error: Exception) -> str:
        for character in text:
            code = f"U+{ord(character):04X}"
            if "\ud800" <= character <= "\udfff":
                return f"the text has the lone surrogate {code}, half of a character; remove it"
            try:
                self._tokenizer.encode(character)
            except Exception:  # as in `encode`
                return (
                    f"cannot tokenize the text: the character {character!r} ({code}) is not in the "
                    "tokenizer's vocabulary; use characters of the vocabulary"
                )
        return f"cannot tokenize the text: {error}; use characters of the vocabulary"

    def decode_token(self, id: int) -> str:
        """Text of one token; that of a special token is its name."""
        text: str = self._tokenizer.decode([id], skip_special_tokens=False)
        return text

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of token ids, without special tokens."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        text: str = self._tokenizer.decode(plain, skip_special_tokens=True)
        return text


def _stop_ids(folder: Path, tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The end-of-sequence ids, from the first file of the folder that names any."""
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is None or ids == []:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if any(not isinstance(each, int) for each in listed):
            raise ModelError(f"{folder / name}: eos_token_id = {ids!r} must be a token id or a list of them")
        return tuple(listed)
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    text = token["content"] if isinstance(token, dict) else token
    stop = tokenizer.token_to_id(text) if text else None
    if stop is None:
        raise ModelError(f"{folder} names no eos token; add eos_token_id to its generation_config.json")
    return (stop,)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold one JSON object, not a {type(content).__name__}")
    return content


def save_character_tokenizer(folder: Path, alphabet: str, eos: str = "<eos>") -> None:
    """Write a tokenizer with one id per character of `alphabet` and a last one for `eos`.

    There is no separate padding id, so every id that the model can sample has a meaning. transformers'
    AutoTokenizer can load the folder as well.
    """
    vocabulary = {token: index for index, token in enumerate([*alphabet, eos])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([eos])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": eos}
    _save(folder, tokenizer, config, eos_token_id=len(alphabet))


def save_bpe_tokenizer(
    folder: Path, texts: Iterable[str], vocab_size: int, chat_template: str = CHAT_TEMPLATE
) -> None:
    """Train a byte-level BPE tokenizer with a chat template, and write it for `dora` and transformers.

    It encodes every text, because all 256 bytes are tokens. The vocabulary is smaller than `vocab_size` if
    the texts have too few pairs.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MESSAGE_END,
        "pad_token": END_OF_TEXT,
        "chat_template": chat_template,
    }
    end_ids = [tokenizer.token_to_id(token) for token in (MESSAGE_END, END_OF_TEXT)]
    _save(folder, tokenizer, config, eos_token_id=end_ids)


def _save(
    folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, str], eos_token_id: object
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation_config = {"eos_token_id": eos_token_id}
    (folder / "generation_config.json").write_text(
        json.dumps(generation_config, indent=2) + "\n", encoding="utf-8"
    )
