"""The digest of weights is the same on all devices, and every byte counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dora.engine.backends.server_plugins import dora_digest
from dora.model.digest import LEAF_BYTES, LEAF_WORDS, PIECE_BYTES, combine
from dora.model.weights import copy_with_digest, device_leaf_sums, weight_digest

SIZES = (0, 1, 3, LEAF_WORDS - 1, LEAF_WORDS, 40 * LEAF_WORDS + 7, PIECE_BYTES // 2 + 5)
DTYPES = (torch.float32, torch.bfloat16)


def numbers(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_integer_operations_of_a_device_give_the_digest_of_the_threads(
    numel: int, dtype: torch.dtype
) -> None:
    flat = numbers(numel, dtype)
    assert combine([device_leaf_sums(flat)], flat.nbytes) == weight_digest(flat)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_a_copy_has_the_digest_of_its_rounded_bytes(numel: int, dtype: torch.dtype) -> None:
    flat, target = numbers(numel), torch.ones(numel, dtype=dtype)
    assert copy_with_digest(target, flat) == weight_digest(flat.to(dtype))
    assert torch.equal(target, flat.to(dtype))


@pytest.mark.parametrize("numel", SIZES)
def test_bytes_that_arrive_in_parts_have_the_digest_of_all(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dora_digest, "_BUFFER_BYTES", 2 * LEAF_BYTES)
    flat, arriving = numbers(numel), dora_digest.StreamDigest()
    for part in flat.split(max(1, numel // 7)):
        arriving.add(part.view(torch.uint8).numpy())
    assert arriving.digest() == weight_digest(flat)


def test_the_digest_is_the_same_in_every_release() -> None:
    """Digests are in the journals of runs: a change needs another schema of the journal."""
    assert weight_digest(torch.arange(10_000, dtype=torch.float32)) == "4ff19195431eb3c1712da2d73634e968"


def test_equal_numbers_of_other_bytes_and_other_lengths_differ() -> None:
    flats = [torch.zeros(n) for n in (1, 2, LEAF_WORDS, LEAF_WORDS + 1)] + [-torch.zeros(1)]
    assert len({weight_digest(flat) for flat in flats}) == len(flats)


def test_changes_of_high_bits_and_exchanged_parts_do_not_cancel() -> None:
    flat = numbers(4 * LEAF_WORDS)
    negated, exchanged, swapped = flat.clone(), flat.roll(LEAF_WORDS), flat.clone()
    negated[:2] *= -1
    swapped[[0, 1]] = flat[[1, 0]]
    digests = {weight_digest(each) for each in (flat, -flat, negated, exchanged, swapped)}
    assert len(digests) == 5
