"""Faults of vLLM and SGLang servers, in runs whose engines they are."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
from fault_kinds import KINDS, SLOW_S, Fault, Inject, in_engine, slow_down

from dora.engine.backends.server_plugins.dora_kv_files import HEADER_BYTES
from dora.runtime.executor import LiveRun
from dora.runtime.process.worker_process import Worker

NUM_SERVERS, NUM_SLOTS = 2, 2
SILENCE_S = 4.0  # as the run's heartbeat_timeout_s
NUM_KV_TOKENS = 640  # less than 8 requests of the longest length need
POLL_S = 0.0005  # between two looks for exported KV, which is there for a few milliseconds
KV_DAMAGED = "engine's exported KV damaged"


def on_servers(backend: str, python: str, kv_connector: str | None) -> list[str]:
    """Settings of a run with servers that migrate requests and often have no room for more KV."""
    if backend == "vllm":
        arguments = ["--num-gpu-blocks-override", str(NUM_KV_TOKENS // 32)]
    else:
        arguments = ["--max-total-tokens", str(NUM_KV_TOKENS)]
    connector = "" if kv_connector is None else f", kv_connector = {json.dumps(kv_connector)}"
    return [
        f"engine.backend={backend}",
        f"engine.options={{python = {json.dumps(python)}, silence_s = {SILENCE_S}, "
        f"arguments = {json.dumps(arguments)}{connector}}}",
        f"engine.num_engines={NUM_SERVERS}",
        f"engine.version_slots={NUM_SLOTS}",
        "orchestrator.prioritize_stragglers=true",
        "orchestrator.balance_running=true",
        "orchestrator.rebalance_interval_s=0.2",
    ]


def send_to_server(worker: Worker, number: signal.Signals) -> None:
    """Signal all processes of an engine's server, but not the one that ends the server with its engine."""
    assert worker.process.pid is not None
    for process in psutil.Process(worker.process.pid).children(recursive=True)[1:]:
        process.send_signal(number)


def damage_exported_kv(run: LiveRun, number: int) -> Fault:
    """The next KV that a server exports has another byte once it is whole; the run goes on."""
    is_damaged = threading.Event()
    pools = [*run.executor.engine_pool._kv_pools.values()]

    def watch() -> None:
        while not is_damaged.is_set():
            with suppress(FileNotFoundError):  # a folder that has been renamed meanwhile
                if any(_damage(file) for pool in pools for file in pool.glob("*/*.kv")):
                    is_damaged.set()
            time.sleep(POLL_S)

    threading.Thread(target=watch, daemon=True).start()
    return Fault("engine", None, lambda run: is_damaged.is_set())


def _damage(file: Path) -> bool:
    """Change a byte of a file that no server writes any more. False if it is not there any more."""
    if file.parent.suffix == ".part":
        return False
    try:
        with file.open("r+b") as opened:
            opened.seek(HEADER_BYTES)
            byte = opened.read(1)[0]
            opened.seek(HEADER_BYTES)
            opened.write(bytes([byte ^ 1]))
    except FileNotFoundError:
        return False
    return True


OF_PROCESSES = ("engine killed", "trainer killed", "reward worker killed", "engine stopped")
SERVER_KINDS: dict[str, Inject] = {
    **{kind: KINDS[kind] for kind in OF_PROCESSES},
    "engine's server killed": partial(in_engine, partial(send_to_server, number=signal.SIGKILL)),
    "engine's server stopped": partial(in_engine, partial(send_to_server, number=signal.SIGSTOP)),
    "engine's server ten times slower": partial(
        in_engine, partial(slow_down, send=send_to_server), lasts_s=SLOW_S
    ),
    KV_DAMAGED: damage_exported_kv,
}
