"""A reward model: a sequence classifier in the Hugging Face format that reads prompt and completion.

It scores all completions of a group in one call, as TRL's reward functions do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dora.errors import RewardError

Text = str | Sequence[Mapping[str, str]]  # or the messages of a conversation


class SequenceClassifier:
    """The score of a model with one output; the probability of `label` for a model with several.

    The model reads the conversation in its tokenizer's chat template; without a template, prompt and
    completion concatenated. Texts are never truncated: a text longer than the model reads fails its group.
    """

    def __init__(
        self,
        path: str,
        label: str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        micro_batch_rows: int = 16,
    ) -> None:
        """Load the model folder `path`. Raises RewardError if it has no classifier with a trained head."""
        try:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise RewardError(
                "a sequence classifier as a reward needs transformers; run pip install 'dora-rl[data]'"
            ) from error
        if not Path(path).is_dir():
            raise RewardError(f"path = {path!r}: there is no such folder; name one of a sequence classifier")
        logging.disable_progress_bar()
        try:
            options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, **options)
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                path, **options, use_safetensors=True, dtype=getattr(torch, dtype), output_loading_info=True
            )
        except Exception as error:  # transformers raises many types
            raise RewardError(f"transformers cannot read {path} as a sequence classifier: {error}") from error
        if loading["missing_keys"]:
            raise RewardError(
                f"{path} has no {', '.join(sorted(loading['missing_keys']))}, so transformers would "
                "initialise its head at random; name a trained sequence classifier"
            )
        self._model: Any = model.to(device).eval()
        self._label = _label_index(model.config, label, path)
        # Without a padding token the model cannot find the end of a padded text: one row at a time.
        self._pad_id: int | None = model.config.pad_token_id
        self._num_rows = 1 if self._pad_id is None else micro_batch_rows
        self._torch = torch

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text], **row: object) -> list[float]:
        """Rewards of completions. Raises ValueError for a text that the model cannot read."""
        encoded = [self._encode(*pair) for pair in zip(prompts, completions, strict=True)]
        order = sorted(
            range(len(encoded)), key=lambda i: len(encoded[i])
        )  # texts of similar length are scored together, which needs little padding
        rewards = [0.0] * len(encoded)
        for start in range(0, len(order), self._num_rows):
            members = order[start : start + self._num_rows]
            for i, reward in zip(members, self._scores([encoded[i] for i in members]), strict=True):
                rewards[i] = reward
        return rewards

    def _encode(self, prompt: Text, completion: Text) -> list[int]:
        ids: list[int]
        if self._tokenizer.chat_template:
            messages = [*_messages(prompt, "user"), *_messages(completion, "assistant")]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        elif isinstance(prompt, str) and isinstance(completion, str):
            ids = self._tokenizer(prompt + completion)["input_ids"]
        else:
            raise ValueError("a conversation, but the reward model's tokenizer has no chat template")
        max_length = getattr(self._model.config, "max_position_embeddings", None)
        if max_length is not None and len(ids) > max_length:
            raise ValueError(f"a text of {len(ids)} tokens; the reward model reads {max_length}")
        return ids

    def _scores(self, texts: Sequence[list[int]]) -> list[float]:
        """Scores of a padded batch; the last text is the longest."""
        torch, device = self._torch, self._model.device
        ids = torch.full((len(texts), len(texts[-1])), self._pad_id or 0)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
        with torch.no_grad():
            logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
        scores = logits[:, 0] if self._label is None else logits.softmax(-1)[:, self._label]
        found: list[float] = scores.tolist()
        return found


def _messages(text: Text, role: str) -> Sequence[Mapping[str, str]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _label_index(config: Any, label: str | None, path: str) -> int | None:
    """The output of `label`; None for a model with one output. Raises RewardError."""
    if config.num_labels == 1:
        if label is not None:
            raise RewardError(f"label = {label!r} has no effect: {path} has one output; remove it")
        return None
    indices = {name: int(index) for index, name in config.id2label.items()}
    if label not in indices:
        raise RewardError(
            f"label = {label!r}: {path} has {len(indices)} outputs; name one of {', '.join(indices)}, and "
            "its probability is the reward"
        )
    return indices[label]
