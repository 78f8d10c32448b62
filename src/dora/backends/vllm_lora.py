r"""vLLM with several versions of a policy at once, which LoRA trains: each is an adapter of one server.

[engine]
adapter = "vllm-lora"
options = { python = "/path/to/vllm/bin/python", rank = 8 }
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from dora.backends.inside.dora_digest import digest_of
from dora.backends.low_rank import FILE, adapter_of, write_adapter
from dora.backends.server import Body
from dora.backends.vllm import Vllm
from dora.backends.words import Row
from dora.engine.sequence import EngineError
from dora.errors import ConfigError
from dora.model.folder import load_folder
from dora.model.weights import weight_digest
from dora.weights.store import make_store_folder

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for


class VllmLora(Vllm):
    """A vLLM server of the model that the run began with, and adapters of it."""

    capabilities = replace(Vllm.capabilities, max_versions=None, are_adapters=True, dtypes=("float32",))

    @classmethod
    def check_options(cls, *, rank: object = 0, **others: object) -> None:
        """The same, and vLLM has room for adapters of this rank."""
        super().check_options(**others)
        _room_for(rank)

    def __init__(
        self,
        *,
        model: str,
        max_rows: int,
        max_context: int,
        version_slots: int,
        device: str,
        dtype: str,
        rank: int,
        python: str | None = None,
        url: str | None = None,
        arguments: Sequence[str] = (),
        silence_s: float = 60.0,
    ) -> None:
        """`rank` is that of the adapters; all else is as in `Vllm`."""
        slots, room = f"{version_slots}", _room_for(rank)
        own = ("--enable-lora", "--max-loras", slots, "--max-cpu-loras", slots, "--max-lora-rank", f"{room}")
        super().__init__(
            model=model,
            max_rows=max_rows,
            max_context=max_context,
            version_slots=1,
            device=device,
            dtype=dtype,
            python=python,
            url=url,
            arguments=(*own, *arguments),
            silence_s=silence_s,
        )
        self.num_slots, self._rank, self._folders = version_slots, rank, dict[int, Path]()
        _, self._base = load_folder(Path(model))
        if super()._give("dora-base", self._base) != weight_digest(self._base):
            raise EngineError(f"{self.server} has not taken the weights of {model}")

    def load(self, version: int, source: Tensor) -> str:
        digest = super().load(version, source)
        self._folders[version] = self._given
        return digest

    def drop(self, version: int) -> None:
        label = self._labels.get(version, "")
        super().drop(version)
        self.server.tell("/v1/unload_lora_adapter", {"lora_name": label})
        shutil.rmtree(self._folders.pop(version), ignore_errors=True)

    def close(self) -> None:
        super().close()
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)

    def _give(self, label: str, source: Tensor) -> str:
        """The digest of the merged weights, once the server has read the adapter that leads to them."""
        tensors = adapter_of(self._layout, self._base, source, self._rank)
        folder = make_store_folder(sum(tensor.nbytes for tensor in tensors.values()))
        write_adapter(folder, tensors, self._rank)
        path = str(folder / FILE)
        order = {"method": "dora_digest", "args": [path]}
        try:
            if set(self.server.call("/collective_rpc", order)["results"]) != {digest_of(path)}:
                raise EngineError(f"{self.server} has read another adapter than it was given")
            self.server.tell("/v1/load_lora_adapter", {"lora_name": label, "lora_path": str(folder)})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._given = folder  # the server may read it again until the version is dropped
        return weight_digest(source)

    def _drew(self, version: int) -> str:
        return "dora-base"

    def _ask(self, row: Row) -> tuple[str, Body]:
        path, body = super()._ask(row)
        return path, {**body, "model": self._labels[row.request.version]}


def _room_for(rank: object) -> int:
    """The least of `RANKS` that a rank fits in. Raises ConfigError."""
    if isinstance(rank, int) and 0 < rank <= RANKS[-1]:
        return next(room for room in RANKS if room >= rank)
    raise ConfigError(f"rank = {rank!r}: vLLM has room for 1 to {RANKS[-1]}")
