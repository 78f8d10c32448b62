import numpy as np
import pytest
import torch
from tests.model.families import (
    CONFIGS,
    SCALED_ROPE,
    compute_logits,
    greedy_output,
    random_tokens,
    random_weights,
)
from torch import Tensor

from dora.engine.kernels.workspace import Workspace
from dora.engine.request import PrefillInput
from dora.engine.runner import ModelRunner
from dora.model.config import ModelConfig
from dora.trainer.routing_replay import ReplayRouter

MODELS = {**CONFIGS, "scaled RoPE": SCALED_ROPE}
BLOCKS_PER_ROW = 3
PROMPTS = [
    tuple(tokens[:length])
    for tokens, length in zip(random_tokens(4, 20).tolist(), (1, 9, 17, 20), strict=True)
]
SLOTS = np.array([1, 1, 0, 0])  # of the four prompts


class DecodedRows:
    """Four rows of two versions, prefilled; `step` decodes all of them."""

    def __init__(self, config: ModelConfig, kernels: str) -> None:
        self.flats = [random_weights(config, seed) for seed in (0, 1)]
        work = Workspace(config, 5, 48, version_slots=2, num_blocks=16)
        self.runner = ModelRunner(work, kernels)
        for slot, flat in enumerate(self.flats):
            work.slot_weights(slot).copy_(flat)
        self.tokens = [list(prompt) for prompt in PROMPTS]
        self.blocks = torch.randperm(16, generator=torch.Generator().manual_seed(0))[:12].view(4, -1).tolist()
        rows = np.array([4, 0, 2, 1])
        for row, blocks, prompt, slot in zip(rows, self.blocks, PROMPTS, SLOTS, strict=True):
            work.block_tables[row, :BLOCKS_PER_ROW] = torch.tensor(blocks)
            self.runner.prefill(int(slot), [PrefillInput(prompt[:-1], 0, blocks)])
        self.runner.set_batch(rows, SLOTS)

    def step(self) -> Tensor:
        """Append the most probable token to each row; returns the logits [4, vocab]."""
        last = np.array([tokens[-1] for tokens in self.tokens])
        logits = self.runner.decode(last, np.array([len(tokens) - 1 for tokens in self.tokens]))
        for tokens, token in zip(self.tokens, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token)
        return logits.clone()


@pytest.mark.parametrize("kernels", ["eager", "numba"])
@pytest.mark.parametrize("name", MODELS)
def test_two_versions_in_a_batch_decode_as_each_does_alone(name: str, kernels: str) -> None:
    config = MODELS[name]
    rows = DecodedRows(config, kernels)
    for _ in range(12):
        rows.step()
    for prompt, tokens, slot in zip(PROMPTS, rows.tokens, SLOTS, strict=True):
        assert tokens[len(prompt) :] == greedy_output(config, rows.flats[slot], prompt, 12)


@pytest.mark.parametrize("name", MODELS)
def test_numba_and_eager_kernels_give_the_same_logits(name: str) -> None:
    both = [DecodedRows(MODELS[name], kernels) for kernels in ("eager", "numba")]
    for _ in range(3):
        eager, numba = (rows.step() for rows in both)
        torch.testing.assert_close(numba, eager, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", ["eager", "numba"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe-mixed", "qwen3_moe-sparse"])
def test_replayed_routes_give_the_logits_of_the_runner(name: str, kernels: str) -> None:
    config = MODELS[name]
    rows = DecodedRows(config, kernels)
    logits = [rows.step() for _ in range(4)][-1]
    for i, (tokens, blocks) in enumerate(zip(rows.tokens, rows.blocks, strict=True)):
        routes = rows.runner.routes(blocks, len(tokens) - 1)
        assert routes.shape == (len(tokens) - 1, len(config.moe_layers), config.num_experts_per_tok)
        inputs, flat = torch.tensor([tokens[:-1]]), rows.flats[SLOTS[i]]
        replayed = compute_logits(config, flat, inputs, ReplayRouter(config, routes))
        torch.testing.assert_close(replayed[0, -1], logits[i], atol=2e-5, rtol=0)
        shifted = ReplayRouter(config, (routes + 1) % config.num_experts)
        assert (compute_logits(config, flat, inputs, shifted)[0, -1] - logits[i]).abs().max() > 1e-2


def test_routes_are_copied_with_their_kv() -> None:
    rows = DecodedRows(MODELS["qwen3_moe"], "eager")
    source = rows.blocks[3][0]
    free = next(i for i in range(16) if not any(i in blocks for blocks in rows.blocks))
    routes = rows.runner.routes([source], 16)
    assert routes.unique().numel() > 2
    rows.runner.copy_blocks([(source, free)])
    assert torch.equal(rows.runner.routes([free], 16), routes)
