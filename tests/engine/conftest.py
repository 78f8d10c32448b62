from pathlib import Path

import pytest
from tests.engine.engine_cluster import EngineCluster

from dora.engine import block_manager
from dora.engine import engine as engine_module
from dora.engine.cuda_graphs import CUDAGraphRunner
from dora.engine.kv_transfer import transfer


@pytest.fixture(params=["eager", "numba", "staged", "one step ahead", "ipc"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineCluster:
    """Engines of either kernels, which decode a request while its KV is copied, however little it is.

    "staged": its KV is private, as on a GPU, and the staging area is small. "one step ahead": as well, and
    engines compute a step before they know the tokens of the last one. "ipc": an engine opens the KV of the
    others, as on GPUs.
    """
    monkeypatch.setattr(transfer, "_MAX_STOPPED_BYTES", 0)
    if request.param == "one step ahead":
        monkeypatch.setattr(engine_module, "ModelRunner", CUDAGraphRunner)
    if request.param in ("staged", "one step ahead"):
        monkeypatch.setattr(block_manager, "_STAGING_BYTES", 0)
        return EngineCluster(tmp_path, "numba", kv_transfer="staged")
    if request.param == "ipc":
        return EngineCluster(tmp_path, "numba", kv_transfer="ipc")
    return EngineCluster(tmp_path, request.param)
