from pathlib import Path

import pytest
from tests.engine.engine_cluster import EngineCluster


@pytest.fixture(params=["eager", "numba"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> EngineCluster:
    """Engines of either kernels."""
    return EngineCluster(tmp_path, request.param)
