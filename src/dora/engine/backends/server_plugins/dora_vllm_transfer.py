"""vLLM's weight transfer for DORA-RL: both ends of a transfer, inside vLLM's own protocol.

    --worker-extension-cls dora_vllm_transfer.TransferExtension
    --weight-transfer-config '{"backend": "dora_nccl"}'

    python -m dora_vllm_transfer dora_nccl http://127.0.0.1:8000 1 < requests

A worker receives weights by vLLM's `nccl` or `ipc` engine, or by `dora_file`, which reads the file of a
version where it lies and needs no GPU. It digests what arrives, in the order of the file. The sender is a
process of its own, beside the adapter: it reads a request {"path": ...} from each line of its input, sends
that version, and writes a line {"error": ...}, which is "" if all went well.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from dora_digest import StreamDigest  # type: ignore[import-not-found]
from dora_vllm import TOKEN_VARIABLE  # type: ignore[import-not-found]
from dora_vllm import WorkerExtension as FileLoader
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    ParamMeta,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.clients import (  # type: ignore[import-not-found]
    HTTPVLLMWeightSyncClient,
)
from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found]
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.ipc_engine import (  # type: ignore[import-not-found]
    IPCTrainerInitInfo,
    IPCWeightTransferEngine,
)
from vllm.distributed.weight_transfer.nccl_engine import (  # type: ignore[import-not-found]
    NCCLTrainerInitInfo,
    NCCLWeightTransferEngine,
)
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

TIMEOUT_S = 600.0


class TransferExtension(FileLoader):  # type: ignore[misc]
    """A mix-in of vLLM's worker, which can also say what the last transfer brought."""

    weight_transfer_engine: Any

    def dora_received_digest(self, version: str) -> str:
        """The digest of the weights that the last transfer brought, those of `version`."""
        self.pack_again(self.model_runner.get_model())
        digest: str = self.record_digest(version, self.weight_transfer_engine.digest)
        return digest


class DigestMixin:
    """Digests the weights that a worker's transfer engine loads, in the order in which they arrive."""

    model: Any
    digest = ""  # of the last transfer

    def start_weight_update(self) -> None:
        super().start_weight_update()  # type: ignore[misc]
        self._arriving = StreamDigest()

    def receive_weights(self, update_info: Any) -> None:
        load = self.model.load_weights
        self.model.load_weights = lambda weights: load(self._observe(weights))
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            del self.model.load_weights

    def finish_weight_update(self) -> None:
        super().finish_weight_update()  # type: ignore[misc]
        self.digest = self._arriving.digest()

    def _observe(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._arriving.add(tensor.contiguous().view(torch.uint8).flatten().cpu().numpy())
            yield name, tensor


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The file of a version."""

    path: str


class FileTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Reads the file of a version where it lies."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, FileUpdateInfo

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """There is nothing to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        with safe_open(update_info.path, "pt") as stored:
            self.model.load_weights((name, stored.get_tensor(name)) for name in stored.offset_keys())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """There is nothing to release."""


class DoraFile(DigestMixin, FileTransfer):
    """`dora_file`."""


class DoraIPC(DigestMixin, IPCWeightTransferEngine):  # type: ignore[misc]
    """`dora_ipc`."""


class DoraNCCL(DigestMixin, NCCLWeightTransferEngine):  # type: ignore[misc]
    """`dora_nccl`."""


class VersionFileSource(WeightSource):  # type: ignore[misc]
    """The tensors of a version's file in the order of the file, one at a time on a device."""

    def __init__(self, device: str) -> None:
        self.path, self._device = "", device

    def metadata(self) -> list[ParamMeta]:
        with safe_open(self.path, "pt") as stored:
            tensors = ((name, stored.get_tensor(name)) for name in stored.offset_keys())
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with safe_open(self.path, "pt") as stored:
            for name in stored.offset_keys():
                yield name, stored.get_tensor(name).to(self._device)


class FileSender:
    """Sends the workers the path of the file to read."""

    def __init__(self, client: Any, source: VersionFileSource) -> None:
        self._client, self._source = client, source
        client.init_weight_transfer_engine({})

    def send_weights(self) -> None:
        self._client.start_weight_update()
        self._client.update_weights({"path": self._source.path})
        self._client.finish_weight_update()


class TokenClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """Calls a server that asks for the auth token of `dora_vllm`."""

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        headers = {
            "Authorization": f"Bearer {os.environ[TOKEN_VARIABLE]}",
            "Content-Type": "application/json",
        }
        content = json.dumps(body or {}).encode()
        request = urllib.request.Request(f"{self.base_url}/{path}", content, headers)
        urllib.request.urlopen(request, timeout=self.timeout).read()


def make_sender(backend: str, url: str, num_workers: int, source: VersionFileSource) -> Any:
    """The sender of a backend, after its handshake with a server's `num_workers` workers."""
    client = TokenClient(url, timeout=TIMEOUT_S)
    if backend == "dora_file":
        return FileSender(client, source)
    init: Any = IPCTrainerInitInfo(rank=0)
    if backend == "dora_nccl":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        init = NCCLTrainerInitInfo("127.0.0.1", port, 1 + num_workers, rank=0)
    return WeightTransferTrainerFactory.trainer_init(init, client=client, source=source)


def main(backend: str, url: str, num_workers: int) -> None:
    """Send a version for each line of the input, until it ends."""
    source, sender = VersionFileSource("cpu" if backend == "dora_file" else "cuda"), None
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM logs to the standard output
    for line in sys.stdin:
        source.path = json.loads(line)["path"]
        error = ""
        try:
            sender = sender or make_sender(backend, url, num_workers, source)
            sender.send_weights()
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
        replies.write(json.dumps({"error": error}) + "\n")
        replies.flush()


for _name, _engine in (("dora_file", DoraFile), ("dora_ipc", DoraIPC), ("dora_nccl", DoraNCCL)):
    WeightTransferEngineFactory.register_engine(_name, _engine)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
