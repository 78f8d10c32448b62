"""DORA-RL's scheduler of an SGLang server, on a stand-in for SGLang's own.

`real_servers.py` runs it in SGLang.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from tests.contract import fake_nixl
from tests.contract.plugins import imported_plugin
from tests.runtime.running import wait_until
from torch import Tensor

from dora.engine.backends.server_plugins import dora_kv_files as kv_files
from dora.engine.backends.server_plugins.dora_digest import ADAPTER_FILE, safetensors_digest

POOL_SIZE, MAX_ROWS = 40, 6


REFUSED_LOAD = "only DORA-RL's engine loads weights here"


class FinishLength:
    """The reason of a response that has all of its tokens."""


class FinishAbort:
    """The reason of a response that was aborted."""


@dataclass(eq=False)
class Req:
    """A request as SGLang's scheduler has it."""

    rid: str
    extra_key: str | None
    origin_input_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    custom_params: dict[str, str] | None = None
    max_new_tokens: int = 10
    output_ids: list[int] = field(default_factory=list)
    finished_reason: Any = None
    num_retracted: int = 0
    to_finish: Any = None
    return_logprob: bool = True
    lora_id: str | None = None

    def __post_init__(self) -> None:
        self.skip_radix_cache_insert = False
        self.sampling_params = SimpleNamespace(
            custom_params=self.custom_params, max_new_tokens=self.max_new_tokens
        )

    def finished(self) -> bool:
        return self.finished_reason is not None


class SamplingInfo:
    """The sampling parameters of a batch, which `filter_batch` changes in place."""

    def __init__(self, rows: list[str]) -> None:
        self.rows = rows

    @staticmethod
    def from_schedule_batch(batch: Batch, vocab_size: int) -> SamplingInfo:
        return SamplingInfo([req.rid for req in batch.reqs])


@dataclass(eq=False)
class Batch:
    reqs: list[Req]
    batch_is_full: bool = False
    checks: list[bool] = field(default_factory=list)  # whether there is room for the next tokens
    is_prefill: bool = False
    chunked_req: Req | None = None
    model_config = SimpleNamespace(vocab_size=29)

    def __post_init__(self) -> None:
        self.rows = [req.rid for req in self.reqs]  # as its tensors have them
        self.sampling_info = SamplingInfo([*self.rows])

    @property
    def forward_mode(self) -> Any:
        return SimpleNamespace(is_extend=lambda: self.is_prefill)

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(
        self, reqs_to_exclude: list[Req] | None = None, keep_indices: list[int] | None = None
    ) -> None:
        kept = self.reqs if keep_indices is None else [self.reqs[number] for number in keep_indices]
        if keep_indices is None:
            kept = [req for req in kept if req not in (reqs_to_exclude or ()) and not req.finished()]
        self.reqs, self.rows = kept, [req.rid for req in kept]
        self.sampling_info.rows[:] = [row for row in self.sampling_info.rows if row in self.rows]

    def merge_batch(self, other: Batch) -> None:
        assert not {*self.reqs} & {*other.reqs}, "a request is in two batches"
        self.reqs, self.rows = self.reqs + other.reqs, self.rows + other.rows
        self.sampling_info.rows += other.sampling_info.rows
        self.checks += other.checks

    def check_decode_mem(self) -> bool:
        return self.checks.pop(0) if self.checks else True


class MHATokenToKVPool:
    """As in SGLang, by its name."""

    kv_cache_layout = "nhd"

    def __init__(self, layer: Tensor) -> None:
        self.k_buffer, self.v_buffer = [layer], [layer.clone()]


class Allocator:
    """A pool whose only layer has a number for each token."""

    def __init__(self) -> None:
        self.slots = [*range(POOL_SIZE)]
        self.layer = torch.zeros(POOL_SIZE, 1, 2)

    def get_kvcache(self) -> MHATokenToKVPool:
        return MHATokenToKVPool(self.layer)

    def available_size(self) -> int:
        return len(self.slots)

    def alloc(self, num: int) -> Tensor | None:
        if num > len(self.slots):
            return None
        taken, self.slots = self.slots[:num], self.slots[num:]
        return torch.tensor(taken)

    def free(self, slots: Tensor) -> None:
        self.slots += slots.tolist()
        assert len({*self.slots}) == len(self.slots), "freed twice"


