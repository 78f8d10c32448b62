"""Ascend's TransferQueue in its own Python environment, for `stream.py --transferqueue-python`.

    PYTHON transferqueue_child.py

Reads {"num_consumers": [...], "num_ones": n, "loads": [[batches, rows, values], ...]} and writes one line:
{"version": ..., "ones": [[consumers, [put_s, get_s]], ...], "many": [[load, consumers, s], ...]}. The
controller is in polling mode: without it, one get that comes too early blocks all clients for seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from importlib.metadata import version
from typing import Any

from stream_traffic import NUM_WARMUP, Array, Load, make_columns, start_consumers

PARTITION, FIELDS, TASK = "rows", ["ids", "logprobs"], "actor"
POLL_S = 0.0005


def connect(address: str | None) -> Any:
    """The client of this process; the first call starts the controller and two storage units."""
    ray, queue, conf = (
        import_module("ray"),
        import_module("transfer_queue"),
        import_module("omegaconf").OmegaConf,
    )
    import_module("torch").set_num_threads(1)
    if not ray.is_initialized():
        settings = {"num_cpus": 4, "include_dashboard": False} if address is None else {"address": address}
        ray.init(log_to_driver=False, logging_level="ERROR", **settings)
        queue.init(conf.create({"controller": {"polling_mode": True}}))
    return queue.get_client()


class TransferQueueProducer:
    """Puts dictionaries of tensors."""

    def __init__(self, client: Any) -> None:
        self._client, self._torch = client, import_module("torch")
        self._columns: dict[tuple[int, int], Any] = {}

    def put(self, num_rows: int, num_values: int) -> None:
        shape = num_rows, num_values
        if shape not in self._columns:
            columns = map(self._torch.from_numpy, make_columns(*shape))
            made = import_module("tensordict").TensorDict(dict(zip(FIELDS, columns, strict=True)), num_rows)
            self._columns[shape] = made
        self._client.put(self._columns[shape], partition_id=PARTITION)


class TransferQueueConsumer:
    """Polls until enough rows are ready."""

    def __init__(self, address: str) -> None:
        self._client = connect(address)
        self._meta: Any = None

    def get(self, num_rows: int, deadline_s: float) -> list[Array] | None:
        while time.monotonic() < deadline_s:
            meta = self._client.get_meta(FIELDS, num_rows, PARTITION, mode="fetch", task_name=TASK)
            if meta.size:
                self._meta = meta
                data = self._client.get_data(meta)
                return [row.numpy() for name in FIELDS for row in data[name]]
            time.sleep(POLL_S)
        return None

    def commit(self) -> None:
        self._client.clear_samples(self._meta)


def main() -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to stdout
    request = json.loads(sys.stdin.readline())
    producer = TransferQueueProducer(connect(None))
    address = import_module("ray").get_runtime_context().gcs_address
    found: dict[str, Any] = {"version": version("TransferQueue"), "ones": [], "many": []}
    for num in request["num_consumers"]:
        with start_consumers(TransferQueueConsumer, address, num) as consumers:
            consumers.one_by_one(producer, 5, 512)
            found["ones"].append([num, consumers.one_by_one(producer, request["num_ones"], 512)])
            for load in (Load(*sizes) for sizes in request["loads"]):
                warm = load._replace(num_batches=NUM_WARMUP)
                consumers.all_at_once(producer, warm, load.num_rows // num)
                s = consumers.all_at_once(producer, load, load.num_rows // num)
                found["many"].append([load, num, s])
    print(json.dumps(found), file=output, flush=True)
    output.close()
    import_module("ray").shutdown()


if __name__ == "__main__":
    main()
