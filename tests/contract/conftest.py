"""The token of the fake servers is in the environment."""

from __future__ import annotations

import pytest
from tests.contract.fake_server import AUTH_TOKEN

from dora.engine.backends.server_plugins import dora_sglang, dora_vllm


@pytest.fixture(autouse=True)
def auth_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for plugin in (dora_sglang, dora_vllm):
        monkeypatch.setenv(plugin.TOKEN_VARIABLE, AUTH_TOKEN)
