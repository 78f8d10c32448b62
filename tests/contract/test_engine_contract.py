"""DORA's own engine and that of transformers pass the contract of an inference engine."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from dora.data.tokenizer import Tokenizer
from dora.engine.backends.transformers_engine import Transformers
from dora.engine.engine import Engine
from dora.engine.interface import NATIVE, Capabilities, InferenceEngine, KVTransfer
from dora.loading import load_attribute
from dora.model.pretrained import load_config
from dora.testing.engine_contract import InferenceContract

LIMITED = f"{Path(__file__).with_name('limited_engine.py')}:Limited"  # as in `engine.backend`


class Native:
    """DORA's own engine, with the signature of a backend."""

    capabilities: ClassVar[Capabilities] = NATIVE
    kv_transfer: ClassVar[KVTransfer] = "shared"

    def __new__(  # type: ignore[misc]
        cls,
        *,
        model: str,
        max_rows: int,
        max_context: int,
        version_slots: int,
        device: str,
        dtype: str,
        pool: Path | None = None,
    ) -> InferenceEngine:
        return Engine(
            load_config(Path(model)),
            max_rows=max_rows,
            max_context=max_context,
            version_slots=version_slots,
            kernels="eager",
            dtype=dtype,
            detokenize=Tokenizer(Path(model)).decode,
            device=device,
            pool=pool or Path(model) / "pool",
            kv_transfer=cls.kv_transfer,
        )


class StagedNative(Native):
    """Its KV migrates through host memory, as on a GPU."""

    kv_transfer = "staged"


class IpcNative(Native):
    """Its KV migrates from the memory where it lies, as between GPUs."""

    kv_transfer = "ipc"


class TestNative(InferenceContract):
    factory = Native


class TestStagedNative(InferenceContract):
    factory = StagedNative


class TestIpcNative(InferenceContract):
    factory = IpcNative


class TestTransformers(InferenceContract):
    factory = Transformers


class TestLimited(InferenceContract):
    factory = load_attribute(LIMITED, "factory")
