"""An engine in a file of its own that holds one version and decodes all requests or none."""

from __future__ import annotations

from collections.abc import Iterable

from dora.core.types import RequestId
from dora.engine.backends.transformers_engine import Transformers
from dora.engine.interface import Capabilities
from dora.engine.request import EngineError


class Limited(Transformers):
    capabilities = Capabilities(max_versions=1, is_seeded=True, pauses=True)

    def __init__(
        self, *, model: str, max_rows: int, max_context: int, version_slots: int, device: str, dtype: str
    ) -> None:
        super().__init__(
            model=model,
            max_rows=max_rows,
            max_context=max_context,
            version_slots=version_slots,
            device=device,
            dtype=dtype,
        )

    def decode_only(self, ids: Iterable[RequestId]) -> None:
        if {*ids}:
            raise EngineError("this engine cannot decode some requests only")
