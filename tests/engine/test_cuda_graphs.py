"""Padded steps that start before the tokens of the last step are on the host give the same completions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine import tiny

import dora.engine.engine as engine_module
from dora.core.types import RequestId
from dora.engine.cuda_graphs import CUDAGraphRunner, padded_rows
from dora.engine.engine import Engine
from dora.engine.kernels.sampler import SAMPLING_DTYPE, SamplingMetadata, sampling_metadata
from dora.engine.kernels.workspace import Workspace
from dora.engine.request import Completion, Request, SamplingParams
from dora.engine.runner import ModelRunner, PrefillInput

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
            self.indices, self.metadata = indices, metadata[indices]
            self.runner.set_batch(self.rows[indices], SLOTS[indices])
        last = np.array([self.tokens[i][-1] for i in indices])
        positions = np.array([len(self.tokens[i]) - 1 for i in indices])
        sampled = self.runner.decode_and_sample(last, positions, self.metadata, lambda: can_continue)
        for i, token in zip(indices, sampled.tokens.tolist(), strict=True):
            self.tokens[i].append(token)


def test_buckets_are_powers_of_two_and_then_multiples_of_32() -> None:
    assert [padded_rows(num) for num in (1, 2, 3, 5, 9, 17, 31, 32, 33, 64, 65, 100)] == [
        1, 2, 4, 8, 16, 32, 32, 32, 64, 64, 96, 128
    ]  # fmt: skip


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
