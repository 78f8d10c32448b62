"""Training on two ranks gives what one process gives."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.model.families import CONFIGS, random_weights
from tests.model.transformers_families import save_tiny
from tests.model.vision_models import END_TOKEN, START_TOKEN, VISION, random_image, save_tiny_vision
from tests.trainer.batches import (
    CPU,
    SETTINGS,
    TINY,
    first_moment,
    initial,
    relative_gap,
    samples,
    with_nan,
)
from torch import Tensor
from torch.distributed.tensor import DTensor

from dora.core.types import RequestId
from dora.errors import RunError
from dora.model.config import ModelConfig
from dora.model.images import ImageFolder
from dora.model.pretrained import load_pretrained
from dora.model.weights import WeightLayout
from dora.trainer.distributed import DistributedLearner, RankGroup, ShardedRank, fsdp_units, read_moments
from dora.trainer.lora import LoraSettings
from dora.trainer.optimizer import ShardedAdamW
from dora.trainer.packing import split_mini_batches
from dora.trainer.recipe import ModelImplementation
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

TIMEOUT_S = 30.0
PLAIN = replace(SETTINGS, micro_batch_tokens=30)  # several micro-batches
EVERY_TERM = replace(
    PLAIN,
    kl_loss_coef=0.1,
    entropy_coeff=0.01,
    activation_checkpointing=True,
    max_grad_norm=0.1,
    betas=(0.8, 0.95),
)
GROUP_SIZE = 3


def run_rank1(rendezvous_file: Path) -> None:
    """Rank 1 of each trainer whose (config, settings) it receives."""
    torch.set_num_threads(1)
    group = RankGroup(rendezvous_file, 1, 2, CPU, TIMEOUT_S)
    while True:
        received: Any = group.receive()
        if isinstance(received, tuple):
            config, settings = received
            rank = ShardedRank(group, config, settings, read_samples=read_samples)
        else:
            received(rank)


def shifted() -> list[Sample]:
    """Samples whose ratios are not all 1."""
    return [replace(s, logprobs=[x + 0.1 * (i % 3) for x in s.logprobs]) for i, s in enumerate(samples())]


def read_samples(received: Sequence[Sample]) -> list[Sample]:
    """Complete samples as if `shifted` were the rows of a stream."""
    rows = shifted()
    for s in received:
        assert bool(s.token_ids) == (s.stream_row is None)
    return [
        s if s.stream_row is None else replace(rows[s.stream_row.sibling], advantage=s.advantage)
        for s in received
    ]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    path = tmp_path_factory.mktemp("ranks") / "rendezvous"
    rank1 = multiprocessing.get_context("spawn").Process(target=run_rank1, args=(path,), daemon=True)
    rank1.start()
    yield RankGroup(path, 0, 2, CPU, TIMEOUT_S)
    dist.destroy_process_group()
    rank1.kill()
    rank1.join()


def make_trainers(
    group: RankGroup,
    settings: TrainerSettings,
    config: ModelConfig = TINY,
    reference: Tensor | None = None,
    flat: Tensor | None = None,
) -> tuple[Trainer, Trainer]:
    """A trainer of two ranks and one of one, with the same weights."""
    start: Any = (config, settings)
    group.scatter([start, start])
    if flat is None:
        flat = initial() if config is TINY else random_weights(config)
    learner = DistributedLearner(group, config, flat.clone(), settings, reference)
    return (
        Trainer(config, flat, settings, learner=learner),
        Trainer(config, flat, settings, reference),
    )


def test_fsdp_units_are_the_flat_buffer_cut_at_the_layers() -> None:
    for config in CONFIGS.values():
        units, flat = fsdp_units(config), torch.arange(WeightLayout(config).numel)
        assert len(units) == config.num_hidden_layers + 2
        assert torch.equal(torch.cat([unit.slice(flat) for unit in units]), flat)
        named = {name: view for unit in units for name, view in unit.views(unit.slice(flat)).items()}
        assert all(torch.equal(view, named[name]) for name, view in WeightLayout(config).views(flat).items())


def test_a_rank_holds_half_of_weights_and_gradient(group: RankGroup) -> None:
    start: Any = (TINY, PLAIN)
    group.scatter([start, start])
    rank = ShardedRank(group, TINY, PLAIN, initial())
    assert isinstance(rank.optimizer, ShardedAdamW)
    shards = rank.optimizer.shards
    for tensors in (shards, [cast(DTensor, shard.grad) for shard in shards]):
        held = sum(tensor.to_local().numel() for tensor in tensors)
        assert held == pytest.approx(WeightLayout(TINY).numel / 2, abs=len(shards))
    moments = rank.optimizer.moments
    for local in (moments.exp_avg, moments.exp_avg_sq):
        held = sum(tensor.numel() for tensor in local)
        assert held == pytest.approx(WeightLayout(TINY).numel / 2, abs=len(shards))


@pytest.mark.parametrize("settings", [PLAIN, EVERY_TERM], ids=["plain", "every term"])
def test_two_ranks_have_the_gradient_of_one(group: RankGroup, settings: TrainerSettings) -> None:
    """In parts, with a last micro-batch that leaves one rank without samples."""
    trainers, batch = make_trainers(group, settings, reference=1.1 * initial()), shifted()
    for trainer in trainers:
        for i in range(0, len(batch), GROUP_SIZE):
            trainer.add_samples(batch[i : i + GROUP_SIZE])
            while trainer.can_accumulate:
                trainer.accumulate()
    got, expected = (trainer.finish_step() for trainer in trainers)
    two, one = trainers
    assert relative_gap(first_moment(two), first_moment(one)) < 1e-6
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_ranks_round_the_weights_that_are_published_in_bf16(group: RankGroup) -> None:
    two, _ = make_trainers(group, PLAIN)
    two.step(shifted())
    published = two.published_weights(torch.bfloat16).clone()
    assert published.dtype == torch.bfloat16
    assert torch.equal(published, two.flat.bfloat16())
    assert torch.equal(two.published_weights(torch.float32), two.flat)


def test_a_rank_reads_the_columns_of_its_samples_in_the_stream(group: RankGroup) -> None:
    two, one = make_trainers(group, PLAIN)
    batch = [replace(s, advantage=2.0 * s.advantages[0]) for s in shifted()]
    got = two.step([replace(s, stream_row=RequestId(0, 0, i)) for i, s in enumerate(batch)])
    assert got == pytest.approx(one.step(batch), rel=1e-5, abs=1e-7)
    assert relative_gap(first_moment(two), first_moment(one)) < 1e-6


@pytest.mark.parametrize("model", ["dora", "transformers"])
def test_two_ranks_have_the_gradient_of_one_for_a_mixture_of_experts(
    group: RankGroup, model: ModelImplementation
) -> None:
    two, one = make_trainers(group, replace(PLAIN, model=model), CONFIGS["qwen3_moe-mixed"])
    got, expected = two.step(samples()), one.step(samples())
    assert relative_gap(first_moment(two), first_moment(one)) < 1e-5
    assert ("moe/load_imbalance" in got) == (model == "dora")
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("changes", [{}, {"lora": 2}, {"dtype": "bfloat16"}], ids=["", "lora", "bf16"])
@pytest.mark.parametrize("kind", ["gemma3_text", "deepseek_v3", "gpt_oss", "phi"])
def test_two_ranks_train_what_one_trains_of_a_model_of_transformers(
    group: RankGroup, kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """With a reference policy, and micro-batches in which the ranks have one and two blocks."""
    config, flat = load_pretrained(save_tiny(kind, tmp_path))
    if "lora" in changes:
        changes = {"lora": LoraSettings(rank=2, alpha=6.0, targets=config.linear_names)}
    settings = replace(EVERY_TERM, **changes)
    two, one = make_trainers(group, settings, config, flat=flat)
    batch = samples(13)
    got, expected = two.step(batch), one.step(batch)
    tolerance = 0.05 if settings.dtype == "bfloat16" else 1e-4
    assert got == pytest.approx(expected, rel=tolerance, abs=tolerance)
    moved = [trainer.flat - load_pretrained(tmp_path)[1] for trainer in (two, one)]
    assert relative_gap(*moved) < (0.2 if settings.dtype == "bfloat16" else 1e-3)
    if not settings.lora:
        assert relative_gap(first_moment(two), first_moment(one)) < tolerance


@pytest.mark.parametrize("kind", VISION)
def test_two_ranks_train_what_one_trains_of_a_model_that_reads_images(
    group: RankGroup, kind: str, tmp_path: Path
) -> None:
    """Some micro-batches have images on one rank only, or on none."""
    config, flat = load_pretrained(save_tiny_vision(kind, tmp_path))
    pixels = random_image(2, 2, seed=0)
    image = [START_TOKEN, *[ImageFolder(tmp_path / "images").add(pixels)] * 4, END_TOKEN]
    batch = samples(13)
    for i in (1, 5):
        batch[i] = replace(batch[i], prompt_ids=[*image, *batch[i].prompt_ids])
    two, one = make_trainers(group, replace(EVERY_TERM, images=tmp_path / "images"), config, flat=flat)
    got, expected = two.step(batch), one.step(batch)
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert relative_gap(first_moment(two), first_moment(one)) < 1e-4


def test_bf16_steps_of_two_ranks_follow_those_of_one(group: RankGroup) -> None:
    two, one = make_trainers(group, replace(PLAIN, dtype="bfloat16", mini_batch_tokens=50))
    for _ in range(3):
        got, expected = two.step(samples()), one.step(samples())
    assert got["actor/num_updates"] == expected["actor/num_updates"] > 1
    assert relative_gap(two.flat - initial(), one.flat - initial()) < 0.05
    assert relative_gap(two.flat, initial()) > 0.01


def test_a_failed_step_is_rolled_back_on_every_rank(group: RankGroup) -> None:
    """Before the first moments exist, and after."""
    two, one = make_trainers(group, replace(PLAIN, mini_batch_tokens=50))
    batch = samples()
    first = split_mini_batches([len(s.token_ids) for s in batch], 50)[0]
    broken = [s if i in first else replace(s, advantage=float("nan")) for i, s in enumerate(batch)]
    for _ in range(2):
        before = two.flat.clone()
        with pytest.raises(RunError, match="grad_norm"):
            two.step(broken)
        assert torch.equal(two.flat, before)
        assert relative_gap(two.flat, one.flat) < 1e-6
        for trainer in (two, one):
            trainer.step(batch)
    assert relative_gap(two.flat, one.flat) < 1e-6


def test_a_run_resumes_with_another_number_of_ranks(group: RankGroup) -> None:
    two, one = make_trainers(group, PLAIN)
    assert two.state_dict() == one.state_dict()  # both empty
    for source, target in ((two, one), (one, two)):
        source.step(samples())
        target.flat.copy_(source.flat)
        target.load_state_dict(source.state_dict())
        metrics = [trainer.step(samples()) for trainer in (source, target)]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)
        assert relative_gap(two.flat, one.flat) < 1e-6


@pytest.mark.parametrize("settings", [PLAIN, replace(PLAIN, offload_optimizer=True)], ids=["", "offloaded"])
def test_the_shards_of_a_checkpoint_are_read_by_any_number_of_ranks(
    group: RankGroup, settings: TrainerSettings, tmp_path: Path
) -> None:
    two, one = make_trainers(group, settings)
    two.step(samples())
    saved = two.flat.clone(), two.state_dict()["optimizer"]["state"][0]
    state, shards = two.save_state(tmp_path / "shards")
    two.step(samples())  # while the shards are written
    assert shards is not None
    shards.result()
    moments = read_moments(tmp_path / "shards", TINY)
    assert state["optimizer"]["state"][0].keys() == {"step"}
    assert all(torch.equal(moments[name], saved[1][name]) for name in ("exp_avg", "exp_avg_sq"))

    expected = two.flat.clone()
    for trainer in (two, one):
        trainer.flat.copy_(saved[0])
    two.load_state_dict({**state, "optimizer": {**state["optimizer"], "shards": tmp_path / "shards"}})
    one.load_state_dict({**state, "optimizer": {"state": {0: {**state["optimizer"]["state"][0], **moments}}}})
    for trainer in (two, one):
        trainer.step(samples())
    assert torch.equal(two.flat, expected)
    assert relative_gap(one.flat, expected) < 1e-6


def test_two_ranks_train_the_adapters_of_one(group: RankGroup) -> None:
    lora = LoraSettings(rank=2, alpha=6.0, targets=("q_proj", "o_proj", "down_proj"))
    settings = replace(PLAIN, lora=lora, mini_batch_tokens=50, lr=1e-2, betas=(0.8, 0.95))
    two, one = make_trainers(group, settings)
    for _ in range(2):
        got, expected = two.step(samples()), one.step(samples())
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert relative_gap(two.flat, one.flat) < 1e-6
    assert relative_gap(two.flat, initial()) > 1e-3
    before, (state, shards) = two.flat.clone(), two.save_state(Path("unused"))
    assert shards is None
    with pytest.raises(RunError, match="grad_norm"):  # rolled back
        two.step(with_nan(samples()))
    assert torch.equal(two.flat, before)
    for trainer in (two, one):
        trainer.step(samples())
    expected_flat = two.flat.clone()
    two.load_state_dict(state)
    assert torch.equal(two.flat, before)
    one.load_state_dict(state)
    for trainer in (two, one):
        trainer.step(samples())
    assert torch.equal(two.flat, expected_flat)
    assert relative_gap(one.flat, expected_flat) < 1e-6
    merged_by_one = one.flat.clone()  # with other rounding
    two.replace_weights(merged_by_one)
    with pytest.raises(RunError, match="grad_norm"):
        two.step(with_nan(samples()))
    assert torch.equal(two.flat, merged_by_one)


def test_a_batch_without_samples_changes_no_rank(group: RankGroup) -> None:
    two, one = make_trainers(group, EVERY_TERM, reference=1.1 * initial())
    assert two.step([]) == one.step([])
    assert torch.equal(two.flat, initial())


def test_a_gradient_that_is_not_finite_changes_no_rank(group: RankGroup) -> None:
    two, one = make_trainers(group, PLAIN)
    with pytest.raises(RunError, match="grad_norm"):
        two.step(with_nan(samples()))
    assert torch.equal(two.flat, initial())
    two.step(samples())
    one.step(samples())
    assert relative_gap(two.flat, one.flat) < 1e-6


OWN_LOSS = """
import torch

def loss(tokens, settings):
    if tokens.advantages.max() > 10.0:
        raise ValueError("too large")
    return -tokens.advantages * tokens.logprobs, torch.zeros_like(tokens.logprobs, dtype=torch.bool)
"""


def test_a_failure_of_rank_0_alone_fails_every_later_step(group: RankGroup, tmp_path: Path) -> None:
    """In an own loss. This is the last test of the module: the ranks stay out of step."""
    (tmp_path / "own.py").write_text(OWN_LOSS)
    two, _ = make_trainers(group, replace(PLAIN, policy_loss=f"{tmp_path / 'own.py'}:loss"))
    with pytest.raises(RunError, match="ValueError: too large"):
        two.step([replace(samples()[1], advantage=100.0)])
    for _ in range(2):
        with pytest.raises(RunError, match=r"rank 0 of the trainer failed: RunError: .* too large"):
            two.step(samples())