class PrefixCache:
    """Sequences of tokens and their slots, by extra key."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator, self.num_locks = allocator, 0
        self._stored: dict[Any, tuple[list[int], list[int]]] = {}

    def supports_swa(self) -> bool:
        return False

    supports_mamba = supports_swa

    def supports_prefix_sharing(self) -> bool:
        return True

    def match_prefix(self, params: Any) -> SimpleNamespace:
        tokens, slots = self._stored.get(params.key.extra_key, ([], []))
        pairs = zip(tokens, params.key.token_ids, strict=False)
        num = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(params.key)))
        return SimpleNamespace(device_prefix_len=num, last_device_node=slots[:num])

    def path_device_indices(self, node: list[int]) -> Tensor:
        return torch.tensor(node, dtype=torch.int64)

    def insert(self, params: Any) -> None:
        """Free the slots of what is stored already, but for the first `prev_prefix_len`, as SGLang does."""
        match = self.match_prefix(params)
        duplicates = params.value[params.prev_prefix_len : match.device_prefix_len]
        self._allocator.free(duplicates)
        slots = match.last_device_node + params.value[match.device_prefix_len :].tolist()
        self._stored[params.key.extra_key] = ([*params.key.token_ids], slots)

    def evict(self, params: Any) -> None:
        """Nothing can be evicted."""

    def lock(self, node: list[int]) -> object:
        self.num_locks += 1
        return node

    def unlock(self, lock: object) -> None:
        self.num_locks -= 1


class WorkerGroup:
    """The workers of a server, each in a thread. A call waits until all of them have made it."""

    def __init__(self, size: int) -> None:
        self._barrier, self._values = Barrier(size, timeout=20.0), [None] * size

    def member(self, rank: int) -> SimpleNamespace:
        gather, ranks = partial(self._gather, rank), [*range(len(self._values))]
        return SimpleNamespace(
            world_size=len(ranks),
            rank_in_group=rank,
            rank=rank,
            ranks=ranks,
            all_gather_object=gather,
            cpu_group=gather,
        )

    def _gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = [*self._values]
        self._barrier.wait()
        return values


class Scheduler:
    """Prefills all waiting requests before any decodes. A token is the number of its place; its KV is the
    token.
    """

    def __init__(
        self,
        slots: list[Any],
        tp_group: Any = None,
        num_stages: int = 1,
        num_attention_groups: int = 1,
        dcp_size: int = 1,
        nnodes: int = 1,
        page_size: int = 1,
        enable_overlap: bool = False,
        graph: object | None = None,
        is_speculative: bool = False,
        enable_return_routed_experts: bool = False,
    ) -> None:
        self.enable_overlap, self.page_size = enable_overlap, page_size
        self.spec_algorithm = SimpleNamespace(is_none=lambda: not is_speculative)
        self.waiting_queue: list[Req] = []
        self.enable_lora = False
        self.running_batch, self.last_batch = Batch([]), None
        self.chunked_req, self.tp_group = None, tp_group or WorkerGroup(1).member(0)
        self.tp_size = self.tp_group.world_size
        self.attn_tp_group = SimpleNamespace(world_size=self.tp_size // num_attention_groups)
        self.world_group = SimpleNamespace(world_size=self.tp_size * num_stages)
        self.server_args = SimpleNamespace(
            dcp_size=dcp_size, nnodes=nnodes, enable_return_routed_experts=enable_return_routed_experts
        )
        self.model_config = SimpleNamespace(dtype=torch.float32)
        runner = SimpleNamespace(
            dora_slots=slots,
            model=None,
            decode_cuda_graph_runner=graph,
            device="cpu",
            weight_updater=SimpleNamespace(_assert_weight_cache_inactive=lambda call: None),
        )
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.token_to_kv_pool_allocator = Allocator()
        self.tree_cache = PrefixCache(self.token_to_kv_pool_allocator)
        self.req_to_token_pool: set[Req] = set()  # that have a row
        self.is_blocked = False
        self.aborted: list[str] = []
        self.streamed: list[Req] = []
        self.output_streamer = SimpleNamespace(stream_output=lambda reqs, _: self.streamed.extend(reqs))
        self.computed: list[tuple[Any, list[str]]] = []  # model and requests of each step

    def _add_request_to_queue(self, req: Req, is_retracted: bool) -> None:
        self.waiting_queue.append(req)

    def _release_aborted_request(self, req: Req) -> None:
        pass

    def send_abort_output(self, abort_req: Any, req: Req) -> None:
        self.aborted.append(req.rid)

    def get_internal_state(self, request: Any) -> SimpleNamespace:
        return SimpleNamespace(internal_state={})

    def set_internal_state(self, request: Any) -> SimpleNamespace:
        return SimpleNamespace(updated="by SGLang")

    def load_lora_adapter(self, request: Any) -> SimpleNamespace:
        return SimpleNamespace(success=Path(request.lora_path).is_dir(), error_message=None)

    def record_weight_version_change(self, new_version: str) -> None:
        self.only_version = new_version

    def _collect_inflight_batches(self) -> list[Any]:
        return [self.running_batch, self.last_batch]

    def is_fully_idle(self) -> bool:
        return not self.waiting_queue and not self.running_batch.reqs

    def get_next_batch_to_run(self, running_batch: Batch, last_batch: Batch | None) -> SimpleNamespace:
        if last_batch is not None and last_batch.is_prefill:
            last_batch.filter_batch()
            running_batch.merge_batch(last_batch)
        running_batch.filter_batch()
        if self.is_blocked:
            return SimpleNamespace(batch_to_run=None, running_batch=running_batch)
        num_free = MAX_ROWS - len(self.req_to_token_pool)
        if not running_batch.batch_is_full and self.waiting_queue[:num_free]:
            batch = Batch(self.waiting_queue[:num_free], is_prefill=True, chunked_req=self.chunked_req)
            self.waiting_queue = self.waiting_queue[num_free:]
            self.req_to_token_pool |= {*batch.reqs}
            return SimpleNamespace(batch_to_run=batch, running_batch=running_batch)
        decoding = self.update_running_batch(running_batch) if running_batch.reqs else None
        return SimpleNamespace(batch_to_run=decoding, running_batch=running_batch)

    def update_running_batch(self, batch: Batch) -> Batch | None:
        if batch.check_decode_mem():
            return batch
        self.aborted += [req.rid for req in batch.reqs]
        return None

    def run_batch(self, batch: Batch) -> str:
        assert batch.rows == batch.sampling_info.rows == [req.rid for req in batch.reqs]
        self.computed.append((self.tp_worker.model_runner.model, [req.rid for req in batch.reqs]))
        for req in batch.reqs:
            req.output_ids.append(len(req.origin_input_ids) + len(req.output_ids) + 1)
        return "result"

    def process_batch_result(self, batch: Batch, result: str) -> None:
        for req in batch.reqs:
            if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                req.finished_reason = FinishLength()
                self.req_to_token_pool.remove(req)
                if not req.skip_radix_cache_insert:
                    self._cache(req)

    def _cache(self, req: Req) -> None:
        tokens = [*req.origin_input_ids, *req.output_ids][:-1]
        slots = self.token_to_kv_pool_allocator.alloc(len(tokens))
        assert slots is not None
        for layer in self._kv.layers:  # type: ignore[attr-defined]
            layer[slots] = torch.tensor(tokens, dtype=torch.float32)[:, None, None]
        key = RadixKey(tokens, req.extra_key)
        self.tree_cache.insert(SimpleNamespace(key=key, value=slots, prev_prefix_len=0))

    def step(self) -> list[str]:
        """A pass of SGLang's event loop. Returns the requests of the step."""
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch = plan.running_batch
        if plan.batch_to_run:
            self.process_batch_result(plan.batch_to_run, self.run_batch(plan.batch_to_run))
        self.last_batch = plan.batch_to_run
        return [req.rid for req in plan.batch_to_run.reqs] if plan.batch_to_run else []


