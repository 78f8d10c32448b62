"""The fixture of all configuration tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.config.minimal import write_minimal


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A minimal configuration file."""
    return write_minimal(tmp_path)
