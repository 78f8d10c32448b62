"""Implement `dora sft`: supervised fine-tuning on a dataset of prompts and responses, as a warm start."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dora.cli.tools import template_of
from dora.data.chat import PromptEncoder
from dora.data.dataset import Dataset
from dora.data.tokenizer import Tokenizer
from dora.errors import DataError, InputError
from dora.model.pretrained import load_pretrained, save_pretrained
from dora.runtime.process.resources import use_device
from dora.runtime.run_setup import check_tokenizer
from dora.text import plural
from dora.trainer.checkpoint import copy_tokenizer
from dora.trainer.checkpoint_folders import check_model_folder
from dora.trainer.sft import SftExample, mean_loss, train_sft

MICRO_BATCH_TOKENS = 4096
NUM_REPORTS = 10


def run_sft(
    data: Path,
    model: Path,
    out: Path,
    report: Callable[[str], None],
    *,
    prompt_key: str,
    response_key: str,
    is_chat: bool,
    chat_template_kwargs: str,
    num_epochs: float,
    batch_size: int,
    num_held_out: int,
    lr: float,
    warmup_steps: int,
    device: str,
    seed: int,
) -> str:
    """Train the model in the folder `model` and write it to `out`; returns a summary.

    The last `num_held_out` rows are not trained on. Their loss is reported before and after, in nats per
    token. Raises InputError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder; name a new one with --out")
    check_model_folder("--model", model)
    tokenizer = Tokenizer(model)
    config, flat = load_pretrained(model)
    check_tokenizer(model, tokenizer, config)
    prompts = PromptEncoder(tokenizer, template_of(model, is_chat, chat_template_kwargs))
    dataset = Dataset.from_path(data, prompt_key, reserved=())  # no reward function gets the columns
    examples = read_examples(dataset, prompts, tokenizer, response_key, config.max_position_embeddings)
    num_training = len(examples) - num_held_out
    if num_training < 1:
        raise InputError(
            f"{data} has {plural(len(examples), 'row')}, and --held-out {num_held_out} leaves none to train "
            "on; lower it"
        )
    training, held_out = examples[:num_training], examples[num_training:]
    flat = flat.to(use_device(device))
    longest = max(len(prompt) + len(response) for prompt, response, *_ in examples)
    budget = max(MICRO_BATCH_TOKENS, longest)
    before = mean_loss(config, flat, held_out, budget)
    num_steps = max(1, round(num_epochs * len(training) / batch_size))
    batches = shuffled_batches(training, batch_size, seed)
    losses = train_sft(config, flat, batches, num_steps, lr, warmup_steps, budget)
    for step, loss in enumerate(losses, start=1):
        if step * NUM_REPORTS % num_steps < NUM_REPORTS or step == 1:
            report(f"step {step:,} of {num_steps:,}: loss {loss:.4f}")
    save_pretrained(out, config, flat.cpu())
    copy_tokenizer(model, out)
    text = f"{plural(num_steps, 'step')} on {plural(len(training), 'row')}; written to {out}"
    if held_out:
        after = mean_loss(config, flat, held_out, budget)
        text += f"; loss of {plural(num_held_out, 'held-out row')}: {before:.4f} before, {after:.4f} after"
    return text


def read_examples(
    dataset: Dataset, prompts: PromptEncoder, tokenizer: Tokenizer, response_key: str, max_tokens: int
) -> list[SftExample]:
    """Token ids of all prompts and responses; a response ends with the end token. Raises DataError."""
    examples: list[SftExample] = []
    for index in range(len(dataset)):
        fields, prompt = dataset.fields(index), dataset.prompt(index)
        response = fields.get(response_key)
        if not isinstance(response, str):
            columns = ", ".join(fields) or "none besides the prompt"
            raise DataError(
                f"{dataset.location(index)}: there is no text in the column {response_key!r}; name the "
                f"response's column with --response-key; columns: {columns}"
            )
        try:
            if not response:
                raise DataError(f"the column {response_key!r} is empty; remove the row")
            if dataset.images(index):
                raise DataError("the row has images, and dora sft trains text only; remove them")
            if not isinstance(prompt, str) and not prompts.has_template:
                raise DataError("the prompt is a conversation; add --chat")
            prompt_ids = prompts.encode(prompt)
            ids = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_id]
        except DataError as error:
            raise DataError(f"{dataset.location(index)}: {error}") from error
        if not prompt_ids or len(prompt_ids) + len(ids) > max_tokens:
            raise DataError(
                f"{dataset.location(index)}: prompt and response have {len(prompt_ids)} + {len(ids)} tokens; "
                f"the prompt needs at least 1, and the model's context is {max_tokens}; remove the row"
            )
        examples.append((prompt_ids, ids))
    return examples


def shuffled_batches(examples: Sequence[SftExample], size: int, seed: int) -> Iterator[list[SftExample]]:
    """Endless batches; each epoch has every example once, in an order of its own."""
    source, pending = random.Random(seed), list[SftExample]()
    while True:
        while len(pending) < size:
            pending += source.sample(examples, len(examples))
        yield pending[:size]
        pending = pending[size:]
