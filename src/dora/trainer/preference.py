"""Online DPO: the best and the worst response of a group as a preference pair.

Off-policy by construction: its loss has no ratio to the policy that sampled (arXiv 2410.18252).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def online_dpo_loss(
    logprobs: Tensor, reference_logprobs: Tensor, num_tokens: Sequence[int], beta: float
) -> tuple[Tensor, Tensor]:
    """-log sigmoid(beta * margin) of every pair, shared out to its tokens (arXiv 2305.18290, eq. 7).

    The responses come in pairs, best first (`advantage.best_and_worst` names them), so `num_tokens`
    has an even length. margin = (log policy - log reference) of the best response minus that of the
    worst, each summed over its tokens. Each response's tokens add up to its pair's loss, so
    seq-mean-token-sum over the responses is the mean over pairs. All [N]; the second result says
    which tokens belong to a pair in the wrong order (margin below 0).
    """
    lengths = list(num_tokens)
    sums = torch.stack([part.sum() for part in (logprobs - reference_logprobs).split(lengths)])
    margins = sums[0::2] - sums[1::2]
    losses = F.softplus(-beta * margins).repeat_interleave(2)
    spread = torch.tensor(lengths, device=logprobs.device)
    is_wrong = (margins.detach() < 0).repeat_interleave(2)
    return (losses / spread).repeat_interleave(spread), is_wrong.repeat_interleave(spread)
