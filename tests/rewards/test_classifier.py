"""A sequence classifier as a reward gives each text the score that transformers gives it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dora.data.tokenizer import save_character_tokenizer
from dora.errors import RewardError
from dora.rewards.base import RewardInput, score
from dora.rewards.classifier import SequenceClassifier

ALPHABET = "0123456789:ua|"
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
PROMPTS = ["12:", "3:", "12:", "456:"]
COMPLETIONS = ["7", "777777", "", "0123"]


def save(folder: Path, num_labels: int = 1, pads: bool = True, **changes: Any) -> Path:
    """A random classifier; with `pads` the character | is its padding."""
    save_character_tokenizer(folder, ALPHABET)
    kind: Any = transformers.Qwen2Config  # takes more than it declares
    config = kind(
        vocab_size=len(ALPHABET) + 1,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=12,
        num_labels=num_labels,
        pad_token_id=ALPHABET.index("|") if pads else None,
        **changes,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder


def logits_of(folder: Path, text: str) -> torch.Tensor:
    """By transformers, of one text and nothing around it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        found: torch.Tensor = model(**tokenizer(text, return_tensors="pt")).logits[0]
    return found


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_each_completion_gets_the_score_of_its_own_text(tmp_path: Path, pads: bool, num_rows: int) -> None:
    folder = save(tmp_path, pads=pads)
    found = SequenceClassifier(str(folder), micro_batch_rows=num_rows)(PROMPTS, COMPLETIONS)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert found == pytest.approx([float(logits_of(folder, text)) for text in texts], abs=1e-5)
    assert len(set(found)) == 4


def test_it_scores_a_group_as_reward_functions_do(tmp_path: Path) -> None:
    model = SequenceClassifier(str(save(tmp_path)))
    inputs = [RewardInput("12:", text, [], {"answer": 5}) for text in ("7", "77")]
    results = list(score(model, inputs))
    assert [result.reward for result in results] == model(["12:", "12:"], ["7", "77"], answer=[5, 5])


def test_a_model_with_several_outputs_gives_the_probability_of_its_label(tmp_path: Path) -> None:
    folder = save(tmp_path, id2label={0: "bad", 1: "fair", 2: "good"}, num_labels=3)
    found = SequenceClassifier(str(folder), label="good")(["1:"], ["23"])
    assert found == pytest.approx([float(logits_of(folder, "1:23").softmax(-1)[2])], abs=1e-6)
    with pytest.raises(RewardError, match="3 outputs; name one of bad, fair, good"):
        SequenceClassifier(str(folder), label="best")


def test_a_conversation_goes_through_the_chat_template(tmp_path: Path) -> None:
    folder = save(tmp_path)
    model = SequenceClassifier(str(folder))
    conversation = [[{"role": "user", "content": "12"}]], [[{"role": "assistant", "content": "7"}]]
    with pytest.raises(ValueError, match="no chat template"):
        model(*conversation)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model = SequenceClassifier(str(folder))
    assert model(*conversation) == pytest.approx([float(logits_of(folder, "u:12|a:7|"))], abs=1e-5)
    assert model(["12"], ["7"]) == model(*conversation)


def test_a_text_that_is_too_long_is_refused_and_not_truncated(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="13 tokens; the reward model reads 12"):
        SequenceClassifier(str(save(tmp_path)))(["12:"], ["0123456789"])


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    config = transformers.Qwen2Config.from_pretrained(folder)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    with pytest.raises(RewardError, match=r"has no score\.weight"):
        SequenceClassifier(str(folder))


def test_a_folder_that_is_not_there_and_a_label_without_effect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no such folder"):
        SequenceClassifier(str(tmp_path / "nowhere"))
    with pytest.raises(RewardError, match="one output; remove it"):
        SequenceClassifier(str(save(tmp_path)), label="good")