class ModelLoader:
    """SGLang's. A model can be used when it is not `open`."""

    open: ClassVar[dict[str, list[str]]] = {}  # names of the weights that a model has got so far
    loaded: ClassVar[dict[str, list[str]]] = {}

    @classmethod
    def restore_weights_before_loading(cls, model: str, device: torch.device) -> None:
        assert model not in cls.open
        cls.open[model] = []

    @classmethod
    def load_weights_only(cls, model: str, weights: Iterator[tuple[str, Tensor]], device: object) -> None:
        cls.open[model] += [name for name, _ in weights]

    @classmethod
    def postprocess_weights(cls, model: str, device: torch.device) -> None:
        cls.loaded[model] = cls.open.pop(model)


class RadixKey:
    def __init__(self, token_ids: list[int], extra_key: str | None) -> None:
        self.token_ids, self.extra_key = token_ids, extra_key

    def __len__(self) -> int:
        return len(self.token_ids)


def broadcast_pyobj(names: list[str], rank: int, group: Callable[[Any], list[Any]], src: int) -> list[str]:
    return list(group(names)[src])


def retract_all(reqs: list[Req], req_to_token_pool: set[Req], **pools: Any) -> None:
    for req in reqs:
        req_to_token_pool.remove(req)
        req.num_retracted += 1


def params(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**values)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`dora_sglang_scheduler` with `Scheduler` as its base."""
    components = "sglang.srt.model_executor.model_runner_components"
    ModelLoader.open.clear()
    ModelLoader.loaded.clear()
    prefix_cache = {name: params for name in ("EvictParams", "InsertParams", "MatchPrefixParams")}
    stand_ins: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt.managers.schedule_batch": {
            "FINISH_ABORT": FinishAbort,
            "FINISH_LENGTH": FinishLength,
            "ScheduleBatch": Batch,
            "retract_all": retract_all,
        },
        "sglang.srt.managers.io_struct": {
            "SetInternalStateReqOutput": params,
            "UpdateWeightFromDiskReqOutput": params,
        },
        "sglang.srt.managers.scheduler": {"Scheduler": Scheduler},
        "sglang.srt.mem_cache.base_prefix_cache": prefix_cache,
        "sglang.srt.sampling.sampling_batch_info": {"SamplingBatchInfo": SamplingInfo},
        "sglang.srt.utils": {"broadcast_pyobj": broadcast_pyobj},
        "sglang.srt.utils.weight_versions": {
            "WeightVersionSpan": params,
            "compute_weight_version_spans": None,
        },
        "sglang.srt.mem_cache.radix_cache": {"RadixKey": RadixKey},
        f"{components}.load_model_utils": {
            "load_model_with_memory_saver": lambda **_: SimpleNamespace(model="another model")
        },
        f"{components}.weight_updater": {"_unsupported_derived_weight_cache_error": lambda model: None},
        "sglang.srt.model_loader.loader": {"DefaultModelLoader": ModelLoader},
        "sglang.srt.model_loader.utils": {"set_default_torch_dtype": nullcontext},
    }
    with imported_plugin(monkeypatch, "dora_sglang_scheduler", stand_ins) as module:
        yield module


Make = Callable[..., Any]


@pytest.fixture
def make(module: Any) -> Make:
    """Makes a scheduler whose slots have versions: the model of "a" is "model a"."""

    def make(*versions: str, **options: Any) -> Any:
        rank = options["tp_group"].rank_in_group if "tp_group" in options else 0
        slots = [module.Slot(f"model {version}{rank or ''}", version) for version in versions]
        scheduler = module.VersionScheduler(slots, **options)
        scheduler._turns = module.VersionTurns(turn_steps=1)
        scheduler.weight_digests = {version: f"digest of {version}" for version in versions}
        return scheduler

    return make


def add(scheduler: Any, *requests: Req) -> None:
    for request in requests:
        scheduler._add_request_to_queue(request)


def test_a_step_has_requests_of_one_version_and_its_model(make: Make) -> None:
    """Versions take turns. Requests of the others keep their places."""
    scheduler = make("a", "b")
    add(scheduler, Req("a1", "a"), Req("b1", "b", max_new_tokens=1), Req("a2", "a"))
    assert [scheduler.step() for _ in range(2)] == [["a1", "a2"], ["b1"]]
    add(scheduler, Req("b2", "b"))
    assert [scheduler.step() for _ in range(3)] == [["a1", "a2"], ["b2"], ["a1", "a2"]]
    assert [model for model, _ in scheduler.computed] == [f"model {label}" for label in "ababa"]


def test_requests_of_versions_without_a_turn_are_unfinished(make: Make) -> None:
    """An abort of them finds them, and the server is not idle."""
    scheduler = make("a", "b")
    add(scheduler, Req("a1", "a"), Req("b1", "b", max_new_tokens=1))
    assert [scheduler.step() for _ in range(2)] == [["a1"], ["b1"]]
    found = [batch for batch in scheduler._collect_inflight_batches() if batch]
    assert {req.rid for batch in found for req in batch.reqs} == {"a1", "b1"}
    assert not scheduler.is_fully_idle()
    while scheduler.step():
        pass
    assert scheduler.is_fully_idle()
    assert scheduler._aside == {}


def test_a_version_without_anything_to_run_ends_its_turn(make: Make, module: Any) -> None:
    scheduler = make("a", "b")
    scheduler._turns = module.VersionTurns(turn_steps=8)
    add(scheduler, Req("a1", "a"), Req("b1", "b"))
    scheduler.is_blocked = True
    assert scheduler.step() == []
    scheduler.is_blocked = False
    assert scheduler.step() == ["b1"]


def test_requests_of_other_versions_make_room_before_one_is_aborted(make: Make) -> None:
    """One by one, first the shortest. It waits, and continues in the next turn of its version."""
    scheduler = make("a", "b")
    long, short, own = Req("a1", "a"), Req("a2", "a"), Req("b1", "b")
    add(scheduler, long, own)
    assert [scheduler.step() for _ in range(3)] == [["a1"], ["b1"], ["a1"]]
    add(scheduler, short)
    scheduler._aside["b"].checks += [False, True, True]
    assert [scheduler.step() for _ in range(2)] == [["b1"], ["a1", "a2"]]
    assert (long.num_retracted, short.num_retracted, scheduler.aborted) == (1, 0, [])
    scheduler._aside["b"].checks += [False, True, True]
    assert scheduler.step() == ["b1"]
    assert (long.num_retracted, short.num_retracted, scheduler.aborted) == (1, 1, [])
    assert [scheduler.step() for _ in range(3)] == [["a2"], ["b1"], ["a1", "a2"]]
    scheduler._aside["b"].checks += 4 * [False]
    assert scheduler.step() == []
    assert scheduler.aborted == ["b1"]


def test_an_aborted_request_that_was_retracted_sends_its_last_tokens_once(make: Make) -> None:
    """By the stream of its tokens, which knows what was sent."""
    scheduler = make("a", "b")
    fresh, retracted = Req("a1", "a"), Req("a2", "a", output_ids=[4, 5])
    for req in (fresh, retracted):
        scheduler.send_abort_output(None, req)
    assert (scheduler.aborted, scheduler.streamed) == (["a1"], [retracted])
    assert isinstance(retracted.finished_reason, FinishAbort)


def test_requests_join_a_batch_that_was_full_when_others_had_the_rows(make: Make) -> None:
    scheduler = make("a", "b")
    add(scheduler, Req("a1", "a", max_new_tokens=2), Req("b1", "b"))
    assert [scheduler.step() for _ in range(3)] == [["a1"], ["b1"], ["a1"]]
    scheduler._aside["b"].batch_is_full = True
    add(scheduler, Req("b2", "b"))
    assert [scheduler.step() for _ in range(2)] == [["b2"], ["b1", "b2"]]


@pytest.mark.parametrize("options", [{"enable_overlap": True}, {"graph": "a graph"}])
def test_several_versions_need_steps_that_use_the_chosen_model(make: Make, options: dict[str, Any]) -> None:
    """Else a step could compute with other weights than its version says."""
    with pytest.raises(RuntimeError, match="--disable-cuda-graph"):
        make("a", "b", **options)
    make("a", **options)


def test_several_versions_exclude_speculative_decoding(make: Make) -> None:
    with pytest.raises(RuntimeError, match="exclude speculative decoding"):
        make("a", "b", is_speculative=True)
    make("a", is_speculative=True)


def test_a_prompt_that_is_computed_in_parts_keeps_the_turn(make: Make) -> None:
    scheduler = make("a", "b")
    add(scheduler, Req("a1", "a"), Req("b1", "b"))
    assert scheduler.step() == ["a1"]
    scheduler.chunked_req = Req("a2", "a")
    assert [scheduler.step() for _ in range(2)] == [["a1"], ["a1"]]
    scheduler.chunked_req = None
    assert scheduler.step() == ["b1"]


def call(scheduler: Any, *names: str) -> Any:
    """One of the engine's calls. Returns the answer."""
    return scheduler.set_internal_state(SimpleNamespace(server_args=dict.fromkeys(names, 1))).updated


