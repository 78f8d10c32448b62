"""The scheduler of a vLLM server with several versions, on a stand-in for vLLM's own.

`real_servers.py` runs it in vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from tests.contract.plugins import imported_plugin

NUM_ROWS = 3


@dataclass(eq=False)
class Waiting:
    """A request as vLLM's scheduler has it."""

    request_id: str
    cache_salt: str
    is_blocked: bool = False
    max_tokens: int = 10
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    block_hashes: list[str] = field(default_factory=list)
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(prompt_logprobs=None))

    def update_block_hashes(self) -> None:
        self.block_hashes.append(self.cache_salt)


class Queue(list[Waiting]):
    def add_request(self, request: Waiting) -> None:
        self.append(request)

    def remove_requests(self, requests: list[Waiting]) -> None:
        self[:] = [request for request in self if request not in requests]


class Scheduler:
    """Gives rows to waiting requests in their order, and a token to each row that is not blocked."""

    def __init__(self) -> None:
        self.running: list[Waiting] = []
        self.waiting, self.kv_holding_waiting = Queue(), Queue()
        self.max_num_active_reqs = NUM_ROWS
        self.requests: dict[str, Waiting] = {}

    def schedule(self, throttle_prefills: bool = False) -> SimpleNamespace:
        while self.waiting and len(self.running) < self.max_num_active_reqs:
            self.running.append(self.waiting.pop(0))
        self.requests |= {request.request_id: request for request in self.running}
        names = [request.request_id for request in self.running if not request.is_blocked]
        return SimpleNamespace(
            total_num_scheduled_tokens=len(names),
            names=names,
            num_scheduled_tokens=dict.fromkeys(names, 1),
        )

    def update_from_output(self, scheduled: Any, output: Any) -> str:
        return "updated"


class EngineCore:
    """vLLM's engine, whose messages leave by a queue."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.output_queue: SimpleQueue[tuple[int, Any]] = SimpleQueue()


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A `VersionScheduler` whose base class is `Scheduler`."""
    loader = "vllm.model_executor.model_loader"
    stand_ins: dict[str, dict[str, Any]] = {
        "dora_vllm_mixed": {"Batch": None, "CannotMixError": None, "MixedModel": None},
        "vllm.config": {"set_current_vllm_config": None},
        "vllm.distributed.parallel_state": {"get_tp_group": None},
        "vllm.forward_context": {"set_forward_context": None},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor.layers": {"rotary_embedding": None},
        "vllm.model_executor.layers.attention": {"Attention": None},
        loader: {"get_model": None},
        f"{loader}.reload": {"finalize_layerwise_reload": None, "initialize_layerwise_reload": None},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.engine": {"EngineCoreOutputs": SimpleNamespace},
        "vllm.v1.engine.core": {"EngineCore": EngineCore},
        "vllm.v1.worker.cpu_worker": {"CPUWorker": object},
    }
    with imported_plugin(monkeypatch, "dora_vllm_versions", stand_ins) as module:
        tested = module.VersionScheduler()
        tested._turns = module.VersionTurns(turn_steps=1)
        yield tested


def add(scheduler: Any, *requests: Waiting) -> None:
    scheduler.waiting += requests


def test_a_step_has_requests_of_one_version_and_versions_take_turns(scheduler: Any) -> None:
    """Requests that are set aside keep their rows and their places."""
    add(scheduler, *(Waiting(name, name[0]) for name in ("a1", "b1", "a2", "b2", "a3")))
    steps = [scheduler.schedule() for _ in range(3)]
    assert [step.names for step in steps] == [["a1", "a2", "a3"], [], ["a1", "a2", "a3"]]
    scheduler.running = [request for request in scheduler.running if request.request_id != "a2"]
    assert [scheduler.schedule().names for _ in range(3)] == [["b1"], ["a1", "a3"], ["b1"]]
    assert [request.request_id for request in scheduler.waiting] == ["b2"]
    assert scheduler.max_num_active_reqs == NUM_ROWS


def test_prioritized_requests_run_alone_unless_none_of_them_can(scheduler: Any) -> None:
    """vLLM appends random characters to a client's id. A request that ends with its next token runs too."""
    first = Waiting("a1-5f3c", "a")
    add(scheduler, first, Waiting("a2", "a"), Waiting("a3", "a", max_tokens=1))
    scheduler.decode_only = frozenset({"a1"})
    assert scheduler.schedule().names == ["a1-5f3c", "a3"]
    scheduler.running = [first]
    first.is_blocked = True
    assert [scheduler.schedule().names for _ in range(4)] == [[], ["a2"], [], ["a2"]]


