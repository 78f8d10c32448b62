"""The KV connector of a vLLM server over NIXL, on a stand-in for vLLM's own.

`real_servers.py` runs it in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.contract.plugins import imported_plugin

from dora.engine.backends.server_plugins import dora_kv_files as kv_files

BLOCK_SIZE, BLOCK_BYTES = 4, 100
Role = Enum("Role", "SCHEDULER WORKER")
Status = Enum("Status", "FINISHED_LENGTH_CAPPED FINISHED_STOPPED")


@dataclass(eq=False)
class Running:
    """A request as vLLM's scheduler has it."""

    request_id: str
    kv_transfer_params: dict[str, Any]
    num_tokens: int = 10
    max_tokens: int = 100
    num_output_tokens: int = 5
    status: Status = Status.FINISHED_LENGTH_CAPPED

    @property
    def num_computed_tokens(self) -> int:
        return self.num_tokens - 1


@dataclass
class NixlScheduler:
    _reqs_need_send: dict[str, float] = field(default_factory=dict)
    _reqs_in_batch: set[str] = field(default_factory=set)
    _reqs_not_processed: set[str] = field(default_factory=set)


class NixlPullConnector:
    """Keeps the blocks of requests with the parameter `do_remote_decode`."""

    def __init__(self, config: Any, role: Role, kv_cache_config: Any) -> None:
        self.engine_id, self.connector_scheduler = config.engine_id, NixlScheduler()
        self.connector_worker = SimpleNamespace(**config.worker)

    def on_new_request(self, request: Running) -> None:
        pass

    def request_finished_all_groups(
        self, request: Running, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, Any]:
        if "do_remote_decode" not in request.kv_transfer_params or not any(block_ids):
            return False, None
        self.connector_scheduler._reqs_need_send[request.request_id] = 50.0
        source = {"remote_engine_id": self.engine_id, "remote_request_id": request.request_id}
        return True, {**source, "remote_block_ids": block_ids}

    def build_connector_meta(self, scheduler_output: Any) -> set[str]:
        return self.connector_scheduler._reqs_in_batch


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`dora_vllm_nixl` with `NixlPullConnector` as its base."""
    kv_transfer = "vllm.distributed.kv_transfer.kv_connector.v1"
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        f"{kv_transfer}.base": {
            "KVConnectorBase_V1": object,
            "KVConnectorMetadata": object,
            "KVConnectorRole": Role,
        },
        f"{kv_transfer}.nixl.connector": {"NixlPullConnector": NixlPullConnector},
        "vllm.logger": {"init_logger": lambda _: SimpleNamespace(warning=lambda *_: None)},
        "vllm.v1.request": {"RequestStatus": Status},
    }
    with imported_plugin(monkeypatch, "dora_vllm_nixl", stand_ins) as module:
        yield module


def connector(module: Any, engine_id: str, role: Role = Role.SCHEDULER, **worker: object) -> Any:
    spec = SimpleNamespace(page_size_bytes=BLOCK_BYTES)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "1"])]
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE),
        parallel_config=SimpleNamespace(world_size=2),
        engine_id=engine_id,
        worker=worker,
    )
    return module.KVNixlConnector(config, role, SimpleNamespace(num_blocks=8, kv_cache_groups=groups))


def halted(source: Any, folder: Path, **changes: Any) -> Running:
    """A request whose export is ordered, after the step in which the server has halted it."""
    request = Running("r1", {"dora_export": str(folder)}, **changes)
    source.on_new_request(request)
    kv_files.order_export(folder)
    assert source.build_connector_meta(None) == {"r1"}  # the workers know it before it is finished
    assert request.max_tokens == 6
    return request


def test_the_ticket_of_a_halted_request_lets_another_server_read_its_blocks(
    module: Any, tmp_path: Path
) -> None:
    source, folder = connector(module, "a"), tmp_path / "export"
    request = halted(source, folder)
    assert source.request_finished_all_groups(request, ([7, 3, 5, 6],)) == (True, None)
    assert request.kv_transfer_params == {"dora_export": str(folder)}
    ticket = kv_files.read_ticket(folder)
    assert (ticket.num_tokens, ticket.num_bytes) == (9, 3 * BLOCK_BYTES * 2 * 2)  # of two layers, two workers
    assert ticket.source["remote_blocks_expiry_time"] == 50.0

    destination = connector(module, "b")
    moved = Running("r2", {"dora_import": str(folder)})
    destination.on_new_request(moved)
    assert moved.kv_transfer_params["remote_block_ids"] == [[7, 3, 5]]  # of all tokens but the last
    assert destination.get_num_new_matched_tokens(moved, 4) == (5, True)
    assert destination.get_num_new_matched_tokens(moved, 9) == (0, False)


def test_a_request_that_stays_frees_the_blocks_of_its_ticket(module: Any, tmp_path: Path) -> None:
    source, folder = connector(module, "a"), tmp_path / "export"
    source.request_finished_all_groups(halted(source, folder), ([7, 3, 5],))
    kept = Running("r2", {"dora_import": str(folder)})
    source.on_new_request(kept)
    assert source.connector_scheduler._reqs_need_send == {"r1": 0.0}
    assert source.get_num_new_matched_tokens(kept, 8) == (0, False)


def test_a_request_that_finishes_before_it_is_halted_is_not_kept(module: Any, tmp_path: Path) -> None:
    source, folder = connector(module, "a"), tmp_path / "export"
    request = halted(source, folder, status=Status.FINISHED_STOPPED)
    assert source.request_finished_all_groups(request, ([7, 3, 5],)) == (False, None)
    assert source.connector_scheduler._reqs_not_processed == {"r1"}
    assert not folder.exists()


def test_a_halted_request_without_blocks_has_no_ticket(module: Any, tmp_path: Path) -> None:
    """Its engine, which waits for the folder of the order, then moves the tokens only."""
    source, folder = connector(module, "a"), tmp_path / "export"
    assert source.request_finished_all_groups(halted(source, folder), ([],)) == (False, None)
    assert source.connector_scheduler._reqs_not_processed == {"r1"}
    assert [*tmp_path.iterdir()] == []


def test_a_ticket_that_cannot_be_written_frees_the_blocks(module: Any, tmp_path: Path) -> None:
    source, folder = connector(module, "a"), tmp_path / "export"
    request = halted(source, folder)
    folder.mkdir()
    (folder / "another").touch()  # the folder of the order cannot replace this one
    assert source.request_finished_all_groups(request, ([7, 3, 5],)) == (True, None)
    assert source.connector_scheduler._reqs_need_send == {"r1": 0.0}
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 8},
        {"source": {}},
        {"source": {"remote_engine_id": "a", "remote_block_ids": [[1, 2, 3]]}},
        {"source": {"remote_engine_id": "a", "remote_blocks_expiry_time": None}},
    ],
    ids=["too few tokens", "empty", "without a lease", "lease unknown"],
)
def test_a_ticket_that_cannot_be_used_is_ignored(
    module: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    source = {"remote_engine_id": "a", "remote_blocks_expiry_time": 5.0, "remote_block_ids": [[1, 2, 3]]}
    kv_files.write_ticket(tmp_path, kv_files.Ticket(9, 0, source)._replace(**changes))
    request = Running("r2", {"dora_import": str(tmp_path)})
    destination = connector(module, "b")
    destination.on_new_request(request)
    assert destination.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_worker_reads_no_blocks_whose_lease_is_over(module: Any) -> None:
    """By a flag of vLLM's. A version of vLLM without it is refused."""
    worker = connector(module, "a", Role.WORKER, _bidirectional_kv_xfer_enabled=False).connector_worker
    assert worker._bidirectional_kv_xfer_enabled
    with pytest.raises(RuntimeError, match=r"vLLM 0\.32\.0 has no _bidirectional"):
        connector(module, "a", Role.WORKER)
