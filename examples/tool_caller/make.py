"""Make the prompts and the starting model in this folder: it imitates demonstrations with errors.

    python examples/tool_caller/make.py

The model has 0.1 million parameters, a chat template with tools, and one token per digit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import shop
import torch
from rich.progress import track

from dora.data.chat import ChatTemplate, PromptEncoder
from dora.data.tokenizer import Tokenizer, save_bpe_tokenizer
from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights
from dora.trainer.sft import SftExample, train_sft

HERE = Path(__file__).parent
START = HERE / "start"
NUM_STEPS, EPISODES_PER_STEP = 2000, 16
CHAT_TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- for tool in tools -%}
{{ tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')\\n' }}
{%- endfor -%}
{{ 'CALL_FORMAT<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
""".replace("CALL_FORMAT", shop.CALL_FORMAT)


def save_tokenizer() -> None:
    """A vocabulary of all words of the task; digits stay apart, as the texts have none."""
    texts = [
        shop.tools_text(),
        shop.call_text("lookup", item=""),
        shop.call_text("search", item=""),
        shop.call_text("calculate", expression=""),
        "system\n user\n tool\n assistant\n What do cost? error",
        *(f" {item} {item}" for item in shop.ITEMS),
        *shop.ITEMS,
    ]
    save_bpe_tokenizer(START, texts * 2, vocab_size=1000, chat_template=CHAT_TEMPLATE)


def batches(
    rows: list[dict[str, Any]], tokenizer: Tokenizer, encoder: PromptEncoder
) -> Iterator[list[SftExample]]:
    """Endless batches of episodes."""
    source = random.Random(0)
    while True:
        yield [_episode(row, tokenizer, encoder, source) for row in source.sample(rows, EPISODES_PER_STEP)]


def _episode(
    row: Mapping[str, Any], tokenizer: Tokenizer, encoder: PromptEncoder, source: random.Random
) -> SftExample:
    """A conversation. Its prompt and the results of calls are the model's input, not its target."""
    assert encoder.tool_parser is not None
    results, response, mask = list[str](), list[int](), list[int]()
    while True:
        text = shop.demonstration(row, results, source)
        turn = [*tokenizer.encode(text), tokenizer.eos_id]
        response, mask = [*response, *turn], [*mask, *[1] * len(turn)]
        observed = [shop.call_tool(*call, row) for call in encoder.tool_parser(text, shop.TOOLS).calls]
        if not observed:
            return encoder.encode(str(row["prompt"]), shop.TOOLS), response, mask
        results += observed
        messages = [{"role": "tool", "content": result} for result in observed]
        observation = encoder.encode_observation(messages, turn)
        response, mask = [*response, *observation], [*mask, *[0] * len(observation)]


def main() -> None:
    """Write prompts.jsonl, held_out.jsonl and the model folder `start`."""
    torch.set_num_threads(1)
    rows, held_out = shop.rows(random.Random(0))
    for file, part in {"prompts": rows, "held_out": held_out}.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (HERE / f"{file}.jsonl").write_text(text, encoding="utf-8")
    save_tokenizer()
    tokenizer = Tokenizer(START)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    flat = initial_weights(config, seed=0)
    demonstrations = batches(rows, tokenizer, PromptEncoder(tokenizer, ChatTemplate(START)))
    losses = train_sft(config, flat, demonstrations, NUM_STEPS, lr=3e-3, micro_batch_tokens=4096)
    last = [loss for loss in track(losses, "tool_caller", total=NUM_STEPS)][-1]
    save_pretrained(START, config, flat)
    print(f"{flat.numel():,} parameters, loss {last:.3f} after {NUM_STEPS} steps; written to {START}")


if __name__ == "__main__":
    main()
