"""Padded steps that start before the tokens of the last step are on the host give the same completions."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.engine import tiny

import dora.engine.cuda_graphs as cuda_graphs
import dora.engine.engine as engine_module
from dora.core.types import RequestId
from dora.engine.cuda_graphs import CUDAGraphRunner, padded_rows
from dora.engine.engine import Engine
from dora.engine.kernels.sampler import SAMPLING_DTYPE, SamplingMetadata, sampling_metadata
from dora.engine.kernels.workspace import Workspace
from dora.engine.request import Completion, PrefillInput, Request, SamplingParams
from dora.engine.runner import ModelRunner

BLOCKS_PER_ROW = 4
SLOTS = np.array([0, 0, 0, 1, 1])


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run padded steps, with CPU kernels."""
    monkeypatch.setattr(engine_module, "ModelRunner", CUDAGraphRunner)


def make_metadata(temperature: float = 1.0, top_k: int = 0) -> SamplingMetadata:
    sampling = SamplingParams(temperature, 1, top_k=top_k)
    return np.array([sampling_metadata(seed, sampling) for seed in range(len(SLOTS))], SAMPLING_DTYPE)


class RunnerRows:
    """Five rows of two versions, with prompts of three to seven tokens."""

    def __init__(self, runner: type[ModelRunner]) -> None:
        is_padded = runner is CUDAGraphRunner
        self.work = Workspace(tiny.TINY, 6, 64, 2, 30, is_padded=is_padded)
        self.runner = runner(self.work, "eager")
        self.rows, self.indices = np.array([4, 0, 2, 5, 1]), list[int]()
        self.tokens = [list(range(3 + row)) for row in range(5)]
        for slot in (0, 1):
            self.work.slot_weights(slot).copy_(tiny.weights(slot))
        for row, slot, tokens in zip(self.rows, SLOTS, self.tokens, strict=True):
            blocks = list(range(int(row) * BLOCKS_PER_ROW, (int(row) + 1) * BLOCKS_PER_ROW))
            self.work.block_tables[row, :BLOCKS_PER_ROW] = torch.tensor(blocks)
            self.runner.prefill(int(slot), [PrefillInput(tuple(tokens[:-1]), 0, blocks)])

    def step(self, indices: list[int], metadata: SamplingMetadata, can_continue: bool) -> None:
        """Decode one token of these rows; set the batch only if they differ from those of the last step."""
        if indices != self.indices:
            if not {*indices} <= {*self.indices}:
                self.runner.discard_step()
            self.indices, self.metadata = indices, metadata[indices]
            self.runner.set_batch(self.rows[indices], SLOTS[indices])
        last = np.array([self.tokens[i][-1] for i in indices])
        positions = np.array([len(self.tokens[i]) - 1 for i in indices])
        sampled = self.runner.decode_and_sample(last, positions, self.metadata, lambda: can_continue)
        for i, token in zip(indices, sampled.tokens.tolist(), strict=True):
            self.tokens[i].append(token)


def test_buckets_of_one_version_are_powers_of_two_and_then_multiples_of_32() -> None:
    counts = (1, 2, 3, 5, 9, 17, 31, 32, 33, 64, 65, 100)
    buckets = [padded_rows(np.array([num]), 128).tolist() for num in counts]
    assert buckets == [[1], [2], [4], [8], [16], [32], [32], [32], [64], [64], [96], [128]]


@pytest.mark.parametrize(
    ("max_rows", "counts", "buckets"),
    [
        (3, [1, 2], [4, 4]),
        (16, [1, 9, 6], [16, 16, 16]),
        (33, [1, 32], [32, 32]),
        (64, [3, 33], [32, 64]),
        (256, [1, 64, 191], [64, 64, 192]),
    ],
)
def test_buckets_of_several_versions_are_few(max_rows: int, counts: list[int], buckets: list[int]) -> None:
    assert padded_rows(np.array(counts), max_rows).tolist() == buckets


@pytest.mark.parametrize(
    "metadata",
    [make_metadata(), make_metadata(0.7), make_metadata(1.3, top_k=5)],
    ids=["plain", "tempered", "top-k"],
)
def test_a_padded_step_samples_what_an_unpadded_one_does(metadata: SamplingMetadata) -> None:
    all_rows, fewer, others = [0, 1, 2, 3, 4], [0, 2, 3], [1, 2, 4]
    both = [RunnerRows(ModelRunner), RunnerRows(CUDAGraphRunner)]
    for rows in both:
        for can_continue, indices in (
            (True, all_rows),
            (True, all_rows),
            (True, fewer),
            (True, others),
            (False, others),
        ):
            for _ in range(3):
                rows.step(indices, metadata, can_continue)
    assert both[0].tokens == both[1].tokens


