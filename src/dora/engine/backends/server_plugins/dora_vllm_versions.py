"""Several full-weight versions in one vLLM server.

    --worker-cls dora_vllm_versions.VersionsWorker --scheduler-cls dora_vllm_versions.VersionScheduler
    --additional-config '{"dora_version_slots": 2}'

A worker has a model for each slot, and all of them use one KV cache. Each step runs on one model: the
scheduler puts requests of one version into a step, and versions take turns. A request names its version by
its `cache_salt`, so KV of one version never serves another. `dora_continue_with` lets running requests
continue with a newer version on their KV. The worker reports which version has computed a
step, the scheduler compares, and the response lists it (`weight_versions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dora_digest  # type: ignore[import-not-found]
import torch
from dora_version_turns import VersionTurns  # type: ignore[import-not-found]
from dora_vllm import KEEP, WorkerExtension  # type: ignore[import-not-found]
from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]
from vllm.model_executor.layers import rotary_embedding  # type: ignore[import-not-found]
from vllm.model_executor.model_loader import get_model  # type: ignore[import-not-found]
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform  # type: ignore[import-not-found]
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found]

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker  # type: ignore[import-not-found]
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[import-not-found]


@dataclass(eq=False)
class Slot:
    """A model, and its layers by their names, which vLLM looks up in a step."""

    model: Any
    layers: dict[str, Any]
    version: str = ""  # label of the loaded version; "": none, or it is being loaded


class VersionsWorker(WorkerExtension, Worker):  # type: ignore[misc]
    """vLLM's worker with several models."""

    def load_model(self, **arguments: Any) -> None:
        """Load the initial model into every slot.

        Raises RuntimeError if memory is insufficient, or if models share tensors, which have no data while
        one of the models is loaded in parts.
        """
        if self.vllm_config.speculative_config is not None:  # a draft model shares tensors of the first one
            raise RuntimeError("several version slots exclude speculative decoding: remove its flags")
        super().load_model(**arguments)
        num_slots = self.vllm_config.additional_config["dora_version_slots"]
        layers = self.vllm_config.compilation_config.static_forward_context
        self._slots = [Slot(self.model_runner.get_model(), layers)]
        try:
            self._slots += [self._make_slot() for _ in range(num_slots - 1)]
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"the device has no memory for weights of {num_slots} versions: lower engine.version_slots"
            ) from error
        tensors = Counter(id(t) for slot in self._slots for t in {*_tensors_of(slot.model)})
        if max(tensors.values()) > 1:
            raise RuntimeError("the models of several version slots share tensors: set version_slots = 1")
        self._active = self._slots[0]
        self._loading: tuple[Slot, Any] | None = None  # and the `FileLoad`
        if not current_platform.is_cpu():
            self.model_runner.model_memory_usage *= num_slots  # vLLM sizes the KV cache by it

    def _make_slot(self) -> Slot:
        compilation = self.vllm_config.compilation_config
        before = compilation.static_forward_context, [*compilation.static_all_moe_layers]
        compilation.static_forward_context = {}  # the names are those of the first model
        rotary_embedding._ROPE_DICT.clear()  # models would share modules, which have no data during a load
        try:
            with set_current_vllm_config(self.vllm_config):
                return Slot(get_model(vllm_config=self.vllm_config), compilation.static_forward_context)
        finally:
            compilation.static_forward_context, compilation.static_all_moe_layers = before

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Share what vLLM gives to the layers of the first model: the KV cache, and what belongs to it."""
        super().initialize_from_config(kv_cache_config)
        for slot in self._slots[1:]:
            for name, layer in slot.layers.items():
                first = vars(self._slots[0].layers[name])
                missing = {key: value for key, value in first.items() if key not in vars(layer)}
                vars(layer).update(missing | {key: first[key] for key in ("kv_cache",) if key in first})

    def dora_info(self) -> dict[str, Any]:
        return {**super().dora_info(), "version_slots": len(self._slots)}

    def dora_load_part(self, version: str, path: str, part: int, max_bytes: float) -> str:
        """Load a part of a version's file into a free slot, see `FileLoad`. Other slots work in between.

        After the last part, the version is usable. Returns the digest of the file's data then, else "".
        """
        if part == 0:
            self._end_load()  # one that was given up
            slot = next((slot for slot in self._slots if not slot.version), None)
            if slot is None:
                raise RuntimeError(f"no free slot for {version}: {[slot.version for slot in self._slots]}")
            self._loading = slot, dora_digest.FileLoad(path, max_bytes)
            initialize_layerwise_reload(slot.model)
        assert self._loading is not None, "an earlier part of this load has failed"
        slot, load = self._loading
        try:
            with set_current_vllm_config(self.vllm_config):
                slot.model.load_weights(load.read_part(path, part))
        except BaseException:
            self._end_load()
            raise
        if not load.is_read:
            return ""
        self._end_load()
        self.pack_again(slot.model)
        digest: str = self.record_digest(version, load.digest())
        slot.version = version
        return digest

    def _end_load(self) -> None:
        """Finish a load, complete or not. vLLM would add the tensors of the next one to those of this one."""
        if self._loading is not None:
            (slot, _), self._loading = self._loading, None
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(slot.model, self.model_config)

    def dora_drop_version(self, version: str) -> None:
        """Free the slot of a version that has no unfinished requests, if a slot has it."""
        super().dora_drop_version(version)
        for slot in self._slots:
            if slot.version == version:
                slot.version = ""

    def dora_drop_all_versions(self) -> None:
        super().dora_drop_all_versions()
        self._end_load()
        for slot in self._slots:
            slot.version = ""

    def _slot_of(self, version: str) -> Slot:
        try:
            return next(slot for slot in self._slots if slot.version == version)
        except StopIteration:
            loaded = [slot.version for slot in self._slots]
            raise RuntimeError(f"version {version} is not loaded; loaded: {loaded}") from None

    def execute_model(self, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            self._active = self._slot_of(scheduler_output.dora_version)
            self.model_runner.model = self._active.model
            self.vllm_config.compilation_config.static_forward_context = self._active.layers
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if output is not None:
            output.dora_version = self._active.version
        return output


class VersionScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with one version in each step."""

    running: list[Any]
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = VersionTurns()
        self.decode_only: frozenset[str] = frozenset()  # ids of requests, as their client names them
        self.newest_version = ""  # of all requests that do not keep theirs; "": each keeps its version
        self._may_prioritize = True  # False once none of those could run, until a step runs
        self.computed_version = ""  # version that computed the last step

    def schedule(self, throttle_prefills: bool = False) -> Any:
        unfinished = [*self.running, *self.kv_holding_waiting, *self.waiting]
        if self.newest_version:
            for request in unfinished:
                if not request.cache_salt.endswith((KEEP, self.newest_version)):
                    self._continue(request)
        chosen, prioritized = unfinished, [request for request in unfinished if self._is_prioritized(request)]
        if prioritized and self._may_prioritize:
            chosen = prioritized + [request for request in unfinished if _is_halting(request)]
        version = self._turns.next(Counter(map(_version_of, chosen)))
        in_step = {request.request_id for request in chosen if _version_of(request) == version}
        with self._set_aside(lambda request: request.request_id not in in_step):
            output = super().schedule(throttle_prefills)
        output.dora_version = version
        if not output.total_num_scheduled_tokens:
            self._turns.end()
        # If the others have all rows or all KV blocks, let them run for a step.
        self._may_prioritize = output.total_num_scheduled_tokens > 0 or (
            self._may_prioritize and chosen is unfinished
        )
        return output

    def _continue(self, request: Any) -> None:
        """Let a request continue with the newest version. One without KV shares that of the new weights."""
        request.cache_salt = self.newest_version
        if not request.num_computed_tokens:
            request.block_hashes.clear()
            request.update_block_hashes()

    def _is_prioritized(self, request: Any) -> bool:
        """vLLM appends random characters to a client's id."""
        own_id = request.request_id
        return own_id in self.decode_only or own_id.rpartition("-")[0] in self.decode_only

    @contextmanager
    def _set_aside(self, is_aside: Callable[[Any], bool]) -> Iterator[None]:
        """Hide requests from vLLM's scheduler, while the running ones among them keep their rows."""
        running = [request for request in self.running if is_aside(request)]
        waiting = [
            (queue, [request for request in queue if is_aside(request)])
            for queue in (self.kv_holding_waiting, self.waiting)
        ]
        most = self.max_num_active_reqs
        self.running = [request for request in self.running if not is_aside(request)]
        self.max_num_active_reqs = most - len(running)
        for queue, requests in waiting:
            queue.remove_requests(requests)
        try:
            yield
        finally:
            self.running += running
            self.max_num_active_reqs = most
            for queue, requests in waiting:
                for request in requests:
                    queue.add_request(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Raises RuntimeError, which ends the server, if other weights computed the step."""
        self.computed_version = getattr(model_runner_output, "dora_version", "")
        if scheduler_output.total_num_scheduled_tokens:
            scheduled = scheduler_output.dora_version
            if self.computed_version != scheduled:
                raise RuntimeError(f"a step of {scheduled} was computed by {self.computed_version!r}")
        return super().update_from_output(scheduler_output, model_runner_output)


def _tensors_of(model: Any) -> Iterator[Any]:
    yield from model.parameters()
    yield from model.buffers()


def _version_of(request: Any) -> str:
    salt: str = request.cache_salt
    return salt.removesuffix(KEEP)


def _is_halting(request: Any) -> bool:
    """Whether a request ends with its next token, as one does that is halted for its migration."""
    return bool(request.max_tokens <= request.num_output_tokens + 1)


def _attach_weight_version(self: Any, outputs: dict[int, Any]) -> None:
    """In place of vLLM's method, which knows one version of all requests."""
    for each in outputs.values():
        each.weight_version = self.scheduler.computed_version


def _dora_decode_only(self: Any, request_ids: list[str]) -> None:
    """A call of the API server: schedule only these requests until none of them is left."""
    self.scheduler.decode_only = frozenset(request_ids)


def _dora_continue_with(self: Any, version: str) -> None:
    """A call of the API server: this version computes the next tokens of all requests that may change theirs.

    Also of those that are on their way to this process.
    """
    self.scheduler.newest_version = version


EngineCore._attach_weight_version = _attach_weight_version
EngineCore.dora_decode_only = _dora_decode_only
EngineCore.dora_continue_with = _dora_continue_with
