"""A KV connector for vLLM: requests move between servers of one machine with their KV, through files.

    --kv-transfer-config '{"kv_connector": "KVFileConnector", "kv_connector_module_path": "dora_vllm_kv",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

A request carries `kv_transfer_params`: `dora_export`, the folder that its KV goes to once an export is
ordered (`dora_kv_files.order_export`), and `dora_import`, the folder that its KV comes from.
Its blocks stay allocated until they are in the files. The server computes the last token of an imported
request only. A folder that is missing, damaged, or of other weights is not used: the prompt is prefilled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dora_kv_files as kv_files  # type: ignore[import-not-found]
import vllm  # type: ignore[import-not-found]
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger  # type: ignore[import-not-found]
from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class Export:
    """Blocks of a request of a version to write into `folder`."""

    request_id: str
    version: str
    folder: Path
    blocks: list[int]
    num_tokens: int


@dataclass(frozen=True)
class Import:
    """Blocks of a request to read from `folder`, without its `first` ones, which the server has cached."""

    version: str
    folder: Path
    blocks: list[int]
    first: int


@dataclass
class Transfers(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in a step."""

    exports: list[Export] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)


class Connector:
    """What the connectors over files and over NIXL have in common.

    A subclass names this class before vLLM's.
    """

    requires_kv_delivery = False
    layout_prefix: tuple[str, ...] = ()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("DORA-RL moves the KV of models whose layers have one kind of attention")
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._block_size = vllm_config.cache_config.block_size
        self._num_blocks = kv_cache_config.num_blocks
        self._num_workers = vllm_config.parallel_config.world_size
        self._orders = kv_files.ExportOrders()
        self._layers: list[Any] = []  # the worker's caches: [blocks, ...] each
        # Of the worker's weights, by the `cache_salt` of requests.
        self.weight_digests: dict[str, str] = {}

    # the scheduler

    def on_new_request(self, request: Any) -> None:
        if (folder := param(request, "dora_export")) is not None:
            self._orders.add(folder, request)
        super().on_new_request(request)  # type: ignore[misc]

    def _halt_ordered(self) -> set[str]:
        """Let the requests whose export is ordered end with their next token, so that clients get all tokens.

        An abort would lose those that are on their way to it. Returns the ids of the halted requests.
        """
        halted = self._orders.ordered()
        for request in halted:
            request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1)
        return {request.request_id for request in halted}

    def _folder_of_halted(self, request: Any) -> Path | None:
        """The folder that the KV of a finished request goes to; None if it was not halted."""
        if (folder := param(request, "dora_export")) is None:
            return None
        self._orders.remove(folder)
        is_ordered = kv_files.part_folder(folder).is_dir()
        is_halted = request.status == RequestStatus.FINISHED_LENGTH_CAPPED and is_ordered
        return folder if is_halted else None

    # a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)  # type: ignore[misc]
        # Some attention backends have keys and values in the first dimension, in place of the block.
        caches = kv_caches.values()
        self._layers = [c if c.shape[0] == self._num_blocks else c.transpose(0, 1) for c in caches]

    @property
    def layout(self) -> tuple[str, ...]:
        """See `KVOrigin`. Empty if the layers' blocks are not of one shape."""
        server = (*self.layout_prefix, vllm.__version__)
        return tuple(kv_files.layout_of(server, self._layers, self._num_workers, self._block_size))


class KVFileConnector(Connector, KVConnectorBase_V1):  # type: ignore[misc]
    """One object in the scheduler, and one in each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rank = vllm_config.parallel_config.rank
        self._transfers = Transfers()
        self._exporting: dict[str, Path] = {}  # the scheduler's, until all workers have written
        self._written: set[str] = set()
        self._unread: set[int] = set()  # blocks whose import has failed

    # the scheduler

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Keep the blocks of a request that was halted."""
        if (folder := self._folder_of_halted(request)) is None:
            return False, None
        num_tokens = request.num_computed_tokens
        blocks = block_ids[: num_blocks_of(num_tokens, self._block_size)]
        export = Export(request.request_id, request.cache_salt, folder, blocks, num_tokens)
        self._transfers.exports.append(export)
        self._exporting[request.request_id] = folder
        return True, None

    def update_connector_output(self, connector_output: Any) -> None:
        """All workers have written: publish the folder. A file that is missing in it makes it unusable."""
        for request_id in connector_output.finished_sending or ():
            folder = self._exporting.pop(request_id)
            try:
                kv_files.part_folder(folder).rename(folder)
            except OSError as error:
                logger.warning("the KV of %s is lost: %s", request_id, error)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All but the last token. It is computed here, because its logits are needed."""
        folder = param(request, "dora_import")
        if folder is None or request.num_preemptions:
            return 0, False
        try:
            headers = kv_files.read_headers(folder, self._num_workers)
        except kv_files.KVFileError as error:
            logger.warning("prefilling %s: %s", request.request_id, error)
            return 0, False
        num_tokens = request.num_tokens - 1
        if min(header.num_tokens for header in headers) < num_tokens:
            logger.warning("prefilling %s: %s has KV of fewer tokens", request.request_id, folder)
            return 0, False
        return max(0, num_tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        (block_ids,) = blocks.get_block_ids()
        num_tokens = request.num_tokens - 1
        folder = Path(request.kv_transfer_params["dora_import"])
        first = (num_tokens - num_external_tokens) // self._block_size
        last = num_blocks_of(num_tokens, self._block_size)
        blocks_to_read = list(block_ids[first:last])
        self._transfers.imports.append(Import(request.cache_salt, folder, blocks_to_read, first))

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        self._halt_ordered()
        transfers, self._transfers = self._transfers, Transfers()
        return transfers

    # a worker

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for each in self._get_connector_metadata().imports:
            path = kv_files.worker_file(each.folder, self._rank)
            try:
                origin = self._origin_of(each.version)
                kv_files.read_blocks(path, origin, self._layers, each.blocks, each.first)
            except (kv_files.KVFileError, OSError) as error:
                logger.warning("prefilling a request: %s", error)
                self._unread.update(each.blocks)
            path.unlink(missing_ok=True)

    def wait_for_save(self) -> None:
        for each in self._get_connector_metadata().exports:
            path = kv_files.worker_file(kv_files.part_folder(each.folder), self._rank)
            try:
                origin = self._origin_of(each.version)
                kv_files.write_blocks(path, origin, self._layers, each.blocks, each.num_tokens)
            except OSError as error:
                logger.warning("the KV of %s is lost: %s", each.request_id, error)
                path.unlink(missing_ok=True)
            self._written.add(each.request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        written, self._written = self._written, set()
        return written or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        unread, self._unread = self._unread, set()
        return unread

    def wait_for_layer_load(self, layer_name: str) -> None:
        """`start_load_kv` has loaded all layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """`wait_for_save` writes all layers."""

    def _origin_of(self, version: str) -> kv_files.KVOrigin:
        return kv_files.KVOrigin(self.weight_digests.get(version, ""), self.layout)


def param(request: Any, name: str) -> Path | None:
    """One of DORA-RL's parameters of a request: a folder."""
    folder = (request.kv_transfer_params or {}).get(name)
    return None if folder is None else Path(folder)


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the KV of so many tokens."""
    return -(-num_tokens // block_size)