PROMPTS = [
    tuple(i * step % tiny.TINY.vocab_size for i in range(num)) for num, step in ((22, 3), (21, 5), (5, 7))
]
NUM_CACHED = [0, 16, 0]


def prefilled(runner: type[ModelRunner], kernels: str) -> torch.Tensor:
    """The KV of blocks 0 to 5 after a prefill of three prompts, one of which continues its first block."""
    work = Workspace(tiny.TINY, 6, 64, 2, 30, is_padded=runner is CUDAGraphRunner)
    work.slot_weights(1).copy_(tiny.weights(1))
    prompts = [
        PrefillInput(tokens, num_cached, [2 * i, 2 * i + 1])
        for i, (tokens, num_cached) in enumerate(zip(PROMPTS, NUM_CACHED, strict=True))
    ]
    own = runner(work, kernels)
    assert own.prefill(1, [PrefillInput(PROMPTS[1][:16], 0, [2])]) == 16
    for _ in range(3):  # called, captured, replayed
        assert own.prefill(1, prompts) == 22 + 5 + 5
    return work.kv[:6].clone()


@pytest.mark.parametrize("kernels", ["eager", "numba"])
@pytest.mark.parametrize("max_rows", [512, 20, 0])
def test_prompts_that_are_rows_of_a_step_have_the_same_kv(
    max_rows: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 tokens are too many rows if 20 are the maximum; the 16 tokens before are not."""
    steps, prefill_step = list[int](), CUDAGraphRunner._prefill_step

    def counted(runner: CUDAGraphRunner, size: int) -> None:
        steps.append(size)
        prefill_step(runner, size)

    monkeypatch.setattr(CUDAGraphRunner, "_prefill_step", counted)
    monkeypatch.setattr(cuda_graphs, "MAX_PREFILL_ROWS", max_rows)
    found = prefilled(CUDAGraphRunner, kernels)
    assert len(steps) == {512: 4, 20: 1, 0: 0}[max_rows]
    torch.testing.assert_close(found, prefilled(ModelRunner, kernels), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["MAX_PREFILL_READS", "MAX_PREFILL_TABLES"])
def test_prompts_that_attend_to_too_much_are_no_rows_of_a_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, name, 0)
    monkeypatch.setattr(CUDAGraphRunner, "_prefill_step", None)
    torch.testing.assert_close(prefilled(CUDAGraphRunner, "eager"), prefilled(ModelRunner, "eager"))


def test_a_prefill_during_a_step_does_not_change_the_next_one() -> None:
    """It overwrites the inputs that the next step would have found on the device."""
    both = [RunnerRows(ModelRunner), RunnerRows(CUDAGraphRunner)]
    for rows in both:
        for _ in range(4):
            rows.step([0, 1, 2, 3, 4], make_metadata(), can_continue=True)
            rows.runner.prefill(0, [PrefillInput((7, 8, 9), 0, [12])])  # block 12 is that of an unused row
    assert both[0].tokens == both[1].tokens


def test_garbage_is_not_collected_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of another engine that is collected then would invalidate the capture."""
    was_enabled = list[bool]()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **options: nullcontext())
    runner = RunnerRows(CUDAGraphRunner).runner
    monkeypatch.setattr(runner, "_is_gpu", True)
    runner._capture(lambda: was_enabled.append(gc.isenabled()))  # type: ignore[attr-defined]
    assert (was_enabled, gc.isenabled()) == ([False], True)


