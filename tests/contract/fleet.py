"""Engines of fake vLLM servers, between which one request migrates."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.contract.fake_server import engine_at
from tests.contract.fake_vllm_server import FakeVllmServer

from dora.engine.backends.vllm import Vllm
from dora.engine.messages import MigrationReply
from dora.model.pretrained import save_pretrained
from dora.testing import CONFIG, make_request, version_weights
from dora.testing.engine_contract import POLL_S, MigrationDriver

REQUEST = make_request(0, max_tokens=30)
NUM_PROMPT = len(REQUEST.prompt_ids)
MAX_POLLS = 10_000


class Fleet:
    """Engines that hold version 0, and a driver of their migrations. Each server's KV has a folder."""

    def __init__(self, folder: Path, **faults: Any) -> None:
        """`faults` of each server: see `FakeVllmServer`."""
        self.folder, self.driver, self._faults = folder, MigrationDriver(folder), faults
        self.servers: list[FakeVllmServer] = []
        save_pretrained(folder / "model", CONFIG, version_weights(0))

    def engine(self, version: int = 0, **faults: Any) -> Vllm:
        """`version` has the weights of version 0."""
        self.servers.append(FakeVllmServer(**self._faults | faults))
        pool = self.pool(len(self.servers) - 1)
        engine = engine_at(Vllm, self.servers[-1].url, self.folder / "model", pool=pool)
        engine.load(0, version_weights(version))
        return engine

    def pool(self, number: int) -> Path:
        return self.folder / f"pool-{number}"

    def source(self, **faults: Any) -> Vllm:
        """An engine that has one token of REQUEST; its server holds back the others."""
        engine = self.engine(holds=True, **faults)
        engine.submit([REQUEST])
        self.driver.step_until_first_token(engine, REQUEST)
        return engine

    def migrate(self, source: Vllm, destination: Vllm) -> list[MigrationReply]:
        """Migrate REQUEST from the first engine with its KV."""
        return self.driver.migrate(REQUEST, source, destination, self.pool(0))

    def export(self, source: Vllm, destination: Vllm, pool: Path | None = None) -> None:
        """Migrate REQUEST until it is exported."""
        assert self.driver.start(REQUEST, source, destination, pool) == []
        for _ in range(MAX_POLLS):
            assert self.driver.poll(source) == []
            if source._migrator.is_exported(REQUEST.id):
                return
            threading.Event().wait(POLL_S)
        pytest.fail("the request is not exported")

    def close(self) -> None:
        for server in self.servers:
            server.close()