def test_requests_near_their_deadline_run_before_all_others(make: Make, module: Any) -> None:
    """Also one that comes later. The others keep their rows, but end if they are aborted or halted."""
    scheduler = make("a", "b")
    hurried, halted, late = (Req(rid, "a", max_new_tokens=4) for rid in ("a1", "a2", "a3"))
    add(scheduler, hurried, halted, Req("b1", "b"))
    assert [scheduler.step() for _ in range(2)] == [["a1", "a2"], ["b1"]]
    assert call(scheduler, module.DECODE_ONLY, "a1", "a3")
    assert [scheduler.step() for _ in range(2)] == [["a1"], ["a1"]]
    add(scheduler, late)
    halted.sampling_params.max_new_tokens = 2
    assert [scheduler.step() for _ in range(2)] == [["a3"], ["a1", "a2", "a3"]]
    assert [scheduler.step() for _ in range(2)] == [["a3"], ["a3"]]
    assert (scheduler._aside.keys(), len(halted.output_ids)) == ({"b"}, 2)
    assert scheduler.step() == ["b1"]
    assert call(scheduler, module.DECODE_ONLY)
    add(scheduler, Req("a1", "a"))
    assert [scheduler.step() for _ in range(2)] == [["a1"], ["b1"]]


def test_requests_that_cannot_run_first_wait_for_those_that_have_the_rows(make: Make, module: Any) -> None:
    """The others run for a step whenever none of them could."""
    scheduler = make("a", "b")
    add(scheduler, *(Req(f"b{number}", "b", max_new_tokens=3) for number in range(MAX_ROWS)))
    assert len(scheduler.step()) == MAX_ROWS
    call(scheduler, module.DECODE_ONLY, "a1")
    add(scheduler, Req("a1", "a"))
    steps = [scheduler.step() for _ in range(6)]
    assert [len(step) for step in steps] == [0, MAX_ROWS, 0, MAX_ROWS, 1, 1]
    assert steps[-1] == ["a1"]


def test_requests_of_a_third_group_do_not_keep_those_with_the_rows_from_running(
    make: Make, module: Any
) -> None:
    """The prioritized request and that of another version wait for the rows of the others."""
    scheduler = make("a", "b")
    add(scheduler, *(Req(f"a{number}", "a", max_new_tokens=3) for number in range(MAX_ROWS)))
    assert len(scheduler.step()) == MAX_ROWS
    call(scheduler, module.DECODE_ONLY, "first")
    add(scheduler, first := Req("first", "a"), other := Req("b1", "b"))
    for _ in range(40):
        scheduler.step()
    assert first.finished()
    assert other.finished()


def test_prioritized_requests_make_room_last(make: Make, module: Any) -> None:
    scheduler = make("a", "b")
    hurried, long = Req("a1", "a"), Req("a2", "a", output_ids=[4, 5])
    add(scheduler, hurried, long, Req("b1", "b"))
    assert [scheduler.step() for _ in range(3)] == [["a1", "a2"], ["b1"], ["a1", "a2"]]
    call(scheduler, module.DECODE_ONLY, "a1", "b1")
    scheduler._aside["b"].checks += [False, True, True]
    assert scheduler.step() == ["b1"]
    assert (hurried.num_retracted, long.num_retracted) == (0, 1)


def spans(module: Any, req: Req) -> list[tuple[str, int, int]]:
    """Which weights the last event lists."""
    event = SimpleNamespace(rids=[req.rid], completion_tokens=[len(req.output_ids)], weight_versions=[None])
    module.list_versions(lambda self, req: None)(event, req=req)
    return [(span.version, span.start, span.end) for span in event.weight_versions[0]]