def test_padding_writes_only_to_its_own_block() -> None:
    rows = RunnerRows(CUDAGraphRunner)
    before = rows.work.kv.clone()
    rows.step([0, 1, 2], make_metadata(), can_continue=False)
    changed = (rows.work.kv != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == sorted([*(int(row) * BLOCKS_PER_ROW for row in rows.rows[:3]), 30])


def requests(num_groups: int = 6) -> list[Request]:
    """Requests of two versions, many of which stop early."""
    return [
        tiny.make_request(i, version=i // 4 % 2, max_tokens=30 + i % 9, stop_ids=(1,))
        for i in range(4 * num_groups)
    ]


def completions(engine: Engine) -> dict[RequestId, Completion]:
    """Run requests, abort some and decode some only."""
    engine.submit(requests())
    found: dict[RequestId, Completion] = {}
    while not engine.is_idle:
        if engine.num_steps == 7:
            engine.abort([request.id for request in requests()[::5]])
        if engine.num_steps in (9, 14):
            engine.decode_only([request.id for request in requests()[engine.num_steps :: 6]])
        found |= {completion.id: completion for completion in engine.step()}
        engine.check()
    return found


@pytest.mark.parametrize("kernels", ["eager", "numba"])
@pytest.mark.parametrize("num_blocks", [None, 11])
def test_an_engine_with_padded_steps_gives_the_same_completions(
    num_blocks: int | None, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = completions(tiny.make_engine(kernels, max_rows=9, num_versions=2, num_blocks=num_blocks))
    monkeypatch.setattr(engine_module, "ModelRunner", CUDAGraphRunner)
    engine = tiny.make_engine(kernels, max_rows=9, num_versions=2, num_blocks=num_blocks)
    found = completions(engine)
    assert bool(engine.num_swapped) == (num_blocks is not None)
    assert found.keys() <= {request.id for request in requests()}
    assert {i: found[i].token_ids.tolist() for i in found} == {
        i: expected[i].token_ids.tolist() for i in expected
    }
    for i, completion in found.items():
        np.testing.assert_allclose(completion.logprobs, expected[i].logprobs, atol=1e-5)
        np.testing.assert_allclose(completion.raw_logprobs, expected[i].raw_logprobs, atol=1e-5)
        assert completion.chunks == expected[i].chunks


@pytest.mark.usefixtures("padded")
def test_most_steps_start_before_the_tokens_of_the_last_one_are_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, num_sent = tiny.make_engine(max_rows=4), 0

    def count(*_: object) -> None:
        nonlocal num_sent
        num_sent += 1
        send(*_)

    send = engine._runner._send_inputs  # type: ignore[attr-defined]
    monkeypatch.setattr(engine._runner, "_send_inputs", count)
    tiny.run(engine, [tiny.make_request(i, max_tokens=30, prompt_length=9) for i in range(4)])
    assert engine.num_steps == 30
    assert num_sent == 1


def graph_runner(engine: Engine) -> CUDAGraphRunner:
    assert isinstance(engine._runner, CUDAGraphRunner)
    return engine._runner


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize(("max_rows", "arrivals"), [(8, 0.25), (16, 0.5), (32, 1.0)])
def test_arrivals_do_not_discard_the_step_in_flight(max_rows: int, arrivals: float) -> None:
    """Each row that ends with a stop token is replaced: so many times per step."""
    engine, num_requests = tiny.make_engine(max_rows=max_rows), 6 * max_rows
    engine.submit(
        [
            tiny.make_request(i, max_tokens=80, stop_ids=(1, 2, 3, 4, 5), group_size=1, prompt_length=5)
            for i in range(num_requests)
        ]
    )
    while engine.num_waiting:
        engine.step()
        engine.check()
    assert (num_requests - max_rows) / engine.num_steps == pytest.approx(arrivals, rel=0.3)
    assert graph_runner(engine).num_started <= 1.02 * engine.num_steps + 1  # one is in flight


@pytest.mark.usefixtures("padded")
def test_a_row_that_joins_between_steps_waits_for_the_step_in_flight() -> None:
    engine = tiny.make_engine(max_rows=4)
    requests = [tiny.make_request(i, max_tokens=30, prompt_length=9) for i in range(4)]
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    engine.decode_only([request.id for request in requests[:2]])
    for _ in range(5):
        engine.step()
    engine.decode_only([])
    found = tiny.run(engine, [])
    assert graph_runner(engine).num_started == engine.num_steps
    assert tiny.output_tokens(found) == tiny.output_tokens(tiny.run(tiny.make_engine(), requests))


@pytest.mark.usefixtures("padded")
def test_a_row_that_joins_between_steps_decodes_with_the_next_one() -> None:
    """Also if no request starts, ends or is swapped meanwhile."""
    engine = tiny.make_engine(max_rows=4)
    requests = [tiny.make_request(i, max_tokens=30, prompt_length=9) for i in range(2)]
    engine.submit(requests)
    for _ in range(3):
        engine.step()
    engine.decode_only([requests[0].id])
    for _ in range(3):
        engine.step()
    engine.decode_only([])
    before = engine.progress()[requests[1].id]
    for _ in range(3):
        engine.step()
    assert engine.progress()[requests[1].id] >= before + 2


def test_warming_up_captures_the_graphs_of_one_version_and_leaves_nothing_else(padded: None) -> None:
    requests = [tiny.make_request(number, max_tokens=12) for number in range(6)]
    cold, warm = tiny.make_engine(max_rows=8), tiny.make_engine(max_rows=8, num_versions=0)
    warm.warm_up()
    warm.check()
    assert (warm.versions, warm.is_idle) == ({}, True)
    assert (warm.num_steps, warm.num_decoded, warm.num_prefilled, warm.busy_row_s) == (0, 0, 0, 0.0)
    num_captured = graph_runner(warm).num_captured
    assert num_captured > 0
    warm.load(0, tiny.weights(0))
    assert tiny.run(warm, requests) == tiny.run(cold, requests)
    assert graph_runner(warm).num_captured == num_captured


@pytest.mark.parametrize("max_rows", [16, 64])
def test_a_run_of_three_versions_captures_few_graphs(max_rows: int, padded: None) -> None:
    """A version is loaded every 25 steps if a slot is free; the requests of up to three are running."""
    engine = tiny.make_engine(max_rows=max_rows, version_slots=3)
    numbers, most_versions = iter(range(10**6)), 0
    for step in range(300):
        if step % 25 == 24:
            decoding = {request.version for request in engine._scheduler.requests()}
            for version in engine.versions.keys() - decoding:
                engine.drop(version)
            if len(engine.versions) < 3:
                engine.load(step, tiny.weights(step))
            most_versions = max(most_versions, len(decoding))
        newest = max(engine.versions)
        engine.submit(
            [
                tiny.make_request(number, version=newest, max_tokens=80, stop_ids=(1, 2, 3), prompt_length=5)
                for number, _ in zip(numbers, range(max_rows - engine.num_running), strict=False)
            ]
        )
        engine.step()
    assert most_versions == 3
    assert graph_runner(engine).num_captured <= 12 + 3  # of decode steps, and of prefills in three slots


def test_the_order_of_versions_does_not_matter_to_graphs(padded: None) -> None:
    engine = tiny.make_engine(num_versions=2)
    requests = [tiny.make_request(i, version=i % 2, group_size=1, prompt_length=5) for i in range(12)]
    tiny.run(engine, requests)
    again = [replace(request, id=RequestId(1, *request.id[1:])) for request in requests]
    tiny.run(engine, again)  # captures the prefill of each slot
    num_captured = graph_runner(engine).num_captured
    for version in (0, 1):  # version 3 is loaded into the slot of version 0
        engine.drop(version)
        engine.load(3 - version, tiny.weights(3 - version))
    assert num_captured > 0
    tiny.run(engine, [replace(request, version=2 + request.version) for request in requests])
    assert graph_runner(engine).num_captured == num_captured


def test_graphs_that_were_not_used_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    rows = RunnerRows(CUDAGraphRunner)

    def num_captured(*indices: int) -> int:
        """The graphs that two steps of these rows capture."""
        before = rows.runner.num_captured  # type: ignore[attr-defined]
        for _ in range(2):
            rows.step([*indices], make_metadata(), can_continue=False)
        return rows.runner.num_captured - before  # type: ignore[attr-defined,no-any-return]

    assert [num_captured(0), num_captured(0, 1), num_captured(0)] == [1, 1, 0]
    assert num_captured(0, 1, 2) == 1  # forgets that of two rows
    assert [num_captured(0), num_captured(0, 1)] == [0, 1]


def test_a_version_loaded_into_a_slot_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ModelRunner", CUDAGraphRunner)
    engine = tiny.make_engine(num_versions=2)
    for version in (1, 2, 3):
        metadata = [tiny.make_request(i, version=version, temperature=0.0, max_tokens=6) for i in range(3)]
        found = tiny.run(engine, metadata)
        engine.drop(version)
        engine.load(version + 1, tiny.weights(version + 1))
        for request in metadata:
            expected = tiny.greedy_output(tiny.weights(version), request.prompt_ids, 6)
            assert found[request.id].token_ids.tolist() == expected
