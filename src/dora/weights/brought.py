"""Versions on a machine where the store is not: bytes that somebody brings, read where they were put.

There they lie in the memory that the machine's processes share (Ray's object store), once for all of them.
Nothing is copied before an engine copies them into its buffer.
"""

from __future__ import annotations

import warnings
from collections.abc import Container

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.weights.store import DTYPES


class Brought:
    """What was brought to this process of a store elsewhere; one thread brings, and others fetch."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: the store's."""
        self._dtype, _ = DTYPES[dtype]
        self._brought: dict[int, Tensor] = {}

    def bring(self, version: int, content: NDArray[np.uint8], stored: Container[int]) -> None:
        """A version as `content` gives it ([bytes], not copied); those not among `stored` are forgotten."""
        with warnings.catch_warnings(action="ignore"):  # it must not be written: `fetch` says so, too
            flat = torch.from_numpy(content).view(self._dtype)
        kept = {known: kept for known, kept in self._brought.items() if known in stored}
        self._brought = kept | {version: flat}

    def fetch(self, version: int) -> Tensor:
        """As `WeightStore.fetch`."""
        try:
            return self._brought[version]
        except KeyError as error:
            raise FileNotFoundError(f"version {version} has not been brought to this machine") from error