def test_requests_continue_with_a_newer_version_on_their_kv(make: Make, module: Any) -> None:
    """But for those that keep theirs. KV of two versions serves no other request."""
    scheduler = make("a", "b", "c")
    long_prompt, aside = Req("a4", "a"), Req("c1", "c")
    running, keeping, waiting = (Req(rid, key) for rid, key in (("a1", "a"), ("a2", "a#keep"), ("a3", "a")))
    add(scheduler, aside, running, keeping)
    assert [scheduler.step() for _ in range(3)] == [["a1", "a2"], ["c1"], ["a1", "a2"]]
    add(scheduler, prefilled := Req("a6", "a"))
    assert [scheduler.step() for _ in range(2)] == [["c1"], ["a6"]]
    add(scheduler, waiting)
    scheduler.chunked_req = long_prompt
    assert call(scheduler, module.CONTINUE_WITH, "b")
    assert scheduler.free_slot(["a", "b"]).version == "", "nothing uses c any more"
    assert scheduler.step() == ["a3"]
    scheduler.chunked_req = None
    late = Req("a5", "a")
    add(scheduler, late)
    while not late.finished() or not keeping.finished():
        scheduler.step()
    assert {req.extra_key for req in (running, waiting, late, long_prompt, aside, prefilled)} == {"b"}
    assert spans(module, running) == [("a", 0, 2), ("b", 2, 10)]
    assert spans(module, aside) == [("c", 0, 2), ("b", 2, 10)]
    assert spans(module, prefilled) == [("a", 0, 1), ("b", 1, 10)]
    assert spans(module, keeping) == [("a", 0, 10)]
    assert spans(module, waiting) == spans(module, late) == [("b", 0, 10)]
    every = (running, keeping, waiting, late, long_prompt, aside, prefilled)
    assert [req.rid for req in every if req.skip_radix_cache_insert] == ["a1", "a4", "c1", "a6"]
    assert call(scheduler, module.CONTINUE_WITH)
    add(scheduler, last := Req("a7", "a"))
    assert last.extra_key == "a"


def test_other_changes_of_the_internal_state_are_sglangs(make: Make) -> None:
    assert call(make("a", "b"), "pp_max_micro_batch_size") == "by SGLang"


def test_requests_that_name_no_version_run_with_any(make: Make) -> None:
    """SGLang's own checks of its health."""
    scheduler = make("a", "")
    add(scheduler, Req("check", None, max_new_tokens=1), Req("a1", "a"))
    assert sorted([scheduler.step(), scheduler.step()]) == [["a1"], ["check"]]


def test_requests_of_a_version_that_is_not_loaded_end_the_server(make: Make) -> None:
    scheduler = make("a", "b")
    add(scheduler, Req("c1", "c"))
    with pytest.raises(RuntimeError, match=r"versions \['c'\]; loaded: \['a', 'b'\]"):
        scheduler.step()


def test_a_server_with_one_slot_schedules_as_sglang(make: Make) -> None:
    scheduler = make("a")
    add(scheduler, Req("a1", "a"), Req("b1", "b"))
    assert scheduler.step() == ["a1", "b1"]
    scheduler.record_weight_version_change("b")
    assert scheduler.only_version == "b"


@pytest.fixture
def weights_file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    names = ("embedding.weight", *(f"layers.{n}.{name}" for n in range(2) for name in ("up", "down")))
    save_file({name: torch.full((2,), float(number)) for number, name in enumerate(names)}, path)
    return path


Load = Callable[..., tuple[bool, str]]


@pytest.fixture
def load(module: Any, weights_file: Path) -> Load:
    """Loads a part of a version at a scheduler, as a call to the server does. Returns success and message."""

    def load(
        scheduler: Any,
        label: str,
        *kept: str,
        part: int = 0,
        max_bytes: float = math.inf,
        path: Path = weights_file,
    ) -> tuple[bool, str]:
        manager = SimpleNamespace(
            scheduler=scheduler,
            flush_cache_after_weight_update=lambda request, is_done, message: (is_done, message + " flushed"),
            _observe_weight_load=nullcontext,
        )
        manifest = {module.LOADED_KEY: [*kept], module.PART_KEY: [part, max_bytes]}
        output = module.load_part(
            manager, params(weight_version=label, model_path=str(path), manifest=manifest)
        )
        return output.success, output.message

    return load


def test_a_load_replaces_a_version_that_is_not_kept(make: Make, load: Load, weights_file: Path) -> None:
    scheduler, digest = make("a", "b"), safetensors_digest(str(weights_file))
    assert load(scheduler, "c", "b") == (True, f"DORA's digest: {digest}. flushed")
    assert [(slot.model, slot.version) for slot in scheduler._slots] == [("model a", "c"), ("model b", "b")]
    assert scheduler.weight_digests == {"b": "digest of b", "c": digest}
    assert not hasattr(scheduler, "only_version")
    assert load(scheduler, "d", "b", "c") == (False, "RuntimeError: requests use the weights in all slots")
    one = make("a")
    assert load(one, "b")[0]
    assert one.only_version == "b"


def test_a_version_is_loaded_in_parts_between_steps(make: Make, load: Load) -> None:
    """A part has whole layers, whose weights a loader may fuse. The version is usable after the last one."""
    scheduler, layers = (
        make("", "a"),
        [{"embedding.weight"}] + [{f"layers.{n}.down", f"layers.{n}.up"} for n in range(2)],
    )
    assert load(scheduler, "b", "a", part=0, max_bytes=24) == (True, "")
    (names,) = ModelLoader.open.values()
    assert {*names} == layers[0] | layers[1]
    add(scheduler, Req("a1", "a", max_new_tokens=1), Req("health", None, max_new_tokens=1))
    assert sorted([scheduler.step(), scheduler.step()]) == [["a1"], ["health"]]
    assert {model for model, _ in scheduler.computed} == {"model a"}, "not that which is being loaded"
    assert [slot.version for slot in scheduler._slots] == ["", "a"]
    assert load(scheduler, "b", "a", part=1, max_bytes=24)[0]
    assert [slot.version for slot in scheduler._slots] == ["b", "a"]
    assert {*ModelLoader.loaded["model "]} == layers[0] | layers[1] | layers[2]
    for part in range(3):
        assert bool(load(scheduler, "c", "a", part=part, max_bytes=1)[1]) == (part == 2), (
            "a layer is not divided"
        )


