from pathlib import Path

import pytest
from tests.engine.moving import Stage


@pytest.fixture(params=["eager", "numba"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    """A stage for engines of either kernels."""
    return Stage(tmp_path, request.param)
