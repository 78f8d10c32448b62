"""SGLang's scheduler with several full-weight versions, whose requests move to other servers with their KV.

A scheduler has a model for each version slot, and all of them use one KV cache. Each batch is of one version,
and versions take turns. A request names its version by its `extra_key`, so KV of one version never serves
another. SGLang keeps the requests that decode in a batch between two steps: here there is one for each
version. By calls of the engine, some requests run before all others, or requests continue with a newer
version on their KV.

A request's `custom_params` may name two folders (`dora_sglang_kv`): `dora_export`, where its KV goes once an
export is ordered, and `dora_import`, where its KV comes from. Imported KV is put into the prefix cache, so
that the request computes its last token only.

With tensor parallelism, each worker has a scheduler, and all of them must take the same steps. So the first
worker decides for all what is ordered, and KV is exported or imported only if every worker could do its part.
"""

from __future__ import annotations

import copy
import logging
import os
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dora_digest  # type: ignore[import-not-found]
import dora_kv_files as kv_files  # type: ignore[import-not-found]
import sglang  # type: ignore[import-not-found]
import torch
from dora_sglang import (  # type: ignore[import-not-found]
    CONTINUE_WITH,
    DECODE_ONLY,
    DIGEST_PREFIX,
    KEEP,
    KV_CONNECTOR_VARIABLE,
    LOADED_KEY,
    PART_KEY,
    PROTOCOL,
    SLOTS_VARIABLE,
)
from dora_sglang_kv import KVInFiles, KVOverNixl  # type: ignore[import-not-found]
from dora_version_turns import VersionTurns  # type: ignore[import-not-found]
from sglang.srt.managers.io_struct import (  # type: ignore[import-not-found]
    SetInternalStateReqOutput,
    UpdateWeightFromDiskReqOutput,
)
from sglang.srt.managers.schedule_batch import (  # type: ignore[import-not-found]
    FINISH_ABORT,
    FINISH_LENGTH,
    ScheduleBatch,
    retract_all,
)
from sglang.srt.managers.scheduler import Scheduler  # type: ignore[import-not-found]
from sglang.srt.mem_cache.base_prefix_cache import (  # type: ignore[import-not-found]
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # type: ignore[import-not-found]
from sglang.srt.model_executor.model_runner_components.load_model_utils import (  # type: ignore[import-not-found]
    load_model_with_memory_saver,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import (  # type: ignore[import-not-found]
    _unsupported_derived_weight_cache_error,
)
from sglang.srt.model_loader.loader import DefaultModelLoader  # type: ignore[import-not-found]
from sglang.srt.model_loader.utils import set_default_torch_dtype  # type: ignore[import-not-found]
from sglang.srt.sampling.sampling_batch_info import (  # type: ignore[import-not-found]
    SamplingBatchInfo,
)
from sglang.srt.utils import broadcast_pyobj  # type: ignore[import-not-found]

logger = logging.getLogger(f"sglang.{__name__}")


@dataclass(eq=False)
class Slot:
    """The place of one version's weights."""

    model: Any
    version: str = ""  # label of the loaded version; "": none, or it is being loaded


def load_slots(load_model: Callable[[Any], None]) -> Callable[[Any], None]:
    """SGLang's `ModelRunner.load_model`, with a model for each version slot in `dora_slots`."""

    def load_model_of_each_slot(runner: Any) -> None:
        load_model(runner)
        if runner.is_draft_worker:
            return
        _check_ties(runner)
        runner.dora_slots, num_slots = [Slot(runner.model)], int(os.environ.get(SLOTS_VARIABLE, "1"))
        try:
            while len(runner.dora_slots) < num_slots:
                loaded = load_model_with_memory_saver(
                    model_config=runner.model_config,
                    load_config=runner.load_config,
                    device=runner.device,
                    gpu_id=runner.gpu_id,
                    memory_saver_adapter=runner.memory_saver_adapter,
                    is_draft_worker=False,
                )
                runner.dora_slots.append(Slot(loaded.model))
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"the device has no memory for weights of {num_slots} versions: lower engine.version_slots"
            ) from error

    return load_model_of_each_slot


def _check_ties(runner: Any) -> None:
    """Raises RuntimeError for a model with tied embeddings whose head SGLang leaves at zero."""
    is_tied = getattr(runner.model_config.hf_text_config, "tie_word_embeddings", False)
    head: Any = getattr(runner.model, "lm_head", None)
    embedding: Any = getattr(runner.model, "get_input_embeddings", lambda: None)()
    if not is_tied or not hasattr(head, "weight") or not hasattr(embedding, "weight"):
        return
    if head.weight.data_ptr() != embedding.weight.data_ptr():
        raise RuntimeError(
            f"SGLang does not tie the embeddings of {type(runner.model).__name__}: save the model with "
            "tie_word_embeddings = false and lm_head.weight, or use another engine.backend"
        )


def load_part(manager: Any, request: Any) -> Any:
    """Load a part of a version's file, in place of SGLang's own `update_weights_from_disk`.

    After the last part, the message has the digest of the file's data. SGLang takes steps between two parts.
    """
    scheduler, manifest = manager.scheduler, request.manifest or {}
    refusal = ""
    if PART_KEY not in manifest:
        refusal = "only DORA-RL's engine loads weights here"
    elif scheduler.enable_lora:
        refusal = "adapters belong to the server's initial model: start it without --enable-lora"
    if refusal:
        return UpdateWeightFromDiskReqOutput(success=False, message=refusal)
    with manager._observe_weight_load("disk"):
        is_done, message = scheduler.load_part(request.weight_version, request.model_path, manifest)
    if not is_done:
        logger.error("version %s is not loaded: %s", request.weight_version, message)
    elif message:
        scheduler.record_weight_version_change(request.weight_version)
        is_done, message = manager.flush_cache_after_weight_update(
            request, is_done, f"{DIGEST_PREFIX}{message}."
        )
    return UpdateWeightFromDiskReqOutput(success=is_done, message=message)


class VersionScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler with one version in each step."""

    waiting_queue: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._turns = VersionTurns()
        self._in_step: set[str] = set()  # requests that the last step could have
        self._aside: dict[str, Any] = {}  # batches of the others, by version
        self._decode_only: frozenset[str] = frozenset()  # ids of requests
        self._is_prioritizing = False  # in the last step
        self._may_prioritize = True  # False once none of those could run, until a step runs
        self._newest_version = ""  # of all requests that do not keep theirs; "": each keeps its version
        self.weight_digests: dict[str, str] = {}  # by label
        self._adapters: dict[str, str] = {}  # labels by SGLang's ids of adapters
        self._orders = kv_files.ExportOrders()
        super().__init__(*args, **kwargs)
        self.runner = self.tp_worker.model_runner
        self._slots: list[Slot] = self.runner.dora_slots
        self._device = torch.device(self.runner.device)
        self._loading: tuple[Slot, Any] | None = None  # and the `FileLoad`
        if len(self._slots) > 1:
            self._check_steps_use_the_model()
        self._num_workers = self._count_workers()
        layers, rank = kv_layers(self.token_to_kv_pool_allocator.get_kvcache()), self.tp_group.rank_in_group
        self._kv: KVInFiles | KVOverNixl
        if os.environ.get(KV_CONNECTOR_VARIABLE) == "nixl":
            self._kv = KVOverNixl(layers, rank)
        else:
            self._kv = KVInFiles(layers, rank, self._num_workers)
        self._layout = self._kv_layout(layers)

    def get_internal_state(self, recv_req: Any) -> Any:
        output = super().get_internal_state(recv_req)
        output.internal_state["dora"] = {
            "protocol": PROTOCOL,
            "version_slots": len(self._slots),
            "kv_layout": list(self._layout),
            "kv_workers": self._num_workers,
        }
        return output

    # Versions.

    def _check_steps_use_the_model(self) -> None:
        """A CUDA graph would compute with the weights of one slot, and a load change those of a step."""
        names = ("decode_cuda_graph_runner", "prefill_cuda_graph_runner")
        eager = (None, getattr(self.runner, "eager_runner", None))
        if self.enable_overlap or any(getattr(self.runner, name, None) not in eager for name in names):
            raise RuntimeError(
                f"several version slots ({SLOTS_VARIABLE}) need --disable-overlap-schedule and "
                "--disable-cuda-graph: remove other flags about them"
            )
        if not self.spec_algorithm.is_none():  # a draft is of one batch, and requests change theirs
            raise RuntimeError(
                f"several version slots ({SLOTS_VARIABLE}) exclude speculative decoding: remove its flags"
            )

    def load_part(self, label: str, path: str, manifest: dict[str, Any]) -> tuple[bool, str]:
        """Load one of several parts of a version's file into a free slot.

        Of the loaded versions, only those in the manifest stay. Returns whether all workers have loaded the
        part, and a text. After the last part this is the digest of the file's data, and the version is
        usable. After other parts it is empty. If the load fails, it is the reason, and the slot is free.
        """
        digest = failure = ""
        try:
            part, max_bytes = manifest[PART_KEY]
            if part == 0:
                self._start_load(path, max_bytes, manifest[LOADED_KEY])
            if self._loading is None:
                raise RuntimeError("an earlier part of this load has failed")
            slot, load = self._loading
            with set_default_torch_dtype(self.model_config.dtype):
                weights = load.read_part(path, part)
                DefaultModelLoader.load_weights_only(slot.model, weights, self._device)
            if load.is_read:
                self._end_load()
                digest = load.digest()
        except Exception as error:  # of the model's own loader
            failure = f"{type(error).__name__}: {error}"
        results = self.of_all_workers((digest, failure))
        failures = [failure for _, failure in results if failure]
        if not failures and len({*results}) > 1:
            failures = [f"the workers have read different weights: {[digest for digest, _ in results]}"]
        if failures:
            try:
                self._end_load()
            except Exception:  # the next load begins with this model, too
                logger.exception("the model of a load that has failed cannot be finished")
            return False, "; ".join(failures)
        if digest:
            slot.version, self.weight_digests[label] = label, digest
        return True, digest

    def _start_load(self, path: str, max_bytes: float, loaded: Container[str]) -> None:
        """Raises RuntimeError if there is no free slot, or SGLang cannot change this model's weights."""
        self._end_load()  # one that was given up
        slot = self.free_slot(loaded)
        if slot is None:
            raise RuntimeError("requests use the weights in all slots")
        self.runner.weight_updater._assert_weight_cache_inactive("a load")
        if (reason := _unsupported_derived_weight_cache_error(slot.model)) is not None:
            raise RuntimeError(reason)
        self._loading = slot, dora_digest.FileLoad(path, max_bytes)
        with set_default_torch_dtype(self.model_config.dtype):
            DefaultModelLoader.restore_weights_before_loading(slot.model, self._device)

    def _end_load(self) -> None:
        """Finish a load, complete or not, so that the next one finds a model as SGLang expects it."""
        if self._loading is not None:
            (slot, _), self._loading = self._loading, None
            with set_default_torch_dtype(self.model_config.dtype):
                DefaultModelLoader.postprocess_weights(slot.model, self._device)

    def free_slot(self, loaded: Container[str]) -> Slot | None:
        """A slot without one of the `loaded` versions, which no request uses; None if there is none."""
        unfinished = [
            request for batch in self._collect_inflight_batches() if batch for request in batch.reqs
        ]
        used = {_label_of(request) for request in unfinished if not request.finished()}
        used |= {_label_of(request) for request in filter(None, (*self.waiting_queue, self.chunked_req))}
        for slot in self._slots:
            if slot.version not in loaded and (len(self._slots) == 1 or slot.version not in used):
                self.weight_digests.pop(slot.version, None)
                slot.version = ""
        return next((slot for slot in self._slots if not slot.version), None)

    def load_lora_adapter(self, recv_req: Any) -> Any:
        """As SGLang, and report the digest of the adapter's file as the message of a success."""
        result, digest = super().load_lora_adapter(recv_req), ""
        try:
            digest = dora_digest.safetensors_digest(f"{recv_req.lora_path}/{dora_digest.ADAPTER_FILE}")
        except (OSError, ValueError) as error:  # of another client's adapter
            logger.warning("no digest of adapter %s: %s", recv_req.lora_name, error)
        digests = {*self.of_all_workers(digest)}
        if result.success:
            self._adapters[recv_req.lora_id] = recv_req.lora_name
            result.error_message = ", ".join(digests)
        return result

    def unload_lora_adapter(self, recv_req: Any) -> Any:
        result = super().unload_lora_adapter(recv_req)
        if result.success:
            self._adapters.pop(recv_req.lora_id, None)
        return result

    def set_internal_state(self, recv_req: Any) -> Any:
        """A call of the engine. SGLang takes names with numbers here, so the arguments are names.

        `DECODE_ONLY`: ids of requests; others wait until none of these is left. `CONTINUE_WITH`: the version
        that computes the next tokens of all requests that may change theirs; none: they keep it.
        """
        names = [*recv_req.server_args]
        if DECODE_ONLY in names:
            self._decode_only = frozenset(names) - {DECODE_ONLY}
        elif CONTINUE_WITH in names:
            self._newest_version = next((name for name in names if name != CONTINUE_WITH), "")
            batches = filter(None, self._collect_inflight_batches())
            for request in {*(request for batch in batches for request in batch.reqs), self.chunked_req}:
                if request is not None and self._continue(request):
                    request.skip_radix_cache_insert = True  # its KV is of two versions
            for request in self.waiting_queue:
                self._continue(request)
        else:
            return super().set_internal_state(recv_req)
        return SetInternalStateReqOutput(updated=True)

    def _continue(self, request: Any) -> bool:
        """Let a request continue with the newest version. Returns whether that is another one."""
        label = self._newest_version
        if not label or request.finished() or (request.extra_key or label).endswith((KEEP, label)):
            return False
        request.extra_key = label
        return True

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any | None) -> Any:
        self._halt_ordered()
        if len(self._slots) == 1:
            return super().get_next_batch_to_run(running_batch=running_batch, last_batch=last_batch)
        own = self._batch_of_turn(self._with_prefilled(running_batch, last_batch))
        others = [request for request in self.waiting_queue if request.rid not in self._in_step]
        self.waiting_queue = [request for request in self.waiting_queue if request.rid in self._in_step]
        plan = super().get_next_batch_to_run(running_batch=own, last_batch=None)
        self.waiting_queue += others
        if not plan.batch_to_run:
            self._turns.end()
        # If the others have all rows or all KV, let them run for a step.
        self._may_prioritize = bool(plan.batch_to_run) or (self._may_prioritize and not self._is_prioritizing)
        return plan

    def _with_prefilled(self, running: Any, last: Any | None) -> Any:
        """The batch that decodes, with what the last step has prefilled, as SGLang merges them."""
        if last is None or last is running or not last.forward_mode.is_extend():
            return running
        last.filter_batch(reqs_to_exclude=[*filter(None, (last.chunked_req, self.chunked_req))])
        running.filter_batch()
        return _merged(running, last)

    def _batch_of_turn(self, running: Any) -> Any:
        """Choose the requests of a step. Returns the batch of those that decode, and puts others aside."""
        batches = [running, *self._aside.values()]
        for batch in batches:
            batch.filter_batch()  # without those that have finished
        unfinished = [request for batch in batches for request in batch.reqs] + self.waiting_queue
        self._is_prioritizing = self._may_prioritize and any(
            request.rid in self._decode_only for request in unfinished
        )
        chosen = [
            request
            for request in unfinished
            if not self._is_prioritizing or request.rid in self._decode_only or _is_ending(request)
        ]
        if self.chunked_req is not None:  # SGLang computes a long prompt in parts, one after another
            version = _label_of(self.chunked_req)
        else:
            version = self._turns.next(Counter(map(_label_of, chosen)))
        self._in_step = {request.rid for request in chosen if _label_of(request) == version}
        own, self._aside = ScheduleBatch(reqs=[], batch_is_full=False), {}
        for batch in batches:
            places = [None if req.rid in self._in_step else _label_of(req) for req in batch.reqs]
            for place in dict.fromkeys(places):
                part = _part(batch, [number for number, other in enumerate(places) if other == place])
                if place is None:
                    own = _merged(own, part)
                else:
                    self._aside[place] = _merged(self._aside.get(place), part)
        own.batch_is_full = False  # another version may have freed rows or KV
        return own

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError, which ends the server, if the batch is not of one loaded version."""
        if len(self._slots) > 1:
            labels = {_label_of(request) for request in batch.reqs}
            usable = [slot for slot in self._slots if not self._loading or slot is not self._loading[0]]
            names_no_version = labels == {""}  # as SGLang's own requests
            slot = next((slot for slot in usable if names_no_version or {slot.version} == labels), None)
            if slot is None:
                loaded = [slot.version for slot in self._slots]
                raise RuntimeError(f"a batch is of versions {sorted(labels)}; loaded: {loaded}")
            self.runner.model = slot.model
            for request in batch.reqs:
                spans = vars(request).setdefault("dora_spans", [])
                if not spans or spans[-1][0] != slot.version:
                    spans.append((slot.version, len(request.output_ids)))
        for request in batch.reqs:
            if request.lora_id is not None:
                vars(request).setdefault("dora_spans", [(self._adapters.get(request.lora_id, ""), 0)])
        return super().run_batch(batch, *args, **kwargs)

    def update_running_batch(self, batch: Any) -> Any:
        """Without room for the next tokens, SGLang retracts requests of the batch, and aborts the last one.

        Before that, those of other versions make room.
        """
        while len(self._slots) > 1 and not batch.check_decode_mem() and self._retract_aside():
            pass
        return super().update_running_batch(batch)

    def _retract_aside(self) -> bool:
        """Let a request that is aside wait, without its KV: the shortest, but prioritized ones last.

        Returns False if there is none.
        """
        shortest = min(
            self._unfinished_aside(),
            key=lambda req: (req.rid in self._decode_only, len(req.output_ids)),
            default=None,
        )
        if shortest is None:
            return False
        retract_all(
            reqs=[shortest],
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=None,
        )
        self._aside[_label_of(shortest)].filter_batch(reqs_to_exclude=[shortest])
        self._add_request_to_queue(shortest, is_retracted=True)
        return True

    def _unfinished_aside(self) -> Iterator[Any]:
        aside = (request for batch in self._aside.values() for request in batch.reqs)
        return (request for request in aside if not request.finished())

    def send_abort_output(self, abort_req: Any, req: Any) -> None:
        """Of a retracted request SGLang would send the last token again, and no weights."""
        self._forget(req)
        if not req.output_ids:
            super().send_abort_output(abort_req, req)
            return
        req.finished_reason = req.finished_reason or req.to_finish or FINISH_ABORT()
        self.output_streamer.stream_output([req], req.return_logprob)

    def record_weight_version_change(self, new_version: str | None) -> None:
        """With several slots a load changes no request's weights.

        Raises RuntimeError, which ends the server, if another client has changed those under adapters.
        """
        if self.enable_lora:
            raise RuntimeError(f"the weights under the adapters have become version {new_version}")
        if len(self._slots) == 1:
            super().record_weight_version_change(new_version)

    def _collect_inflight_batches(self) -> list[Any]:
        return [*super()._collect_inflight_batches(), *self._aside.values()]

    def is_fully_idle(self, *args: Any, **kwargs: Any) -> bool:
        return not any(self._unfinished_aside()) and bool(super().is_fully_idle(*args, **kwargs))

    # Requests that move.

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        self._continue(req)
        if not is_retracted and self._layout:
            if (folder := _param(req, "dora_export")) is not None:
                self._orders.add(folder, req)
            if (folder := _param(req, "dora_import")) is not None:
                self._import(req, folder)
        super()._add_request_to_queue(req, is_retracted)

    def _release_aborted_request(self, req: Any) -> None:
        self._forget(req)
        super()._release_aborted_request(req)

    def _forget(self, req: Any) -> Path | None:
        """The request has ended. Returns the folder into which its KV may have been ordered."""
        if (folder := _param(req, "dora_export")) is not None:
            self._orders.remove(folder)
        return folder

    def _halt_ordered(self) -> None:
        """Let the requests whose export is ordered end with their next token, so that clients get all
        tokens.
        """
        if not (exportable := self._orders.exportable()):
            return
        ordered = self._named_by_first(lambda: [request.rid for request in self._orders.ordered()])
        for request in exportable:
            if request.rid in ordered:
                sampling = request.sampling_params
                sampling.max_new_tokens = min(sampling.max_new_tokens, len(request.output_ids) + 1)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        super().process_batch_result(batch, result)
        for req in batch.reqs:
            if req.finished() and (folder := self._forget(req)) is not None:
                may_be_ordered = self._layout and isinstance(req.finished_reason, FINISH_LENGTH)
                if may_be_ordered and self._is_ordered(folder):
                    self._export(req, folder)

    def _is_ordered(self, folder: Path) -> bool:
        part = kv_files.part_folder(folder)
        return bool(self._named_by_first(lambda: [part.name] if part.is_dir() else []))

    def _export(self, req: Any, folder: Path) -> None:
        """Write the KV of a finished request, which is in the prefix cache now, and publish the folder.

        Without the KV of all workers it is unusable.
        """
        part, is_first = kv_files.part_folder(folder), self.tp_group.rank_in_group == 0
        tokens = [*req.origin_input_ids, *req.output_ids][:-1]  # the last one has no KV yet
        match = self._match(_key(tokens, req.extra_key))  # nothing if its KV is of two versions
        slots = self.tree_cache.path_device_indices(match.last_device_node).tolist()
        try:
            if slots and len(tokens) - len(slots) < self.page_size:  # the cache has whole pages only
                origin = self._origin_of(req.extra_key)
                written = self._by_all_workers(self._kv.write, part, origin, slots, len(tokens))
                if is_first:
                    self._kv.finish(part, origin, len(tokens), written)
            if is_first:
                part.rename(folder)
        except (kv_files.KVFileError, OSError) as error:
            logger.warning("the KV of %s is lost: %s", req.rid, error)
            kv_files.remove(folder)

    def _import(self, req: Any, folder: Path) -> None:
        """Put the KV of all tokens but the last into the prefix cache. Without it they are prefilled."""
        try:
            num_slots = self._by_all_workers(self._kv.num_slots, folder)
            num_tokens = min(len(req.origin_input_ids) - 1, *num_slots)
            key = _key(req.origin_input_ids[: num_tokens - num_tokens % self.page_size], req.extra_key)
            match = self._match(key)
            if match.device_prefix_len < len(key):
                self._read(folder, key, match.last_device_node, match.device_prefix_len)
        except kv_files.KVFileError as error:
            logger.warning("prefilling %s: %s", req.rid, error)
        self._kv.remove(folder)

    def _read(self, folder: Path, key: Any, node: Any, num_cached: int) -> None:
        """Add the KV of a folder to the prefix cache, which has the first `num_cached` tokens up to `node`.

        Raises KVFileError.
        """
        lock, slots = self.tree_cache.lock(node), None
        try:
            slots = self._allocate(len(key) - num_cached)
            if self.enable_overlap:  # a step that has ended for the scheduler may still write to these slots
                self.schedule_stream.wait_stream(self.forward_stream)
            origin = self._origin_of(key.extra_key)
            self._by_all_workers(self._kv.read, folder, origin, slots.tolist(), num_cached)
            value = torch.cat([self.tree_cache.path_device_indices(node), slots])
            # The cache would free what it has already, but for the first `prev_prefix_len` slots.
            insert = InsertParams(key=key, value=value, prev_prefix_len=num_cached)
            slots = None
            self.tree_cache.insert(insert)
        finally:
            self.tree_cache.unlock(lock)
            if slots is not None:
                self.token_to_kv_pool_allocator.free(slots)

    def _allocate(self, num_tokens: int) -> Any:
        """Raises KVFileError if memory is insufficient."""
        allocator = self.token_to_kv_pool_allocator
        if (num_lacking := num_tokens - allocator.available_size()) > 0:
            self.tree_cache.evict(EvictParams(num_tokens=num_lacking))
        if (slots := allocator.alloc(num_tokens)) is None:
            raise kv_files.KVFileError("no memory for its KV")
        return slots

    def _match(self, key: Any) -> Any:
        return self.tree_cache.match_prefix(MatchPrefixParams(key=key))

    def _origin_of(self, label: str) -> Any:
        return kv_files.KVOrigin(self.weight_digests.get(label.removesuffix(KEEP), ""), self._layout)

    def _kv_layout(self, layers: Sequence[Any]) -> tuple[str, ...]:
        """See `KVOrigin`. Empty if the layers do not have KV of all tokens in one shape, if SGLang stores the
        experts of each token beside its KV, or if the server is divided in another way than by tensor
        parallelism.
        """
        cache = self.tree_cache
        if self.server_args.enable_return_routed_experts:
            return ()
        if self._num_workers != self.world_group.world_size:
            return ()
        if cache.supports_swa() or cache.supports_mamba() or not cache.supports_prefix_sharing():
            return ()
        server = (*self._kv.layout_prefix, f"sglang {sglang.__version__}")
        return tuple(kv_files.layout_of(server, layers, self._num_workers, self.page_size))

    # Workers that divide the model.

    def _count_workers(self) -> int:
        """Of this machine, each with a part of every layer and of the KV of every token.

        1 if the server is divided in other ways, too: by pipelines, data or context parallelism, or machines.
        """
        arguments, size = self.server_args, self.tp_size
        sizes = (self.world_group.world_size, self.attn_tp_group.world_size)
        return size if (*sizes, arguments.dcp_size, arguments.nnodes) == (size, size, 1, 1) else 1

    def of_all_workers(self, value: Any) -> list[Any]:
        """The value of each worker, in each of them."""
        return [value] if self._num_workers == 1 else self.tp_group.all_gather_object(value)

    def _by_all_workers(self, act: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Do this worker's part. Returns the results of all workers.

        Raises KVFileError in each worker if one of them failed.
        """
        result, failure = None, ""
        try:
            result = act(*arguments)
        except (kv_files.KVFileError, OSError, torch.OutOfMemoryError) as error:
            failure = str(error)
        results = self.of_all_workers((result, failure))
        if failures := [failure for _, failure in results if failure]:
            raise kv_files.KVFileError("; ".join(failures))
        return [result for result, _ in results]

    def _named_by_first(self, find: Callable[[], list[str]]) -> list[str]:
        """What the first worker finds: a moment later another one might find something else."""
        if self._num_workers == 1:
            return find()
        group = self.tp_group
        names = find() if group.rank_in_group == 0 else []
        return list(broadcast_pyobj(names, group.rank, group.cpu_group, src=group.ranks[0]))