def test_a_load_that_fails_or_is_given_up_leaves_the_slot_free(
    make: Make, load: Load, tmp_path: Path
) -> None:
    scheduler, missing = make("a", ""), tmp_path / "missing"
    assert load(scheduler, "b", "a", part=0, max_bytes=1) == (True, "")
    assert load(scheduler, "c", "a", part=0, max_bytes=1) == (True, "")
    assert "expected part 1 of" in load(scheduler, "c", "a", part=1, path=missing)[1]
    assert "an earlier part of this load has failed" in load(scheduler, "c", "a", part=1)[1]
    assert not load(scheduler, "c", "a", path=missing)[0]
    assert load(scheduler, "c", "a", part=0, max_bytes=1) == (True, "")
    assert "expected part 1 of" in load(scheduler, "c", "a", part=2)[1]
    assert ([slot.version for slot in scheduler._slots], ModelLoader.open) == (["a", ""], {})
    assert load(scheduler, "d", "a")[0]
    assert [slot.version for slot in scheduler._slots] == ["a", "d"]


def test_weights_that_sglang_must_not_change_stay(make: Make, load: Load) -> None:
    def is_shared(call: str) -> None:
        raise RuntimeError("the weights belong to another process")

    scheduler = make("a")
    scheduler.runner.weight_updater._assert_weight_cache_inactive = is_shared
    assert load(scheduler, "b") == (False, "RuntimeError: the weights belong to another process")
    assert ModelLoader.open == {}


def test_a_load_by_another_client_is_refused(make: Make, module: Any) -> None:
    """Responses would name weights that did not generate them."""
    request = params(weight_version="b", model_path="folder", manifest=None)
    output = module.load_part(SimpleNamespace(scheduler=make("a", "")), request)
    assert (output.success, output.message) == (False, REFUSED_LOAD)


def test_responses_list_the_adapters_that_generated_them(
    make: Make, load: Load, module: Any, weights_file: Path
) -> None:
    """Requests of several adapters share a step. The initial model, which adapters add to, stays."""
    folder = weights_file.parent
    file = weights_file.rename(folder / ADAPTER_FILE)
    scheduler = make("")
    scheduler.enable_lora = True
    for name in ("a", "b"):
        loaded = scheduler.load_lora_adapter(
            params(lora_id=f"id of {name}", lora_name=name, lora_path=folder)
        )
        assert loaded.error_message == safetensors_digest(str(file))
    rejected = scheduler.load_lora_adapter(params(lora_id="id", lora_name="c", lora_path=folder / "none"))
    assert rejected.error_message is None
    first, second = Req("a1", "a", lora_id="id of a"), Req("b1", "b", lora_id="id of b")
    add(scheduler, first, second)
    assert scheduler.step() == ["a1", "b1"]
    assert spans(module, first) == [("a", 0, 1)]
    assert spans(module, second) == [("b", 0, 1)]
    assert "without --enable-lora" in load(scheduler, "d", path=file)[1]
    with pytest.raises(RuntimeError, match="weights under the adapters"):
        scheduler.record_weight_version_change("d")


def test_an_adapter_that_one_worker_rejects_does_not_hold_up_the_others(
    make: Make, weights_file: Path, tmp_path: Path
) -> None:
    weights_file.rename(tmp_path / ADAPTER_FILE)
    group = WorkerGroup(2)

    def load(rank: int) -> SimpleNamespace:
        scheduler = make("", tp_group=group.member(rank))
        folder = (tmp_path, tmp_path / "none")[rank]
        answer: SimpleNamespace = scheduler.load_lora_adapter(
            params(lora_id="a", lora_name="a", lora_path=folder)
        )
        return answer

    with ThreadPoolExecutor(2) as threads:
        accepted, rejected = threads.map(load, range(2))
    assert accepted.success
    assert not rejected.success


def test_a_load_never_replaces_a_version_of_unfinished_requests(make: Make) -> None:
    """The engine may have aborted them just now."""
    scheduler = make("a", "b")
    add(scheduler, Req("a1", "a"), Req("b1", "b", max_new_tokens=1))
    assert scheduler.free_slot(()) is None
    assert [scheduler.step() for _ in range(2)] == [["a1"], ["b1"]]
    assert scheduler.free_slot(()).model == "model b"
    assert make("a").free_slot(()).model == "model a"


def test_a_server_loads_a_model_for_each_slot(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(runner: Any) -> None:
        runner.model = "first model"

    names = ("load_config", "device", "gpu_id", "memory_saver_adapter")
    runner = SimpleNamespace(is_draft_worker=False, model_config=model_config(), **dict.fromkeys(names))
    monkeypatch.setenv(module.SLOTS_VARIABLE, "3")
    module.load_slots(load_model)(runner)
    assert [slot.model for slot in runner.dora_slots] == ["first model", "another model", "another model"]


def model_config(is_tied: bool = False) -> Any:
    return SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=is_tied))


@pytest.mark.parametrize("is_tied_by_sglang", [True, False])
def test_a_model_whose_head_sglang_does_not_tie_is_refused(module: Any, is_tied_by_sglang: bool) -> None:
    """Its head would be zero, and each token equally likely."""
    embedding = torch.nn.Embedding(3, 2)
    head = embedding if is_tied_by_sglang else torch.nn.Embedding(3, 2)
    model = SimpleNamespace(lm_head=head, get_input_embeddings=lambda: embedding)
    runner = SimpleNamespace(is_draft_worker=False, model_config=model_config(is_tied=True), model=model)
    load = partial(module.load_slots(lambda runner: None), runner)
    if is_tied_by_sglang:
        load()
        assert [slot.model for slot in runner.dora_slots] == [model]
    else:
        with pytest.raises(RuntimeError, match="does not tie the embeddings of SimpleNamespace"):
            load()


def export(scheduler: Any, folder: Path, **options: Any) -> Req:
    """A request with three tokens whose export is ordered after the second one."""
    request = start(scheduler, folder, **options)
    kv_files.order_export(folder)
    scheduler.step()
    return request


