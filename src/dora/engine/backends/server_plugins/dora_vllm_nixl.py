"""A KV connector for vLLM: requests move between servers with their KV over NIXL, also between machines.

    --kv-transfer-config '{"kv_connector": "KVNixlConnector", "kv_connector_module_path": "dora_vllm_nixl",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

vLLM's connector moves the KV of a request from a server that has prefilled it to a server that decodes it.
Here a request that was halted while it decoded takes the place of the prefilled one. Requests have the
parameters of `dora_vllm_kv`. In place of files, a folder has a ticket. It names the source's server and the
request's blocks there, which stay allocated until the destination's server has read them, or for the time of
a lease. The destination's server computes the last token only. If it cannot read the KV, or the lease is
over, it prefills the prompt.

VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT say where other servers reach this one. NIXL
neither encrypts nor authenticates: its network must be private.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dora_kv_files as kv_files  # type: ignore[import-not-found]
import vllm  # type: ignore[import-not-found]
from dora_vllm_kv import Connector, num_blocks_of, param  # type: ignore[import-not-found]
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (  # type: ignore[import-not-found]
    NixlPullConnector,
)
from vllm.logger import init_logger  # type: ignore[import-not-found]

logger = init_logger(f"vllm.{__name__}")
LEASE_FLAG = "_bidirectional_kv_xfer_enabled"  # of vLLM's worker


class KVNixlConnector(Connector, NixlPullConnector):  # type: ignore[misc]
    """One object in the scheduler, and one in each worker.

    Other servers read the KV by its ticket, which has no `weight_digests`: engines compare those they loaded.
    """

    layout_prefix = (kv_files.BY_TICKET,)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        self._bytes_per_block = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        if role == KVConnectorRole.WORKER:
            # vLLM then reads no blocks whose lease is over, which may have the KV of another request. The
            # scheduler's flag stays off: it makes servers that prefill read from those that decode.
            if not hasattr(self.connector_worker, LEASE_FLAG):
                raise RuntimeError(f"vLLM {vllm.__version__} has no {LEASE_FLAG}: use kv_connector = 'files'")
            setattr(self.connector_worker, LEASE_FLAG, True)

    # the scheduler

    def on_new_request(self, request: Any) -> None:
        """Import by the ticket in the request's folder, if it has one that can be used."""
        if (folder := param(request, "dora_import")) is not None:
            try:
                self._use_ticket(request, kv_files.read_ticket(folder))
            except (kv_files.KVFileError, KeyError, TypeError) as error:
                logger.warning("prefilling %s: %s", request.request_id, error)
        super().on_new_request(request)

    def _use_ticket(self, request: Any, ticket: Any) -> None:
        """Raises KVFileError."""
        source = ticket.source
        if source["remote_engine_id"] == self.engine_id:
            # The request stays here. vLLM frees the ticket's blocks; the full ones are in its prefix cache.
            self.connector_scheduler._reqs_need_send[source["remote_request_id"]] = 0.0
            return
        if not isinstance(source["remote_blocks_expiry_time"], float):
            raise kv_files.KVFileError("its ticket has no lease")
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
        scheduler, params = self.connector_scheduler, request.kv_transfer_params
        if (folder := self._folder_of_halted(request)) is None:
            scheduler._reqs_not_processed.add(request.request_id)  # it may have been halted
            super().request_finished_all_groups(request, block_ids)  # it may have to end an import
            return False, None
        request.kv_transfer_params = {"do_remote_decode": True}  # vLLM sends the blocks of such requests
        is_kept, source = super().request_finished_all_groups(request, block_ids)
        request.kv_transfer_params = params
        try:
            if is_kept:
                source["remote_blocks_expiry_time"] = scheduler._reqs_need_send[request.request_id]
                self._write_ticket(folder, request.num_computed_tokens, source)
            else:  # it was preempted
                scheduler._reqs_not_processed.add(request.request_id)
                kv_files.remove(folder)
        except OSError as error:
            logger.warning("the KV of %s is lost: %s", request.request_id, error)
            kv_files.remove(folder)
            scheduler._reqs_need_send[request.request_id] = 0.0
        return is_kept, None

    def _write_ticket(self, folder: Path, num_tokens: int, source: dict[str, Any]) -> None:
        """Raises OSError."""
        num_bytes = num_blocks_of(num_tokens, self._block_size) * self._bytes_per_block
        part = kv_files.part_folder(folder)
        kv_files.write_ticket(part, kv_files.Ticket(num_tokens, num_bytes * self._num_workers, source))
        part.rename(folder)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        # The workers must know of a request before they can send its blocks.
        self.connector_scheduler._reqs_in_batch |= self._halt_ordered()
        return super().build_connector_meta(scheduler_output)
