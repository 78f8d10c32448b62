"""Which kernel for variable lengths is used, and that cuDNN's attention is not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.model import varlen_twin
from torch.nn.attention import varlen

from dora.engine.runner import causal_attention
from dora.model.attention import torch_varlen, varlen_attention, varlen_layout
from dora.runtime.process.resources import use_device

CPU = torch.device("cpu")


@pytest.fixture
def cudnn_enabled() -> Iterator[None]:
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled)


@pytest.mark.usefixtures("cudnn_enabled")
@pytest.mark.parametrize(("device", "is_enabled"), [("cpu", True), ("cuda", False)])
def test_a_process_on_a_gpu_does_not_use_attention_of_cudnn(device: str, is_enabled: bool) -> None:
    use_device(device)
    assert torch.backends.cuda.cudnn_sdp_enabled() == is_enabled


@pytest.mark.parametrize("varlen_attn", [varlen_twin.varlen_attn, varlen_twin.older_varlen_attn])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_queries_of_a_sequence_are_its_last_tokens(
    varlen_attn: Callable[..., object], kv_heads: int
) -> None:
    num_queries, num_keys = (3, 1, 5), (3, 7, 9)
    q = torch.randn(sum(num_queries), 4, 8)
    k, v = torch.randn(2, sum(num_keys), kv_heads, 8)
    found = torch_varlen(varlen_attn)(q, k, v, varlen_layout(num_queries, num_keys, CPU))
    parts = zip(q.split(num_queries), k.split(num_keys), v.split(num_keys), strict=True)
    torch.testing.assert_close(found, torch.cat([causal_attention(*part) for part in parts]))


def test_the_twin_has_the_arguments_of_torch() -> None:
    own, known = (
        inspect.signature(function).parameters for function in (varlen_twin.varlen_attn, varlen.varlen_attn)
    )
    assert [*own][:7] == [*known][:7]
    assert own.keys() <= known.keys()


def test_there_is_no_kernel_on_a_cpu() -> None:
    assert varlen_attention(torch.zeros(1, 1, 8, dtype=torch.bfloat16)) is None
