"""Make the model in this folder: it imitates demonstrations with errors. About 260 CPU-seconds.

python examples/gcd-start/make.py FOLDER
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
from rich.progress import track

from dora.data import gcd
from dora.data.tokenizer import Tokenizer, save_character_tokenizer
from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights
from dora.trainer.sft import SftExample, train_sft

NUM_STEPS = 1600
EXAMPLES_PER_STEP = 32
ERROR_RATE = 0.11  # fraction of wrong steps in demonstrations: RL has to remove them
CONFIG = ModelConfig(
    vocab_size=len(gcd.ALPHABET) + 1,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)


def demonstrations(tokenizer: Tokenizer, source: random.Random) -> Iterator[list[SftExample]]:
    """Endless batches of demonstrations for random training prompts."""
    sys.path.append(str(Path(__file__).parents[1] / "verifiable"))
    chain_with_errors = import_module("chains").chain_with_errors
    rows = gcd.training_rows()
    while True:
        batch: list[SftExample] = []
        for row in source.sample(rows, EXAMPLES_PER_STEP):
            answer = chain_with_errors(row["a"], row["b"], ERROR_RATE, source)
            batch.append((tokenizer.encode(row["prompt"]), [*tokenizer.encode(answer), tokenizer.eos_id]))
        yield batch


def main(folder: Path) -> None:
    """Train from scratch and write a Hugging Face folder."""
    torch.set_num_threads(1)
    save_character_tokenizer(folder, gcd.ALPHABET)
    flat = initial_weights(CONFIG, seed=0)
    batches = demonstrations(Tokenizer(folder), random.Random(0))
    losses = train_sft(CONFIG, flat, batches, NUM_STEPS)
    last = [loss for loss in track(losses, "warm start", total=NUM_STEPS)][-1]
    print(f"loss {last:.3f} after {NUM_STEPS} steps; written to {folder}")
    save_pretrained(folder, CONFIG, flat)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
