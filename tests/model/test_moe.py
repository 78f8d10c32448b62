import pytest
import torch
from tests.model.families import CONFIGS, compute_logits, random_tokens, random_weights
from torch import Tensor
from torch.nn import functional as F

from dora.model.moe import RecordingRouter, StackedExperts, mix_experts
from dora.trainer.routing_replay import ReplayRouter

CONFIG = CONFIGS["qwen3_moe-mixed"]
FLAT, TOKENS = random_weights(CONFIG), random_tokens(2, 15)


def recorded() -> tuple[Tensor, Tensor]:
    recorder = RecordingRouter(CONFIG)
    logits = compute_logits(CONFIG, FLAT, TOKENS, recorder)
    return logits, recorder.routes


def test_replayed_routes_give_the_same_logits() -> None:
    logits, routes = recorded()
    assert routes.shape == (30, 2, 2)
    assert routes.dtype == torch.int16
    assert torch.equal(compute_logits(CONFIG, FLAT, TOKENS, ReplayRouter(CONFIG, routes)), logits)
    assert torch.equal(compute_logits(CONFIG, FLAT, TOKENS), logits)


def test_a_replay_overrides_the_router_except_where_it_is_negative() -> None:
    logits, routes = recorded()
    changed = routes.clone()
    changed[:15] = -1  # the router routes the first sequence
    changed[15:] = (changed[15:] + 1) % CONFIG.num_experts
    replayed = compute_logits(CONFIG, FLAT, TOKENS, ReplayRouter(CONFIG, changed))
    assert torch.allclose(replayed[0], logits[0], atol=1e-5)
    assert (replayed[1] - logits[1]).abs().max() > 0.01


def test_experts_are_called_with_their_own_tokens_only() -> None:
    x = torch.arange(6.0).view(3, 2)
    ids, weights = (
        torch.tensor([[2, 0], [2, 4], [0, 2]]),
        torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]),
    )
    calls: dict[int, list[float]] = {}

    def expert(number: int, part: Tensor) -> Tensor:
        calls[number] = part[:, 0].tolist()
        return part * number

    found = mix_experts(x, ids, weights, expert)
    assert calls == {0: [0.0, 4.0], 2: [0.0, 2.0, 4.0], 4: [2.0]}
    assert torch.equal(found, x * (ids * weights).sum(1, keepdim=True))


@pytest.mark.parametrize(("hidden", "inner"), [(16, 12), (16, 6), (10, 12)], ids=["even", "odd", "odd too"])
@pytest.mark.parametrize("num_experts", [3, 40])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 50])
def test_stacked_experts_compute_what_single_ones_do(
    num_tokens: int, num_experts: int, hidden: int, inner: int
) -> None:
    source = torch.Generator().manual_seed(0)
    gate_up = torch.randn(num_experts, 2, inner, hidden, generator=source)
    down = torch.randn(num_experts, hidden, inner, generator=source)
    x = torch.randn(num_tokens, hidden, generator=source)
    weights, ids = torch.randn(num_tokens, num_experts, generator=source).softmax(-1).topk(2)

    def expert(number: int, part: Tensor) -> Tensor:
        gate, up = (part @ matrix.T for matrix in gate_up[number])
        return F.linear(F.silu(gate) * up, down[number])

    stacked = StackedExperts(num_experts, gate_up.view(-1, hidden), down.view(-1, inner))
    torch.testing.assert_close(
        stacked.mix(x, ids, weights), mix_experts(x, ids, weights, expert), atol=1e-4, rtol=0
    )
