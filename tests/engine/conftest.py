from pathlib import Path

import pytest
from tests.engine.engine_cluster import EngineCluster

from dora.engine.kv_transfer import transfer


@pytest.fixture(params=["eager", "numba"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineCluster:
    """Engines of either kernels, which decode a request while its KV is copied, however little it is."""
    monkeypatch.setattr(transfer, "_MAX_STOPPED_BYTES", 0)
    return EngineCluster(tmp_path, request.param)