def test_requests_of_a_third_group_do_not_keep_those_with_the_rows_from_running(scheduler: Any) -> None:
    """The prioritized request and that of another version wait for the rows of the others."""
    holders = [Waiting(f"a{number}", "a") for number in range(NUM_ROWS)]
    add(scheduler, *holders)
    assert len(scheduler.schedule().names) == NUM_ROWS
    scheduler.decode_only = frozenset({"first"})
    add(scheduler, Waiting("first", "a"), Waiting("b1", "b"))
    steps = [scheduler.schedule().names for _ in range(6)]
    assert [request.request_id for request in holders] in steps


def test_requests_continue_with_the_newest_version_except_those_that_keep_theirs(scheduler: Any) -> None:
    """So do requests that arrive later, for a version that is dropped meanwhile."""
    running, waiting = Waiting("a1", "a", num_computed_tokens=5, block_hashes=["a"]), Waiting("a3", "a")
    add(scheduler, running, Waiting("a2", "a#keep"))
    assert [scheduler.schedule().names for _ in range(2)] == [["a1", "a2"]] * 2
    scheduler.newest_version = "b"
    add(scheduler, waiting)
    steps = [scheduler.schedule() for _ in range(2)]
    expected = ({"a2": "a"}, {"a1": "b", "a3": "b"})
    assert sorted((step.dora_versions for step in steps), key=len) == [*expected]
    assert (running.block_hashes, waiting.block_hashes) == (["a"], ["b"]), "the KV that they may share"


def test_a_version_without_anything_to_run_ends_its_turn(scheduler: Any) -> None:
    scheduler._turns = type(scheduler._turns)(turn_steps=8)
    add(scheduler, Waiting("a1", "a", is_blocked=True), Waiting("b1", "b"))
    assert [scheduler.schedule().names for _ in range(3)] == [[], ["b1"], ["b1"]]


def compute(scheduler: Any, step: Any, **others: str) -> str:
    """What a worker that mixes versions returns for a step. `others`: other versions than those requested."""
    output = SimpleNamespace(dora_versions=step.dora_versions | others, dora_mixes=True)
    updated: str = scheduler.update_from_output(step, output)
    return updated


def test_weights_of_another_version_end_the_server(scheduler: Any) -> None:
    add(scheduler, Waiting("a1", "a"), Waiting("a2", "a"))
    step = scheduler.schedule()
    assert compute(scheduler, step) == "updated"
    assert scheduler.computed_versions == {"a1": "a", "a2": "a"}
    with pytest.raises(RuntimeError, match=r"was computed by \{'a1': 'a', 'a2': 'b'\}"):
        compute(scheduler, step, a2="b")
    with pytest.raises(RuntimeError, match=r"was computed by \{\}"):
        scheduler.update_from_output(step, None)


def test_a_worker_that_mixes_versions_gets_requests_of_all(scheduler: Any) -> None:
    """Prioritized ones still run alone, and log-probs of a prompt are those of one version."""
    first = Waiting("a1", "a")
    add(scheduler, first, Waiting("b1", "b"), Waiting("a2", "a"))
    compute(scheduler, scheduler.schedule())
    step = scheduler.schedule()
    assert step.dora_versions == {"a1": "a", "b1": "b", "a2": "a"}
    scheduler.decode_only = frozenset({"b1"})
    assert scheduler.schedule().names == ["b1"]
    scheduler.decode_only = frozenset()
    first.sampling_params.prompt_logprobs = 0
    assert sorted(scheduler.schedule().names for _ in range(2)) == [["a1", "a2"], ["b1"]]


def test_each_message_has_the_tokens_of_one_version(scheduler: Any) -> None:
    """vLLM's messages name one version for all of their requests."""
    core = EngineCore(scheduler)
    scheduler.computed_versions = {"a1": "a", "b1": "b", "a2": "a"}
    outputs = [SimpleNamespace(request_id=name) for name in ("a1", "b1", "a2")]
    message, empty = SimpleNamespace(outputs=outputs), SimpleNamespace(outputs=[])
    core._attach_weight_version({0: message, 1: empty})  # type: ignore[attr-defined]
    client, other = core.output_queue.get_nowait()
    assert [each.request_id for each in message.outputs] == ["a1", "a2"]
    assert [each.request_id for each in other.outputs] == ["b1"]
    assert (message.weight_version, other.weight_version, client) == ("a", "b", 0)
    assert core.output_queue.empty()


def test_a_scheduler_without_requests_schedules_nothing(scheduler: Any) -> None:
    step = scheduler.schedule()
    assert (step.total_num_scheduled_tokens, step.dora_versions) == (0, {})
    assert scheduler.update_from_output(step, None) == "updated"
