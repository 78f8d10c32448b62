"""Several full-weight versions in one vLLM server.

    --worker-cls dora_vllm_versions.VersionsWorker --scheduler-cls dora_vllm_versions.VersionScheduler
    --additional-config '{"dora_version_slots": 2}'

A worker has a model for each slot, and all of them use one KV cache. A step computes requests of all
versions (`dora_vllm_mixed`). If that is not known to be right for the models or the settings of the server,
the scheduler puts requests of one version into a step, and versions take turns. A request names its version
by its `cache_salt`, so KV of one version never serves another. `dora_continue_with` lets running requests
continue with a newer version on their KV. The worker reports which version has computed each request of a
step, the scheduler compares, and the response lists it (`weight_versions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import dora_digest  # type: ignore[import-not-found]
import torch
from dora_version_turns import VersionTurns  # type: ignore[import-not-found]
from dora_vllm import KEEP, WorkerExtension  # type: ignore[import-not-found]
from dora_vllm_mixed import Batch, CannotMixError, MixedModel  # type: ignore[import-not-found]
from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]
from vllm.distributed.parallel_state import get_tp_group  # type: ignore[import-not-found]
from vllm.forward_context import set_forward_context  # type: ignore[import-not-found]
from vllm.logger import init_logger  # type: ignore[import-not-found]
from vllm.model_executor.layers import rotary_embedding  # type: ignore[import-not-found]
from vllm.model_executor.layers.attention import Attention  # type: ignore[import-not-found]
from vllm.model_executor.model_loader import get_model  # type: ignore[import-not-found]
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform  # type: ignore[import-not-found]
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
from vllm.v1.engine import EngineCoreOutputs  # type: ignore[import-not-found]
from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found]

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker  # type: ignore[import-not-found]
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[import-not-found]

logger = init_logger(f"vllm.{__name__}")  # vLLM sets up only its own loggers


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
        models = [slot.model for slot in self._slots]
        tensors = Counter(id(t) for model in models for t in {*model.parameters(), *model.buffers()})
        if max(tensors.values()) > 1:
            raise RuntimeError("the models of several version slots share tensors: set version_slots = 1")
        self._mixed: MixedModel | None = None  # None: a step computes one version
        self._step: Any = None  # vLLM's `SchedulerOutput`
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
        try:
            self._mixed = self._mix()
        except Exception as error:
            logger.warning("versions take turns: a step cannot compute several of them: %s", error)
        group = get_tp_group()  # the workers that divide a model must call the same layers
        can_mix = [self._mixed is not None] * group.world_size
        if group.world_size > 1:
            torch.distributed.all_gather_object(can_mix, self._mixed is not None, group=group.cpu_group)
        if not all(can_mix):
            self._mixed = None

    def _mix(self) -> MixedModel:
        """A model of all slots. Raises an error if its hidden states differ from those of the models.

        In this trial a stand-in replaces attention, and the weights of the slots differ.
        """
        self._check_settings()
        models = [slot.model for slot in self._slots]
        slots = [row % len(models) for row in range(2 * len(models))]
        trial = MixedModel(models, lambda: [(f"{row}", slot, 1) for row, slot in enumerate(slots)])
        positions = torch.arange(len(slots), device=self.device)
        inputs = {"input_ids": positions % self.model_config.get_vocab_size(), "positions": positions}
        attend, Attention.forward = Attention.forward, _depend_on_place
        try:
            with (
                _other_weights(models[1:]),  # the initial weights of all slots are equal
                set_forward_context(None, self.vllm_config, num_tokens=len(slots)),
                torch.inference_mode(),
            ):
                each = [model(**inputs) for model in models]
                expected = torch.stack([each[slot][row] for row, slot in enumerate(slots)])
                by_row = (trial(**inputs) - expected).norm(dim=-1)
                difference = (by_row.max() / expected.norm(dim=-1).max()).item()
        finally:
            Attention.forward = attend
        if not difference < (1e-3 if expected.dtype == torch.float32 else 0.05):
            raise CannotMixError(f"hidden states differ by up to {difference:.2g} of their size")
        return MixedModel(models, self._read_batch)

    def _check_settings(self) -> None:
        """Raises CannotMixError if steps with several versions are not known to be right with them."""
        config, runner = self.vllm_config, self.model_runner
        excluded = {
            "model runner V2": self.use_v2_model_runner,
            "a compiled model": not config.model_config.enforce_eager,
            "quantization": config.quant_config is not None,
            "a dtype of its own for KV": config.cache_config.cache_dtype != "auto",
            "fast prefill with shared KV": config.cache_config.kv_sharing_fast_prefill,
            "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
            "adapters": config.lora_config is not None,
            "inputs other than text": any(
                getattr(runner, name, True)
                for name in ("supports_mm_inputs", "enable_prompt_embeds", "uses_mrope")
            ),
        }
        if found := [name for name, is_set in excluded.items() if is_set]:
            raise CannotMixError(f"the server has {' and '.join(found)}")

    def _read_batch(self) -> Batch:
        """The batch of this step."""
        versions, sizes = self._step.dora_versions, self._step.num_scheduled_tokens
        return [
            (name, self._slots.index(self._slot_of(versions[name])), sizes[name])
            for name in self.model_runner.input_batch.req_ids
        ]

    def dora_info(self) -> dict[str, Any]:
        mixes = self._mixed is not None
        return {**super().dora_info(), "version_slots": len(self._slots), "mixes_versions": mixes}

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
            self._step = scheduler_output
            slots = {*map(self._slot_of, {*scheduler_output.dora_versions.values()})}
            first = min(slots, key=self._slots.index)  # whose modules without weights compute
            self.model_runner.model = first.model if len(slots) == 1 else self._mixed
            self.vllm_config.compilation_config.static_forward_context = first.layers
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if output is not None:
            output.dora_versions, output.dora_mixes = self._computed_versions(), self._mixed is not None
            self.model_runner.model = self._slots[0].model  # between steps, vLLM expects a model of its own
        return output

    def _computed_versions(self) -> dict[str, str]:
        """The version whose weights computed each request of this step."""
        model, mixed = self.model_runner.model, self._mixed
        if mixed is not None and model is mixed:
            return {name: self._slots[slot].version for name, slot in mixed.computed.items()}
        (version,) = (slot.version for slot in self._slots if slot.model is model)
        return dict.fromkeys(self._step.dora_versions, version)


def _depend_on_place(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """In place of attention, which needs KV: what a row gets depends on its place in the batch."""
    place = torch.arange(len(query), dtype=query.dtype, device=query.device)[:, None]
    return query + place * (key.mean(-1, keepdim=True) + value.mean(-1, keepdim=True))


@contextmanager
def _other_weights(models: Sequence[Any]) -> Iterator[None]:
    """Meanwhile, some weights of each model have the other sign, and all of those that a CPU has packed."""
    packed = [(layer, layer.cpu_linear) for model in models for layer in model.modules() if _is_packed(layer)]
    for layer, multiply in packed:
        layer.cpu_linear = partial(_negated, multiply)
    for model in models:
        _change_signs(model)
    try:
        yield
    finally:
        for model in models:
            _change_signs(model)
        for layer, multiply in packed:
            layer.cpu_linear = multiply


def _is_packed(layer: Any) -> bool:
    return hasattr(layer, "cpu_linear") and not layer.weight.numel()


def _negated(multiply: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    return -multiply(*args)


@torch.no_grad()
def _change_signs(model: Any) -> None:
    """Change the signs of some rows of each weight, always of the same. A second call restores all."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        signs = 2 * torch.randint(2, parameter.shape[:1], generator=generator) - 1
        parameter.mul_(signs.to(parameter).view(-1, *[1] * (parameter.dim() - 1)))


class VersionScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, for requests of several versions."""

    running: list[Any]
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = VersionTurns()
        self.decode_only: frozenset[str] = frozenset()  # ids of requests, as their client names them
        self.newest_version = ""  # of all requests that do not keep theirs; "": each keeps its version
        self._may_prioritize = True  # False once none of those could run, until a step runs
        self._mixes = False  # whether the worker computes several versions in one step
        self.computed_versions: dict[str, str] = {}  # by request, in the last step

    def schedule(self, throttle_prefills: bool = False) -> Any:
        unfinished = [*self.running, *self.kv_holding_waiting, *self.waiting]
        if self.newest_version:
            for request in unfinished:
                if not request.cache_salt.endswith((KEEP, self.newest_version)):
                    self._continue(request)
        prioritized = [request for request in unfinished if self._is_prioritized(request)]
        chosen, only_prioritized = unfinished, bool(prioritized) and self._may_prioritize
        if only_prioritized:
            chosen = prioritized + [request for request in unfinished if _is_halting(request)]
        # vLLM computes log-probs of a prompt with one call of a model.
        if not self._mixes or any(each.sampling_params.prompt_logprobs is not None for each in chosen):
            version = self._turns.next(Counter(map(_version_of, chosen)))
            chosen = [request for request in chosen if _version_of(request) == version]
        in_step = {request.request_id for request in chosen}
        with self._set_aside(lambda request: request.request_id not in in_step):
            output = super().schedule(throttle_prefills)
        output.dora_versions = {
            name: _version_of(self.requests[name]) for name in output.num_scheduled_tokens
        }
        if not output.total_num_scheduled_tokens:
            self._turns.end()
        # If the others have all rows or all KV blocks, let them run for a step.
        self._may_prioritize = output.total_num_scheduled_tokens > 0 or (
            self._may_prioritize and not only_prioritized
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
        self.computed_versions = getattr(model_runner_output, "dora_versions", {})
        if scheduler_output.total_num_scheduled_tokens:
            scheduled = scheduler_output.dora_versions
            if self.computed_versions != scheduled:
                raise RuntimeError(f"a step of {scheduled} was computed by {self.computed_versions}")
            self._mixes = model_runner_output.dora_mixes
        return super().update_from_output(scheduler_output, model_runner_output)


def _version_of(request: Any) -> str:
    salt: str = request.cache_salt
    return salt.removesuffix(KEEP)


def _is_halting(request: Any) -> bool:
    """Whether a request ends with its next token, as one does that is halted for its migration."""
    return bool(request.max_tokens <= request.num_output_tokens + 1)


def _attach_weight_version(self: Any, outputs: dict[int, Any]) -> None:
    """In place of vLLM's method, which knows one version of all requests. A message has those of one."""
    versions = self.scheduler.computed_versions
    for client, message in outputs.items():
        by_version: dict[str, list[Any]] = {}
        for output in message.outputs:
            by_version.setdefault(versions.get(output.request_id, ""), []).append(output)
        for version, own in [*by_version.items()][1:]:
            other = EngineCoreOutputs(outputs=own, weight_version=version)
            self.output_queue.put_nowait((client, other))
        if by_version:
            message.weight_version, message.outputs = next(iter(by_version.items()))


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
