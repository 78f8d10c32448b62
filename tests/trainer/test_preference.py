import math

import pytest
import torch

from dora.trainer.preference import online_dpo_loss


def test_online_dpo_is_the_logistic_loss_of_the_margin_over_the_reference() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -2.0, -1.0], dtype=torch.float64)
    losses, is_wrong = online_dpo_loss(logprobs, reference, [2, 1], beta=0.5)
    # Sums over the reference: best 0.5 + 1, worst -1; margin 2.5, times beta 1.25.
    loss = math.log(1.0 + math.exp(-1.25))
    assert losses.tolist() == pytest.approx([loss / 2, loss / 2, loss])
    assert not is_wrong.any()
    # Averaged over responses, d loss / d log p is -beta * sigmoid(-1.25) for the best, + for the worst.
    (slope,) = torch.autograd.grad(losses.sum() / 2, logprobs)
    push = 0.5 / (1.0 + math.exp(1.25))
    assert slope.tolist() == pytest.approx([-push, -push, push])


def test_a_pair_in_the_wrong_order_is_told() -> None:
    _, is_wrong = online_dpo_loss(torch.tensor([-3.0, -1.0, 0.0, -1.0]), torch.zeros(4), [1, 1, 1, 1], 0.1)
    assert is_wrong.tolist() == [True, True, False, False]