def list_versions(accept: Callable[..., None]) -> Callable[..., None]:
    """SGLang's `accept` of an event's requests, with the weights of each in every event.

    SGLang lists them in the last event of a response only, which does not come if the server is killed.
    """
    from sglang.srt.utils.weight_versions import (  # type: ignore[import-not-found]
        WeightVersionSpan,
        compute_weight_version_spans,
    )

    def accept_with_versions(self: Any, *, req: Any) -> None:
        accept(self, req=req)
        if not self.rids or self.rids[-1] != req.rid:
            return
        num_tokens, spans = self.completion_tokens[-1], getattr(req, "dora_spans", [])
        if spans:
            ends = [start for _, start in spans[1:]] + [num_tokens]
            self.weight_versions[-1] = [
                WeightVersionSpan(version=label, start=start, end=end)
                for (label, start), end in zip(spans, ends, strict=True)
            ]
        elif self.weight_versions[-1] is None:
            self.weight_versions[-1] = compute_weight_version_spans(
                req.weight_version_events, self.current_weight_version, num_tokens
            )

    return accept_with_versions


def kv_layers(pool: Any) -> list[Any]:
    """The KV of each layer [slots, ...]; empty for a pool that has more than that, or another layout."""
    if type(pool).__name__ == "MHATokenToKVPool" and pool.kv_cache_layout == "nhd":
        return [*pool.k_buffer, *pool.v_buffer]
    return [*pool.kv_buffer] if type(pool).__name__ == "MLATokenToKVPool" else []


