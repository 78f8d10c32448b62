"""The SDPA replacement of the flash-attention kernel in `benchmarks/peers_child.py` computes the same."""

from __future__ import annotations

import torch
from benchmarks.peers_child import attend
from torch.nn.functional import scaled_dot_product_attention


def test_answers_that_share_a_prompt_attend_as_each_answer_alone() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(12, heads, 8) for heads in (4, 2, 2))
    prompt, answers = [0, 1, 2, 3], ([4, 5, 6, 7, 8], [9, 10, 11])
    paths = torch.tensor(prompt + [token for answer in answers for token in prompt + answer])
    starts_q, starts_k = torch.tensor([0, 4, 9, 12]), torch.tensor([0, 4, 13, 20])

    found = attend(
        query, key[paths], value[paths], starts_q, starts_k, 5, 9,
        softmax_scale=0.3, causal=True, window_size=(-1, -1),
    )  # fmt: skip

    for answer in answers:
        tokens = torch.tensor(prompt + answer)
        q, k, v = (x[tokens].transpose(0, 1)[None] for x in (query, key, value))
        alone = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(found[tokens], alone[0].transpose(0, 1))
