"""Linear layers and attention of the numba kernels, for vectors of odd sizes, against torch."""

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from dora.engine.kernels.numba_kernels import NumbaLinear, attention_output, attention_scores


def linear(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(x), len(weights)), torch.nan)
    NumbaLinear(weights, bias)(x, out=out)
    return out


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 33])
@pytest.mark.parametrize(("width", "num_columns"), [(1, 1), (5, 3), (24, 7), (128, 96), (1000, 33)])
def test_a_linear_layer_of_any_size_computes_what_torch_does(
    num_rows: int, width: int, num_columns: int
) -> None:
    x, weights, bias = torch.randn(num_rows, width), torch.randn(num_columns, width), torch.randn(num_columns)
    torch.testing.assert_close(linear(x, weights), x @ weights.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(linear(x, weights, bias), x @ weights.T + bias, rtol=1e-4, atol=1e-4)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    x, weights = torch.randn(33, 200), torch.randn(70, 200)
    whole = linear(x, weights)
    for start, stop in ((0, 1), (4, 6), (7, 10), (0, 32), (20, 33)):
        assert torch.equal(linear(x[start:stop], weights), whole[start:stop])


@pytest.mark.parametrize("dim", [4, 16, 40, 64, 80])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_attention_computes_what_torch_does_for_any_head_size(dim: int, group: int) -> None:
    kv_heads, length, layer = 2, 37, 1
    kv, table = torch.randn(3, 2, 2, 16, kv_heads, dim), np.array([2, 0, 1])
    q, out = torch.randn(kv_heads * group, dim), torch.zeros(kv_heads * group, dim)
    scores = torch.zeros(kv_heads * group, 48)
    keys, values = kv[table, layer].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 2)
    attention_scores(q.numpy(), kv.numpy(), layer, table, length, scores.numpy())
    expected = torch.einsum("hd,thd->ht", q, keys)
    torch.testing.assert_close(scores[:, :length], expected, rtol=1e-4, atol=1e-4)
    attention_output(scores.numpy(), kv.numpy(), layer, table, length, out.numpy())
    torch.testing.assert_close(out, torch.einsum("ht,thd->hd", expected, values), rtol=1e-3, atol=1e-3)
