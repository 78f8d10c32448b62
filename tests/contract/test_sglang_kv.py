"""KV of SGLang's requests over NIXL, on a stand-in for NIXL.

`test_sglang_scheduler.py` has the scheduler that uses it, and `real_servers.py` runs both.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract import fake_nixl
from tests.contract.fake_nixl import Agent
from tests.contract.plugins import imported_plugin
from tests.runtime.running import wait_until
from torch import Tensor

from dora.engine.backends.server_plugins import dora_kv_files as kv_files

NUM_SLOTS = 64
SLOTS = [6, 1, 2]  # of the request
Origin = Any
Make = Callable[..., Any]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(Agent, "agents", {})
    with imported_plugin(monkeypatch, "dora_sglang_kv", {fake_nixl.MODULE: fake_nixl.MEMBERS}) as module:
        yield module


@pytest.fixture
def origin(module: Any) -> Origin:
    return module.kv_files.KVOrigin("weights", ("by ticket", "layout"))


def test_an_environment_without_nixl_is_named(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, fake_nixl.MODULE, None)
    with pytest.raises(RuntimeError, match="pip install --no-deps nixl"):
        module.KVOverNixl([], 0)


def layers_of(number: int) -> list[Tensor]:
    return [1000.0 * number + 100 * layer + torch.arange(NUM_SLOTS)[:, None] for layer in range(2)]


def exported(kv: Any, folder: Path, origin: Origin) -> Any:
    """Three slots of KV. Returns the worker's part."""
    folder.mkdir()
    part = kv.write(folder, origin, SLOTS, 3)
    kv.finish(folder, origin, 3, [part])
    return part


def test_a_server_reads_the_kv_of_another_one(module: Any, origin: Origin, tmp_path: Path) -> None:
    """Without the first slots, which it has. The source frees its memory afterwards."""
    source, target = module.KVOverNixl(layers_of(1), 0), module.KVOverNixl(layers_of(2), 0)
    exported(source, tmp_path / "r", origin)
    source.layers[0].zero_()  # another request has the slots now
    assert kv_files.read_ticket(tmp_path / "r").num_bytes == 3 * 2 * 4
    assert target.num_slots(tmp_path / "r") == 3
    target.read(tmp_path / "r", origin, [0, 5], 1)
    assert [layer[[0, 5], 0].tolist() for layer in target.layers] == [[1001.0, 1002.0], [1101.0, 1102.0]]
    wait_until(lambda: not source._arena._taken)
    assert target._arena._taken == {}


def test_a_request_that_stays_has_its_own_kv_again(module: Any, origin: Origin, tmp_path: Path) -> None:
    source = module.KVOverNixl(layers_of(1), 0)
    exported(source, tmp_path / "r", origin)
    source.read(tmp_path / "r", origin, [3, 4, 5], 0)
    assert source.layers[0][[3, 4, 5], 0].tolist() == [1006.0, 1001.0, 1002.0]
    assert source._arena._taken == {}


