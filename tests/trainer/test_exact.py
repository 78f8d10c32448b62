"""Exact mode: a policy has the engine's log-probs bit for bit, and its own gradients."""

from __future__ import annotations

import pytest
import torch
from tests.engine.test_batch_invariant import MODES, TEMPERATURE, make_exact_engine, make_requests
from tests.engine.tiny import run
from tests.model.families import CONFIGS, random_weights

from dora.engine.batch_invariant import LogprobScorer
from dora.model.weights import WeightLayout
from dora.trainer.packing import pack, sequential_micro_batches
from dora.trainer.policy import Policy
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

QWEN = CONFIGS["qwen3"]
SETTINGS = TrainerSettings(
    lr=1e-2, num_steps=4, warmup_steps=0, micro_batch_tokens=100, temperature=TEMPERATURE
)
CPU = torch.device("cpu")


def samples(mode: tuple[str, str], staleness: int = 0) -> list[Sample]:
    """Answers of an exact engine to the requests of version 0."""
    requests = [one for one in make_requests() if one.version == 0]
    answers = run(make_exact_engine(QWEN, mode), requests)
    found = []
    for i, one in enumerate(requests):
        answer = answers[one.id]
        ids, logprobs = answer.token_ids.tolist(), answer.logprobs.tolist()
        found.append(Sample(one.prompt_ids, ids, logprobs, 1.0 - i % 3, staleness=staleness))
    return found


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("token_budget", [60, 300])
def test_packed_micro_batches_have_the_log_probs_of_the_engine(name: str, token_budget: int) -> None:
    config, mode = CONFIGS[name], ("auto", "float32")
    requests = [one for one in make_requests() if one.version == 0]
    answers = run(make_exact_engine(config, mode), requests)
    scorer, flat = LogprobScorer(config, 64, TEMPERATURE, *mode), random_weights(config)
    policy = Policy(
        config,
        WeightLayout(config).views(flat),
        TEMPERATURE,
        lambda batch: scorer(flat, batch.prompts, batch.responses),
    )
    lengths = [len(one.prompt_ids) + len(answers[one.id].token_ids) for one in requests]
    for members in sequential_micro_batches(lengths, token_budget):
        chosen = [requests[i] for i in members]
        batch = pack(
            [one.prompt_ids for one in chosen], [answers[one.id].token_ids.tolist() for one in chosen], CPU
        )
        logprobs, _ = policy.logprobs(batch)
        assert logprobs.tolist() == [x for one in chosen for x in answers[one.id].logprobs.tolist()]


@pytest.mark.parametrize("mode", MODES)
def test_an_on_policy_step_in_exact_mode_has_no_mismatch_and_learns(mode: tuple[str, str]) -> None:
    scorer = LogprobScorer(QWEN, 64, TEMPERATURE, *mode)
    plain, exact = (
        Trainer(QWEN, random_weights(QWEN), SETTINGS, exact_logprobs=own).step(samples(mode))
        for own in (None, scorer)
    )
    assert exact["mismatch/logprob_abs_diff_max"] == exact["actor/ppo_kl"] == exact["mismatch/kl"] == 0.0
    assert plain["mismatch/logprob_abs_diff_max"] > 0.0
    tolerance = 1e-4 if mode[1] == "float32" else 0.1
    assert exact["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=tolerance)


def test_stale_samples_in_exact_mode_have_no_mismatch_under_their_own_weights() -> None:
    mode = ("auto", "float32")
    versions = {-2: random_weights(QWEN)}
    trainer = Trainer(
        QWEN,
        random_weights(QWEN, 1),
        SETTINGS,
        exact_logprobs=LogprobScorer(QWEN, 64, TEMPERATURE, *mode),
        find_version=versions.get,
    )
    metrics = trainer.step(samples(mode, staleness=2))
    assert metrics["mismatch/logprob_abs_diff_max"] == 0.0
    assert metrics["mismatch/num_tokens"] > 0
    assert metrics["actor/ppo_kl"] != 0.0
