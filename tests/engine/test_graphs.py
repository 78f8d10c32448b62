"""Padded steps that begin before the last one's tokens are known: same answers, whatever comes between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine import tiny

import dora.engine.engine as engine_module
from dora.core.records import RequestId
from dora.engine.engine import Engine
from dora.engine.graphs import GraphRunner, bucket_for
from dora.engine.runner import Prompt, Runner
from dora.engine.sampler import RULE, Rules, rule
from dora.engine.sequence import Completion, Request, Sampling
from dora.engine.workspace import Workspace

BLOCKS_PER_ROW = 4
SLOTS = np.array([0, 0, 0, 1, 1])


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this test run padded steps, though by the kernels for a CPU."""
    monkeypatch.setattr(engine_module, "Runner", GraphRunner)


def rules(temperature: float = 1.0, top_k: int = 0) -> Rules:
    sampling = Sampling(temperature, 1, top_k=top_k)
    return np.array([rule(seed, sampling) for seed in range(len(SLOTS))], RULE)


class Rows:
    """Five rows of two versions with prompts of three to seven tokens."""

    def __init__(self, runner: type[Runner]) -> None:
        is_padded = runner is GraphRunner
        self.work = Workspace(tiny.TINY, 6, 64, 2, 30, is_padded=is_padded)
        self.runner = runner(self.work, "eager")
        self.rows, self.which = np.array([4, 0, 2, 5, 1]), list[int]()
        self.tokens = [list(range(3 + row)) for row in range(5)]
        for slot in (0, 1):
            self.work.slot(slot).copy_(tiny.weights(slot))
        for row, slot, tokens in zip(self.rows, SLOTS, self.tokens, strict=True):
            blocks = list(range(int(row) * BLOCKS_PER_ROW, (int(row) + 1) * BLOCKS_PER_ROW))
            self.work.tables[row, :BLOCKS_PER_ROW] = torch.tensor(blocks)
            self.runner.prefill(int(slot), [Prompt(tuple(tokens[:-1]), 0, blocks)])

    def step(self, which: list[int], asked: Rules, goes_on: bool) -> None:
        """One token for these rows; nothing is arranged anew if they are those of the last step."""
        if which != self.which:
            self.which, self.rules = which, asked[which]
            self.runner.arrange(self.rows[which], SLOTS[which])
        last = np.array([self.tokens[i][-1] for i in which])
        positions = np.array([len(self.tokens[i]) - 1 for i in which])
        drawn = self.runner.draw(last, positions, self.rules, lambda: goes_on)
        for i, token in zip(which, drawn.tokens.tolist(), strict=True):
            self.tokens[i].append(token)


def test_buckets_are_powers_of_two_and_then_multiples_of_32() -> None:
    assert [bucket_for(num) for num in (1, 2, 3, 5, 9, 17, 31, 32, 33, 64, 65, 100)] == [
        1, 2, 4, 8, 16, 32, 32, 32, 64, 64, 96, 128
    ]  # fmt: skip


@pytest.mark.parametrize("asked", [rules(), rules(0.7), rules(1.3, top_k=5)], ids=["plain", "warm", "top-k"])
def test_a_padded_step_draws_what_an_unpadded_one_does(asked: Rules) -> None:
    everyone, fewer, others = [0, 1, 2, 3, 4], [0, 2, 3], [1, 2, 4]
    made = [Rows(Runner), Rows(GraphRunner)]
    for rows in made:
        for goes_on, which in (
            (True, everyone),
            (True, everyone),
            (True, fewer),
            (True, others),
            (False, others),
        ):
            for _ in range(3):
                rows.step(which, asked, goes_on)
    assert made[0].tokens == made[1].tokens


def test_padding_writes_to_no_block_of_anybody() -> None:
    rows = Rows(GraphRunner)
    before = rows.work.kv.clone()
    rows.step([0, 1, 2], rules(), goes_on=False)
    changed = (rows.work.kv != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == sorted([*(int(row) * BLOCKS_PER_ROW for row in rows.rows[:3]), 30])


def requests(num_groups: int = 6) -> list[Request]:
    """Of two versions; many stop early."""
    return [
        tiny.request(i, version=i // 4 % 2, max_tokens=30 + i % 9, stop_ids=(1,))
        for i in range(4 * num_groups)
    ]


def answers(made: Engine) -> dict[RequestId, Completion]:
    """Some are given up and some rushed on the way."""
    made.submit(requests())
    found: dict[RequestId, Completion] = {}
    while not made.idle:
        if made.num_steps == 7:
            made.abort([request.id for request in requests()[::5]])
        if made.num_steps in (9, 14):
            made.rush([request.id for request in requests()[made.num_steps :: 6]])
        found |= {completion.id: completion for completion in made.step()}
        made.check()
    return found


@pytest.mark.parametrize("kernels", ["eager", "numba"])
@pytest.mark.parametrize("num_blocks", [None, 11])
def test_an_engine_with_padded_steps_gives_the_same_answers(
    num_blocks: int | None, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(tiny.engine(kernels, max_rows=9, num_versions=2, num_blocks=num_blocks))
    monkeypatch.setattr(engine_module, "Runner", GraphRunner)
    made = tiny.engine(kernels, max_rows=9, num_versions=2, num_blocks=num_blocks)
    found = answers(made)
    assert bool(made.num_swapped) == (num_blocks is not None)
    assert found.keys() <= {request.id for request in requests()}
    assert {i: found[i].token_ids for i in found} == {i: expected[i].token_ids for i in expected}
    for i, answer in found.items():
        np.testing.assert_allclose(answer.logprobs, expected[i].logprobs, atol=1e-5)
        np.testing.assert_allclose(answer.raw_logprobs, expected[i].raw_logprobs, atol=1e-5)
        assert answer.chunks == expected[i].chunks


@pytest.mark.usefixtures("padded")
def test_most_steps_begin_before_the_last_ones_tokens_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made, num_sent = tiny.engine(max_rows=4), 0

    def count(*_: object) -> None:
        nonlocal num_sent
        num_sent += 1
        send(*_)

    send = made._runner._send  # type: ignore[attr-defined]
    monkeypatch.setattr(made._runner, "_send", count)
    tiny.run(made, [tiny.request(i, max_tokens=30, prompt_length=9) for i in range(4)])
    assert made.num_steps == 30
    assert num_sent == 1


def test_a_version_loaded_into_a_slot_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Runner", GraphRunner)
    made = tiny.engine(num_versions=2)
    for version in (1, 2, 3):
        asked = [tiny.request(i, version=version, temperature=0.0, max_tokens=6) for i in range(3)]
        found = tiny.run(made, asked)
        made.drop(version)
        made.load(version + 1, tiny.weights(version + 1))
        for request in asked:
            expected = tiny.greedy_answer(tiny.weights(version), request.prompt_ids, 6)
            assert found[request.id].token_ids == expected
