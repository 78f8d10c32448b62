"""Versions that are LoRA adapters, in a server that holds the initial model.

The server computes with several adapters in one step. Adapters need little memory, and a load moves little.
"""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dora.engine.backends.http_engine import HttpEngine
from dora.engine.backends.server_plugins.dora_digest import ADAPTER_FILE, safetensors_digest
from dora.engine.request import EngineError
from dora.errors import ConfigError
from dora.model.config import ModelConfig
from dora.model.pretrained import load_pretrained
from dora.model.weights import WeightLayout, weight_digest
from dora.weights.store import make_store_folder
from dora.weights.version_file import map_version

BASE_LABEL = "dora-base"  # of the initial model


@dataclass(kw_only=True, eq=False, repr=False)
class LoraVersions(HttpEngine):
    """An engine whose server holds the initial model, and an adapter for each version.

    A subclass names this class before that of its server, whose own arguments it does not have. `rank` is
    that of the adapters, trainer.lora_rank.
    """

    rank: int

    capabilities = replace(
        HttpEngine.capabilities,
        decode_only=0,
        versions_are_lora=True,
        inflight_update=False,
        kv_transfer=False,
        dtypes=("float32",),
    )

    @classmethod
    def check_options(cls, **options: object) -> None:
        """As `HttpEngine.check_options`."""
        if "kv_connector" in options:
            raise ConfigError(
                "kv_connector has no effect: with adapters, requests migrate without KV; remove it"
            )
        super().check_options(**options)

    def __post_init__(self) -> None:
        self.arguments = (*self._lora_flags(), *self.arguments)
        self._folders: dict[str, Path] = {}  # by label; the server may read them until the adapter is dropped
        _, self._base = load_pretrained(Path(self.model))
        super().__post_init__()
        if self._is_multi_version:
            raise EngineError(
                f"{self.server} has slots for full weights, which adapters cannot use: start it without them"
            )
        self._check_base()

    @property
    def _num_server_slots(self) -> int:
        return 1

    @abstractmethod
    def _lora_flags(self) -> Sequence[str]:
        """Flags of a server for the adapters. Raises ConfigError for a rank that it does not serve."""

    @abstractmethod
    def _check_base(self) -> None:
        """Raises EngineError if the server has another initial model, or cannot hold `num_slots` adapters."""

    @abstractmethod
    def _load_adapter(self, label: str, folder: Path) -> str:
        """Load the adapter in a folder under a name. Returns the digest of the file that the server reads."""

    @abstractmethod
    def _unload_adapter(self, label: str) -> None:
        """Requests of the adapter have ended."""

    def start_load(self, version: int, path: Path) -> Future[str]:
        """An adapter is factored from the merged weights, so it is not in the file."""
        return self._start_load(version, lambda label: self._send_weights(label, map_version(path)[1]))

    def close(self) -> None:
        super().close()
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)

    def _unload(self, label: str) -> None:
        self._wait_for_dropped_versions()
        self._unload_adapter(label)
        shutil.rmtree(self._folders.pop(label), ignore_errors=True)

    def _send_weights(self, label: str, source: Tensor) -> str:
        """Load the adapter of a version. Returns the digest of its merged weights."""
        tensors = lora_adapter(self._config, self._base, source, self.rank)
        folder = make_store_folder(sum(tensor.nbytes for tensor in tensors.values()))
        try:
            write_adapter(folder, tensors, self.rank, self._config.linear_names)
            if self._load_adapter(label, folder) != safetensors_digest(str(folder / ADAPTER_FILE)):
                self._unload_adapter(label)
                raise EngineError(f"{self.server} has read another adapter than was written to {folder}")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._folders[label] = folder
        return weight_digest(source)


# A version is published as merged matrices, W0 + B A. To serve it as an adapter, B and A are recovered from
# the difference, whose rank is theirs except for rounding.

_ROUNDING = 2.0**-18  # tolerance relative to a matrix's largest weight: 32 times the rounding of fp32
_OVERSAMPLING = 4  # random vectors beyond the rank


def lora_adapter(config: ModelConfig, base: Tensor, flat: Tensor, rank: int) -> dict[str, Tensor]:
    """The tensors of the adapter from `base` to `flat` (both [numel], fp32), by PEFT's names.

    Raises EngineError if they differ by more than matrices of this rank in linear layers.
    """
    layout, linears = WeightLayout(config), tuple(f".{name}.weight" for name in config.linear_names)
    adapter: dict[str, Tensor] = {}
    after = layout.views(flat)
    for name, before in layout.views(base).items():
        if not name.endswith(linears):
            if not torch.equal(before, after[name]):
                raise EngineError(
                    f"{name} has changed, which a LoRA adapter cannot represent; set engine.backend = vllm"
                )
            continue
        delta = after[name].double() - before.double()
        b, a = low_rank_factors(delta, rank)
        if (delta - b @ a).abs().max() > _ROUNDING * after[name].abs().max():
            raise EngineError(
                f"{name} has changed by a matrix whose rank is above {rank}; set rank in engine.options to "
                "trainer.lora_rank"
            )
        module = name.removesuffix(".weight")
        adapter[f"base_model.model.{module}.lora_A.weight"] = a.float().contiguous()
        adapter[f"base_model.model.{module}.lora_B.weight"] = b.float().contiguous()
    return adapter


def low_rank_factors(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B [out, rank] and A [rank, in] whose product approximates `delta` [out, in], by a randomized SVD.

    Halko, Martinsson, Tropp (arXiv 0909.4061): random images of a low-rank matrix span its range.
    """
    num_out, num_in = delta.shape
    source = torch.Generator().manual_seed(0)
    images = delta @ torch.randn(
        num_in, min(rank + _OVERSAMPLING, num_in), generator=source, dtype=delta.dtype
    )
    basis = torch.linalg.qr(images).Q
    u, sizes, v = torch.linalg.svd(basis.T @ delta, full_matrices=False)
    b, a = torch.zeros(num_out, rank, dtype=delta.dtype), torch.zeros(rank, num_in, dtype=delta.dtype)
    num = min(rank, sizes.numel())
    b[:, :num], a[:num] = basis @ u[:, :num], sizes[:num, None] * v[:num]
    return b, a


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int, modules: Sequence[str]) -> None:
    """Write an adapter in PEFT's format."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,  # the scale is a part of A and B
        "target_modules": [*modules],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(tensors), folder / ADAPTER_FILE)
