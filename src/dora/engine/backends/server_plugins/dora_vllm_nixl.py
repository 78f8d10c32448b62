"""A KV connector for vLLM: requests move between servers with their KV over NIXL, also between machines.

    --kv-transfer-config '{"kv_connector": "KVNixlConnector", "kv_connector_module_path": "dora_vllm_nixl",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

It is vLLM's connector for servers that prefill and servers that decode, with a request that was halted while
it decoded in place of a prefilled one. Requests have the parameters of `dora_vllm_kv`. A folder has a ticket
in place of files of the KV: it names the source's server and the request's blocks there, which stay allocated
until the destination's server has read them, or for the time of a lease. The server computes the last token
of an imported request only. If its KV cannot be read, or its lease is over, the prompt is prefilled.

VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT say where other servers reach this one. NIXL
neither encrypts nor authenticates: its network must be private.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dora_kv_files as kv_files  # type: ignore[import-not-found]
from dora_vllm_kv import (  # type: ignore[import-not-found]
    ExportOrders,
    blocks_first,
    layout_of,
    num_blocks_of,
    param,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (  # type: ignore[import-not-found]
    NixlPullConnector,
)
from vllm.logger import init_logger  # type: ignore[import-not-found]

logger = init_logger(f"vllm.{__name__}")


class KVNixlConnector(NixlPullConnector):  # type: ignore[misc]
    """One object in the scheduler, and one in each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        self._block_size = vllm_config.cache_config.block_size
        self._bytes_per_block = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        self._num_blocks = kv_cache_config.num_blocks
        self._num_workers = vllm_config.parallel_config.world_size
        self._orders = ExportOrders()
        self._layers: list[Any] = []
        self.weight_digests: dict[str, str] = {}  # of the worker's weights; engines compare those they loaded
        if role == KVConnectorRole.WORKER:
            # vLLM's check that the lease of blocks is not over. Its scheduler's part is of other transfers.
            self.connector_worker._bidirectional_kv_xfer_enabled = True

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # the scheduler

    def on_new_request(self, request: Any) -> None:
        """Import by the ticket in the request's folder, if it has one that can be used."""
        self._orders.add(request)
        if (folder := param(request, "dora_import")) is not None:
            try:
                self._use_ticket(request, kv_files.read_ticket(Path(folder)))
            except (kv_files.KVFileError, KeyError, TypeError) as error:
                logger.warning("prefilling %s: %s", request.request_id, error)
        super().on_new_request(request)

    def _use_ticket(self, request: Any, ticket: Any) -> None:
        """Raises KVFileError."""
        source = ticket.source
        if source["remote_engine_id"] == self.engine_id:  # the request stays here
            # Its lease ends now, and its prefix is cached.
            self.connector_scheduler._reqs_need_send[source["remote_request_id"]] = 0.0
            return
        num_tokens = request.num_tokens - 1
        if ticket.num_tokens < num_tokens:
            raise kv_files.KVFileError(f"its ticket is of {ticket.num_tokens} tokens")
        num_blocks = num_blocks_of(num_tokens, self._block_size)
        blocks = [ids[:num_blocks] for ids in source["remote_block_ids"]]
        request.kv_transfer_params.update({**source, "remote_block_ids": blocks, "do_remote_prefill": True})

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All but the last token, whose logits are needed. They arrive between two steps."""
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        num_tokens = max(0, request.num_tokens - 1 - num_computed_tokens)
        return num_tokens, num_tokens > 0

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Keep the blocks of a request that was halted, and write its ticket."""
        if (folder := self._orders.finish(request)) is None:
            super().request_finished_all_groups(request, block_ids)  # it may have to end an import
            return False, None
        scheduler, params = self.connector_scheduler, request.kv_transfer_params
        request.kv_transfer_params = {"do_remote_decode": True}  # vLLM sends the blocks of such requests
        scheduler._reqs_in_batch.add(request.request_id)
        is_kept, source = super().request_finished_all_groups(request, block_ids)
        request.kv_transfer_params = params
        if is_kept:
            num_tokens = request.num_computed_tokens
            num_bytes = num_blocks_of(num_tokens, self._block_size) * self._bytes_per_block
            source["remote_blocks_expiry_time"] = scheduler._reqs_need_send[request.request_id]
            part = kv_files.part_folder(folder)
            try:
                kv_files.write_ticket(part, kv_files.Ticket(num_tokens, num_bytes, source))
                part.rename(folder)
            except OSError as error:
                logger.warning("the KV of %s is lost: %s", request.request_id, error)
        return is_kept, None

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._orders.halt_ordered()
        return super().build_connector_meta(scheduler_output)

    # a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._layers = [blocks_first(cache, self._num_blocks) for cache in kv_caches.values()]

    @property
    def layout(self) -> tuple[str, ...]:
        """See `KVOrigin`. The first item says that other servers read the KV by its ticket."""
        layout = layout_of(self._layers, self._num_workers, self._block_size)
        return (kv_files.BY_TICKET, *layout) if layout else ()
