"""DORA's own engine keeps the contract of an inference engine, and so does one that it has not written."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from dora.contract.inference import InferenceContract
from dora.data.tokenizer import Tokenizer
from dora.handover.engine import MovingEngine
from dora.loading import load_attribute
from dora.model.folder import load_config
from dora.runtime.stations import NATIVE, Capabilities, InferenceEngine
from dora.turns.engine import TurnTakingEngine

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"


class Native:
    """Made as an adapter is."""

    capabilities: ClassVar[Capabilities] = NATIVE

    def __new__(  # type: ignore[misc]
        cls, *, model: str, max_rows: int, max_context: int, version_slots: int, device: str, dtype: str
    ) -> InferenceEngine:
        own = {"pool": Path(model) / "pool"} if device == "cpu" else {"device": device}
        return (MovingEngine if device == "cpu" else TurnTakingEngine)(
            load_config(Path(model)),
            max_rows=max_rows,
            max_context=max_context,
            version_slots=version_slots,
            kernels="eager",
            dtype=dtype,
            detokenize=Tokenizer(Path(model)).decode,
            **own,
        )


class TestNative(InferenceContract):
    factory = Native


class TestTransformers(InferenceContract):
    """The adapter among the examples keeps it, too."""

    factory = load_attribute(f"{EXAMPLES / 'transformers_engine.py'}:Transformers", "factory")
