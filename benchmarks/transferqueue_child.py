"""Ascend's TransferQueue, in its own environment, for `stream.py --transferqueue-python`.

    PYTHON transferqueue_child.py

It reads {"num_consumers": [...], "num_ones": n, "loads": [[batches, rows, values], ...]} and writes one line:
{"version": ..., "ones": [[consumers, [put_s, get_s]], ...], "many": [[load, consumers, s], ...]}. Its
controller polls, for else a get that comes too early keeps everybody waiting for seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from importlib.metadata import version
from typing import Any

from stream_traffic import NUM_WARM, Array, Load, peer, values

PARTITION, FIELDS, TASK = "rows", ["ids", "logprobs"], "actor"
POLL_S = 0.0005


def connect(address: str | None) -> Any:
    """The client of this process, and at the first call the controller and two storage units."""
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


class Putter:
    """Puts dictionaries of tensors."""

    def __init__(self, client: Any) -> None:
        self._client, self._torch = client, import_module("torch")
        self._columns: dict[tuple[int, int], Any] = {}

    def put(self, num_rows: int, num_values: int) -> None:
        shape = num_rows, num_values
        if shape not in self._columns:
            columns = map(self._torch.from_numpy, values(*shape))
            made = import_module("tensordict").TensorDict(dict(zip(FIELDS, columns, strict=True)), num_rows)
            self._columns[shape] = made
        self._client.put(self._columns[shape], partition_id=PARTITION)


class Getter:
    """Asks until there are enough rows."""

    def __init__(self, address: str) -> None:
        self._client = connect(address)
        self._meta: Any = None

    def get(self, num_rows: int, until_s: float) -> list[Array] | None:
        while time.monotonic() < until_s:
            meta = self._client.get_meta(FIELDS, num_rows, PARTITION, mode="fetch", task_name=TASK)
            if meta.size:
                self._meta = meta
                data = self._client.get_data(meta)
                return [row.numpy() for name in FIELDS for row in data[name]]
            time.sleep(POLL_S)
        return None

    def done(self) -> None:
        self._client.clear_samples(self._meta)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints must not get between the answers
    order = json.loads(sys.stdin.readline())
    putter = Putter(connect(None))
    address = import_module("ray").get_runtime_context().gcs_address
    found: dict[str, Any] = {"version": version("TransferQueue"), "ones": [], "many": []}
    for num in order["num_consumers"]:
        with peer(Getter, address, num) as consumers:
            consumers.one_by_one(putter, 5, 512)
            found["ones"].append([num, consumers.one_by_one(putter, order["num_ones"], 512)])
            for load in (Load(*sizes) for sizes in order["loads"]):
                warm = load._replace(num_batches=NUM_WARM)
                consumers.all_at_once(putter, warm, load.num_rows // num)
                s = consumers.all_at_once(putter, load, load.num_rows // num)
                found["many"].append([load, num, s])
    print(json.dumps(found), file=answers, flush=True)
    answers.close()
    import_module("ray").shutdown()


if __name__ == "__main__":
    main()