def test_memory_that_no_server_reads_is_used_again_after_a_lease(
    module: Any, origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that reads it too late finds that."""
    source, target = module.KVOverNixl(layers_of(1), 0), module.KVOverNixl(layers_of(2), 0)
    kept = exported(source, tmp_path / "kept", origin)
    monkeypatch.setattr(module, "LEASE_S", -1.0)
    late = exported(source, tmp_path / "late", origin)
    wait_until(lambda: [*source._exported] == [kept.key])
    monkeypatch.setattr(module, "LEASE_S", 60.0)
    source.layers[0].zero_()
    assert exported(source, tmp_path / "next", origin).address == late.address
    with pytest.raises(module.kv_files.KVFileError, match="checksum"):
        target.read(tmp_path / "late", origin, SLOTS, 0)
    assert target._arena._taken == {}
    target.read(tmp_path / "kept", origin, SLOTS, 0)


def test_kv_without_memory_is_not_offered(module: Any, origin: Origin, tmp_path: Path) -> None:
    """Parts that were freed are used again."""
    arena = module._Arena(3 * 4096)
    first, second, third = (arena.take(4096 - number) for number in range(3))
    assert [part.nbytes for part in (first, second, third)] == [4096, 4095, 4094]
    with pytest.raises(module.kv_files.KVFileError, match="no memory for 1 more bytes"):
        arena.take(1)
    arena.free(second)
    assert arena.take(10).data_ptr() == second.data_ptr()


def test_an_old_ticket_is_not_used(module: Any, origin: Origin, tmp_path: Path) -> None:
    source, target = module.KVOverNixl(layers_of(1), 0), module.KVOverNixl(layers_of(2), 0)
    exported(source, tmp_path / "r", origin)
    os.utime(tmp_path / "r" / kv_files.TICKET_FILE, (0.0, time.time() - 30.0))
    with pytest.raises(module.kv_files.KVFileError, match="has waited 30 s"):
        target.read(tmp_path / "r", origin, SLOTS, 0)


def change_ticket(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / kv_files.TICKET_FILE
    number, (num_tokens, num_bytes, source) = json.loads(path.read_text())
    path.write_text(json.dumps([number, [num_tokens, num_bytes, change(source)]]))


def with_checksum(source: Any) -> Any:
    return source | {"parts": [[*source["parts"][0][:-1], 1]]}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda source: source | {"origin": ["other", ["layout"]]}, "has KV of"),
        (lambda source: source | {"num_slots": 4}, "bytes in 4 slots"),
        (with_checksum, "checksum"),
        (lambda source: source | {"parts": [["key"]]}, "another kind of server"),
        (lambda source: {}, "another kind of server"),
    ],
    ids=["other weights", "size", "damaged", "parts", "another server"],
)
def test_kv_of_something_else_is_refused(
    module: Any, origin: Origin, tmp_path: Path, change: Callable[[Any], Any], error: str
) -> None:
    source, target = module.KVOverNixl(layers_of(1), 0), module.KVOverNixl(layers_of(2), 0)
    exported(source, tmp_path / "r", origin)
    change_ticket(tmp_path / "r", change)
    with pytest.raises(module.kv_files.KVFileError, match=error):
        target.read(tmp_path / "r", origin, SLOTS, 0)
    assert torch.equal(target.layers[0], layers_of(2)[0])


def test_a_server_that_was_killed_cannot_be_read(module: Any, origin: Origin, tmp_path: Path) -> None:
    """Nor one that this server has read before."""
    source, target = module.KVOverNixl(layers_of(1), 0), module.KVOverNixl(layers_of(2), 0)
    exported(source, tmp_path / "r", origin)
    exported(source, tmp_path / "s", origin)
    target.read(tmp_path / "r", origin, SLOTS, 0)
    source._agent.exit()
    for error in ("REMOTE_DISCONNECT", "NIXL_ERR_BACKEND"):
        with pytest.raises(module.kv_files.KVFileError, match=error):
            target.read(tmp_path / "s", origin, SLOTS, 0)
    assert (target._arena._taken, target._agent.known) == ({}, set())


def test_a_read_that_fails_leaves_nothing(
    module: Any, origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = module.KVOverNixl(layers_of(1), 0), module.KVOverNixl(layers_of(2), 0)
    exported(source, tmp_path / "r", origin)
    monkeypatch.setattr(target._agent, "state", "ERR")
    with pytest.raises(module.kv_files.KVFileError, match="REMOTE_DISCONNECT"):
        target.read(tmp_path / "r", origin, SLOTS, 0)
    assert (target._arena._taken, target._agent.known) == ({}, set())
    monkeypatch.setattr(target._agent, "state", "DONE")
    target.read(tmp_path / "r", origin, SLOTS, 0)


def test_memory_into_which_a_read_may_still_write_is_kept(
    module: Any, origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next tickets of a server that does not respond are not tried: all requests would wait again."""
    source, target = module.KVOverNixl(layers_of(1), 0), module.KVOverNixl(layers_of(2), 0)
    other = module.KVOverNixl(layers_of(1), 0)
    exported(source, tmp_path / "r", origin)
    exported(other, tmp_path / "s", origin)
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.01)
    monkeypatch.setattr(target._agent, "state", "PROC")
    with pytest.raises(module.kv_files.KVFileError, match="did not arrive"):
        target.read(tmp_path / "r", origin, SLOTS, 0)
    with pytest.raises(module.kv_files.KVFileError, match="did not respond"):
        target.read(tmp_path / "r", origin, SLOTS, 0)
    assert len(target._arena._taken) == 1
    monkeypatch.setattr(target._agent, "state", "DONE")
    target.read(tmp_path / "s", origin, SLOTS, 0)
    assert target._arena._taken == {}
