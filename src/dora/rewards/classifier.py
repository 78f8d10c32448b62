"""A reward model: a sequence classifier in the Hugging Face format, which reads prompt and answer.

It judges all answers of a group in one call, as TRL's reward functions do; transformers, which has all
the architectures, is imported only where one is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dora.errors import RewardError

Text = str | Sequence[Mapping[str, str]]  # or the messages of a conversation


class SequenceClassifier:
    """The score of a model with one output; of one with several, the probability of `label`.

    The model reads the conversation by its tokenizer's chat template; where there is none, prompt and
    answer end to end. Nothing is cut: a text longer than the model reads is an error of its group.
    """

    def __init__(
        self,
        path: str,
        label: str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        micro_batch_rows: int = 16,
    ) -> None:
        """Read the model folder `path`. Raises RewardError if it is none, or its head is not there."""
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
        logging.disable_progress_bar()  # the terminal is the run's
        try:
            here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, **here)
            model, told = AutoModelForSequenceClassification.from_pretrained(
                path, **here, use_safetensors=True, dtype=getattr(torch, dtype), output_loading_info=True
            )
        except Exception as error:  # the library raises whatever its readers do
            raise RewardError(f"transformers cannot read {path} as a sequence classifier: {error}") from error
        if told["missing_keys"]:
            raise RewardError(
                f"{path} lacks {', '.join(sorted(told['missing_keys']))}: it is no sequence classifier, and "
                "a head drawn at random would judge; name a trained reward model"
            )
        self._model: Any = model.to(device).eval()
        self._label = _label_of(model.config, label, path)
        # A model without a token for padding cannot tell where a padded text ends.
        self._pad_id: int | None = model.config.pad_token_id
        self._num_rows = 1 if self._pad_id is None else micro_batch_rows
        self._torch = torch

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text], **row: object) -> list[float]:
        """Rewards of answers. Raises ValueError for a text that the model cannot read."""
        encoded = [self._encode(*pair) for pair in zip(prompts, completions, strict=True)]
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))  # little padding
        rewards = [0.0] * len(encoded)
        for at in range(0, len(order), self._num_rows):
            members = order[at : at + self._num_rows]
            for i, reward in zip(members, self._scores([encoded[i] for i in members]), strict=True):
                rewards[i] = reward
        return rewards

    def _encode(self, prompt: Text, completion: Text) -> list[int]:
        """Token ids of prompt and answer."""
        ids: list[int]
        if self._tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
            answer = (
                [{"role": "assistant", "content": completion}]
                if isinstance(completion, str)
                else [*completion]
            )
            text = self._tokenizer.apply_chat_template([*messages, *answer], tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        elif isinstance(prompt, str) and isinstance(completion, str):
            ids = self._tokenizer(prompt + completion)["input_ids"]
        else:
            raise ValueError("a conversation, but the reward model's tokenizer has no chat template")
        longest = getattr(self._model.config, "max_position_embeddings", None)
        if longest is not None and len(ids) > longest:
            raise ValueError(f"a text of {len(ids)} tokens; the reward model reads {longest}")
        return ids

    def _scores(self, texts: Sequence[list[int]]) -> list[float]:
        """Of texts side by side, the longest one last."""
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


def _label_of(config: Any, label: str | None, path: str) -> int | None:
    """The output that counts; None where there is one only. Raises RewardError."""
    if config.num_labels == 1:
        if label is not None:
            raise RewardError(f"label = {label!r} has no effect: {path} has one output; remove it")
        return None
    numbers = {name: int(number) for number, name in config.id2label.items()}
    if label not in numbers:
        raise RewardError(
            f"label = {label!r}: {path} has {len(numbers)} outputs; name one of {', '.join(numbers)}, and "
            "its probability is the reward"
        )
    return numbers[label]