def start(scheduler: Any, folder: Path, **options: Any) -> Req:
    """A request with two tokens whose KV may be ordered into the folder."""
    request = Req("r", "a", custom_params={"dora_export": str(folder)}, **options)
    add(scheduler, request)
    for _ in range(2):
        scheduler.step()
    return request


def kv_of(scheduler: Any, tokens: list[int], label: str = "a") -> list[float]:
    """The KV in the prefix cache of a sequence, a number for each token."""
    match = scheduler.tree_cache.match_prefix(params(key=RadixKey(tokens, label)))
    rows = [layer[match.last_device_node].flatten(1).tolist() for layer in scheduler._kv.layers]
    assert rows[0] == rows[1]
    return [number for number, _ in rows[0]]


@pytest.fixture
def _nixl(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV moves over a stand-in for NIXL."""
    monkeypatch.setenv(module.KV_CONNECTOR_VARIABLE, "nixl")
    stand_in = ModuleType(fake_nixl.MODULE)
    vars(stand_in).update(fake_nixl.MEMBERS)
    monkeypatch.setitem(sys.modules, fake_nixl.MODULE, stand_in)
    monkeypatch.setattr(fake_nixl.Agent, "agents", {})


@pytest.mark.usefixtures("_nixl")
def test_each_worker_reads_its_part_over_nixl(make: Make, tmp_path: Path) -> None:
    """The servers say that their KV moves by tickets. What was read is freed."""
    folder, source, destination = tmp_path / "r", of_two_workers(make, "a"), of_two_workers(make, "a", "b")
    assert {worker._layout[0] for worker in source} == {kv_files.BY_TICKET}
    in_both(partial(start, folder=folder), source)
    kv_files.order_export(folder)
    in_both(lambda worker: worker.step(), source)
    assert [file.name for file in folder.iterdir()] == [kv_files.TICKET_FILE]
    assert kv_files.read_ticket(folder).num_tokens == 5
    assert [len(worker._kv._exported) for worker in source] == [1, 1]
    tokens = [1, 2, 3, 4, 5, 6]
    in_both(lambda worker: add(worker, Req("r2", "a", tokens, {"dora_import": str(folder)})), destination)
    for worker in destination:
        assert kv_of(worker, tokens) == [1.0, 2.0, 3.0, 4.0, 5.0]
    wait_until(lambda: not any(worker._kv._exported for worker in source))


def test_a_request_moves_with_its_kv(make: Make, tmp_path: Path) -> None:
    """What the destination has cached already stays, and all but the last token is there."""
    source, destination = make("a"), make("a", "b")
    exported = export(source, tmp_path / "r")
    assert (exported.finished(), exported.output_ids) == (True, [4, 5, 6])
    add(destination, Req("x", "a", origin_input_ids=[1, 2, 9], max_new_tokens=1))
    destination.step()
    num_free = destination.token_to_kv_pool_allocator.available_size()
    tokens = [1, 2, 3, 4, 5, 6]
    add(destination, Req("r2", "a", tokens, {"dora_import": str(tmp_path / "r")}))
    assert kv_of(destination, tokens) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert destination.token_to_kv_pool_allocator.available_size() == num_free - 3
    assert destination.tree_cache.num_locks == 0
    assert kv_of(destination, tokens, "b") == []


def test_a_request_that_ends_by_itself_is_not_exported(make: Make, tmp_path: Path) -> None:
    scheduler = make("a")
    request = Req("r", "a", custom_params={"dora_export": str(tmp_path / "r")}, max_new_tokens=1)
    add(scheduler, request)
    scheduler.step()
    assert [*tmp_path.iterdir()] == []
    aborted = Req("s", "a", custom_params={"dora_export": str(tmp_path / "s")})
    add(scheduler, aborted)
    scheduler._release_aborted_request(aborted)
    kv_files.order_export(tmp_path / "s")
    scheduler.step()
    assert scheduler._orders._exportable == {}


def test_orders_of_an_engine_that_has_ended_are_ignored(make: Make, tmp_path: Path) -> None:
    """Its folder in memory goes with it."""
    scheduler = make("a")
    add(scheduler, Req("r", "a", custom_params={"dora_export": str(tmp_path / "gone" / "r")}))
    assert scheduler.step() == ["r"]


@pytest.mark.parametrize(("page_size", "num_kept"), [(1, 5), (2, 4), (4, 4), (8, 0)])
def test_whole_pages_move(make: Make, tmp_path: Path, page_size: int, num_kept: int) -> None:
    """The stand-in's cache has all tokens, as that of a page of one token has."""
    export(make("a"), tmp_path / "r")
    destination = make("a", page_size=page_size)
    destination._layout = make("a")._layout
    tokens = [1, 2, 3, 4, 5, 6]
    add(destination, Req("r2", "a", tokens, {"dora_import": str(tmp_path / "r")}))
    assert kv_of(destination, tokens) == [1.0, 2.0, 3.0, 4.0, 5.0][:num_kept]
    assert [*(tmp_path / "r").iterdir()] == []


def test_kv_that_cannot_be_written_ends_the_order(make: Make, tmp_path: Path) -> None:
    """The engine waits for it no longer."""
    scheduler = make("a")
    add(scheduler, Req("r", "a", custom_params={"dora_export": str(tmp_path / "r")}))
    scheduler.step()
    kv_files.order_export(tmp_path / "r")
    kv_files.worker_file(kv_files.part_folder(tmp_path / "r"), 0).touch()  # it exists already
    scheduler.step()
    assert [*tmp_path.iterdir()] == []


def shorten(path: Path) -> None:
    """A header of fewer blocks."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b", 5, 5, ", b", 5, 4, ", 1))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("version", "change", "pool_size"),
    [
        pytest.param("a", damage, POOL_SIZE, id="damaged"),
        pytest.param("a", shorten, POOL_SIZE, id="damaged header"),
        pytest.param("a", Path.unlink, POOL_SIZE, id="missing"),
        pytest.param("b", lambda path: None, POOL_SIZE, id="other weights"),
        pytest.param("a", lambda path: None, 2, id="no memory"),
    ],
)
def test_kv_that_cannot_be_imported_is_prefilled(
    make: Make, tmp_path: Path, version: str, change: Callable[[Path], None], pool_size: int
) -> None:
    export(make("a"), tmp_path / "r")
    change(kv_files.worker_file(tmp_path / "r", 0))
    destination = make("a", "b")
    destination.token_to_kv_pool_allocator.slots = [*range(pool_size)]
    add(destination, Req("r", version, [1, 2, 3, 4, 5, 6], {"dora_import": str(tmp_path / "r")}))
    assert kv_of(destination, [1, 2, 3, 4, 5, 6], version) == []
    assert destination.token_to_kv_pool_allocator.available_size() == pool_size
    assert destination.tree_cache.num_locks == 0


def of_two_workers(make: Make, *versions: str) -> list[Any]:
    """The schedulers of the two workers of a server."""
    group = WorkerGroup(2)
    return [make(*versions, tp_group=group.member(rank)) for rank in range(2)]


def in_both(act: Callable[[Any], Any], workers: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(act, workers)]


def move_between_servers_of_two_workers(
    make: Make, folder: Path, change: Callable[[Path], None] = lambda path: None
) -> list[Any]:
    """The KV of five tokens. `change` gets the second worker's file. Returns the destination's workers."""
    source, destination = of_two_workers(make, "a"), of_two_workers(make, "a", "b")
    source[1]._orders.ordered = list  # it sees no order yet, and does what the first worker has decided
    requests = in_both(partial(start, folder=folder), source)
    kv_files.order_export(folder)
    in_both(lambda worker: worker.step(), source)
    assert [(req.finished(), req.output_ids) for req in requests] == [(True, [4, 5, 6])] * 2
    assert sorted(file.name for file in folder.iterdir()) == ["0.kv", "1.kv"]
    change(kv_files.worker_file(folder, 1))
    tokens = [1, 2, 3, 4, 5, 6]
    in_both(lambda worker: add(worker, Req("r2", "a", tokens, {"dora_import": str(folder)})), destination)
    assert [*folder.iterdir()] == []
    assert [worker.tree_cache.num_locks for worker in destination] == [0, 0]
    return destination


def test_each_worker_of_a_server_moves_its_part(make: Make, tmp_path: Path) -> None:
    for worker in move_between_servers_of_two_workers(make, tmp_path / "r"):
        assert kv_of(worker, [1, 2, 3, 4, 5, 6]) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_all_workers_prefill_if_one_cannot_import(make: Make, tmp_path: Path) -> None:
    """Their prefix caches must stay alike."""
    for worker in move_between_servers_of_two_workers(make, tmp_path / "r", damage):
        assert kv_of(worker, [1, 2, 3, 4, 5, 6]) == []
        assert worker.token_to_kv_pool_allocator.available_size() == POOL_SIZE


def test_no_kv_is_exported_if_one_worker_cannot_write(make: Make, tmp_path: Path) -> None:
    source = of_two_workers(make, "a")
    in_both(partial(start, folder=tmp_path / "r"), source)
    kv_files.order_export(tmp_path / "r")
    kv_files.worker_file(kv_files.part_folder(tmp_path / "r"), 1).touch()  # it exists already
    in_both(lambda worker: worker.step(), source)
    assert [*tmp_path.iterdir()] == []


def test_workers_that_read_different_weights_have_loaded_none(
    make: Make, load: Load, weights_file: Path, tmp_path: Path
) -> None:
    workers, other, missing = of_two_workers(make, "a", ""), tmp_path / "other", tmp_path / "missing"
    save_file({"w0": torch.zeros(2)}, other)

    def load_from(*paths: Path) -> list[tuple[bool, str]]:
        def load_own(worker: Any) -> tuple[bool, str]:
            return load(worker, "b", "a", path=paths[worker.tp_group.rank_in_group])

        return in_both(load_own, workers)

    digests = [safetensors_digest(str(path)) for path in (weights_file, other)]
    different = f"the workers have read different weights: {digests}"
    assert load_from(weights_file, other) == [(False, different)] * 2
    (is_done, message), second = load_from(weights_file, missing)
    assert (is_done, second) == (False, (False, message))
    assert "No such file" in message
    assert [slot.version for worker in workers for slot in worker._slots] == ["a", ""] * 2
    assert [is_done for is_done, _ in load_from(weights_file, weights_file)] == [True, True]
    assert [slot.version for worker in workers for slot in worker._slots] == ["a", "b"] * 2


def test_the_internal_state_describes_slots_and_kv(make: Make) -> None:
    state = make("a", "b").get_internal_state(None).internal_state["dora"]
    assert state["version_slots"] == 2
    assert state["kv_layout"] == ["sglang 0.5.23", "cpu", "1", "2", "1", "torch.float32", "1", "2"]
    (state, _) = [worker.get_internal_state(None).internal_state for worker in of_two_workers(make, "a")]
    assert (state["dora"]["kv_layout"][2], state["dora"]["kv_workers"]) == ("2", 2)


def test_a_server_that_returns_experts_moves_no_kv(make: Make) -> None:
    """SGLang stores the experts of each token beside its KV."""
    state = make("a", enable_return_routed_experts=True).get_internal_state(None).internal_state["dora"]
    assert state["kv_layout"] == []


@pytest.mark.parametrize(
    "divided",
    [{"num_stages": 2}, {"num_attention_groups": 2}, {"dcp_size": 2}, {"nnodes": 2}],
    ids=["pipeline", "data parallel attention", "context parallel", "machines"],
)
def test_servers_divided_in_other_ways_move_no_kv(make: Make, divided: dict[str, int]) -> None:
    """A worker lacks layers, requests or tokens, or the folder."""
    worker = make("a", tp_group=WorkerGroup(2).member(0), **divided)
    state = worker.get_internal_state(None).internal_state["dora"]
    assert (state["kv_layout"], state["kv_workers"]) == ([], 1)
    assert worker.of_all_workers("alone") == ["alone"]


def test_a_request_shorter_than_a_page_has_no_kv_to_move(make: Make, tmp_path: Path) -> None:
    scheduler = make("a", page_size=64)
    scheduler._cache = lambda request: None  # whole pages only
    export(scheduler, tmp_path / "r")
    assert [*(tmp_path / "r").iterdir()] == []