def _key(tokens: Any, extra_key: str) -> Any:
    return RadixKey(array("q", tokens), extra_key)


def _label_of(req: Any) -> str:
    return (req.extra_key or "").removesuffix(KEEP)


def _is_ending(req: Any) -> bool:
    """Whether a request ends in its next step: it is aborted, or is halted for its migration."""
    return bool(req.to_finish) or req.sampling_params.max_new_tokens <= len(req.output_ids) + 1


def _merged(batch: Any | None, other: Any) -> Any:
    """One of two batches, with the requests of both."""
    if batch is None or batch.is_empty():
        return other
    if not other.is_empty():
        batch.merge_batch(other)
    return batch


def _part(batch: Any, numbers: Sequence[int]) -> Any:
    """The requests of a batch that have these numbers there; the batch itself if it has no others.

    What sampling has counted for penalties, which DORA-RL's requests do not have, starts from zero.
    """
    if len(numbers) == len(batch.reqs):
        return batch
    part = copy.copy(batch)
    part.sampling_info = SamplingBatchInfo.from_schedule_batch(part, part.model_config.vocab_size)
    part.filter_batch(keep_indices=numbers)
    return part


def _param(req: Any, name: str) -> Path | None:
    """One of DORA-RL's parameters of a request: a folder."""
    folder = (req.sampling_params.custom_params or {}).get(name)
    return None if folder is None else Path(folder)
