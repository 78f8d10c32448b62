import numpy as np
import pytest
import torch
from tests.model.families import CONFIGS, STRETCHED, drawn_tokens, drawn_weights, greedy_answer, our_logits
from torch import Tensor

from dora.engine.runner import Prompt, Runner
from dora.engine.workspace import Workspace
from dora.model.config import ModelConfig
from dora.trainer.routes import Replay

MODELS = {**CONFIGS, "stretched": STRETCHED}
BLOCKS_PER_ROW = 3
PROMPTS = [
    tuple(tokens[:length])
    for tokens, length in zip(drawn_tokens(4, 20).tolist(), (1, 9, 17, 20), strict=True)
]
SLOTS = np.array([1, 1, 0, 0])  # of the four prompts


class Decoding:
    """Four rows of two versions, prefilled; `step` decodes them all."""

    def __init__(self, config: ModelConfig, kernels: str) -> None:
        self.flats = [drawn_weights(config, seed) for seed in (0, 1)]
        work = Workspace(config, 5, 48, version_slots=2, num_blocks=16)
        self.runner = Runner(work, kernels)
        for slot, flat in enumerate(self.flats):
            work.slot(slot).copy_(flat)
        self.tokens = [list(prompt) for prompt in PROMPTS]
        self.blocks = torch.randperm(16, generator=torch.Generator().manual_seed(0))[:12].view(4, -1).tolist()
        rows = np.array([4, 0, 2, 1])
        for row, blocks, prompt, slot in zip(rows, self.blocks, PROMPTS, SLOTS, strict=True):
            work.tables[row, :BLOCKS_PER_ROW] = torch.tensor(blocks)
            self.runner.prefill(int(slot), [Prompt(prompt[:-1], 0, blocks)])
        self.runner.arrange(rows, SLOTS)

    def step(self) -> Tensor:
        """Append the likeliest token to every row; the logits [4, vocab] it was chosen by."""
        last = np.array([tokens[-1] for tokens in self.tokens])
        logits = self.runner.decode(last, np.array([len(tokens) - 1 for tokens in self.tokens]))
        for tokens, token in zip(self.tokens, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token)
        return logits.clone()


@pytest.mark.parametrize("kernels", ["eager", "numba"])
@pytest.mark.parametrize("name", MODELS)
def test_two_versions_decode_side_by_side_as_each_would_alone(name: str, kernels: str) -> None:
    config = MODELS[name]
    decoding = Decoding(config, kernels)
    for _ in range(12):
        decoding.step()
    for prompt, tokens, slot in zip(PROMPTS, decoding.tokens, SLOTS, strict=True):
        assert tokens[len(prompt) :] == greedy_answer(config, decoding.flats[slot], prompt, 12)


@pytest.mark.parametrize("name", MODELS)
def test_numba_and_eager_kernels_give_the_same_logits(name: str) -> None:
    decodings = [Decoding(MODELS[name], kernels) for kernels in ("eager", "numba")]
    for _ in range(3):
        eager, numba = (decoding.step() for decoding in decodings)
        torch.testing.assert_close(numba, eager, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", ["eager", "numba"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe-mixed", "qwen3_moe-sparse"])
def test_replaying_the_routes_of_the_engine_gives_its_logits(name: str, kernels: str) -> None:
    config = MODELS[name]
    decoding = Decoding(config, kernels)
    logits = [decoding.step() for _ in range(4)][-1]
    for i, (tokens, blocks) in enumerate(zip(decoding.tokens, decoding.blocks, strict=True)):
        routes = decoding.runner.routes(blocks, len(tokens) - 1)
        assert routes.shape == (len(tokens) - 1, len(config.mixture_layers), config.num_experts_per_tok)
        inputs, flat = torch.tensor([tokens[:-1]]), decoding.flats[SLOTS[i]]
        replayed = our_logits(config, flat, inputs, Replay(config, routes))
        torch.testing.assert_close(replayed[0, -1], logits[i], atol=2e-5, rtol=0)
        turned = Replay(config, (routes + 1) % config.num_experts)
        assert (our_logits(config, flat, inputs, turned)[0, -1] - logits[i]).abs().max() > 1e-2


def test_routes_are_copied_with_the_kv_they_belong_to() -> None:
    decoding = Decoding(MODELS["qwen3_moe"], "eager")
    source = decoding.blocks[3][0]
    free = next(i for i in range(16) if not any(i in blocks for blocks in decoding.blocks))
    routes = decoding.runner.routes([source], 16)
    assert routes.unique().numel() > 2
    decoding.runner.copy_blocks([(source, free)])
    assert torch.equal(decoding.runner.routes([free], 16), routes)
