"""Two processes with a share of the policy each do what one does with all of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.model.families import CONFIGS, drawn_weights
from tests.trainer.test_trainer import SETTINGS, TINY, initial, samples
from torch import Tensor
from torch.distributed.tensor import DTensor

from dora.errors import RunError
from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.ranks import Company, Ranks, Share
from dora.trainer.sharded import pieces
from dora.trainer.trainer import Sample, Trainer, TrainerSettings
from dora.trainer.updates import updates

TIMEOUT_S = 30.0
CPU = torch.device("cpu")
PLAIN = replace(SETTINGS, micro_batch_tokens=30)  # several micro-batches
COMPARING = replace(
    PLAIN, kl_loss_coef=0.1, entropy_coeff=0.01, activation_checkpointing=True, max_grad_norm=0.1
)
GROUP_SIZE = 3


def serve(place: Path) -> None:
    """Rank 1 of whatever it is told to begin with."""
    torch.set_num_threads(1)
    company = Company(place, 1, 2, CPU, TIMEOUT_S)
    while True:
        order: Any = company.hear()
        if isinstance(order, tuple):
            config, settings = order
            share = Share(company, config, settings, read=read)
        elif (told := share.obey(order)) is not None:
            company.collect(told)


def read(found: Sequence[Sample]) -> list[Sample]:
    """As if `stale` samples were in a stream in their order."""
    kept = stale()
    for s in found:
        assert bool(s.token_ids) == (s.stream_index is None)
    return [
        s if s.stream_index is None else replace(kept[s.stream_index], advantage=s.advantage) for s in found
    ]


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    place = tmp_path_factory.mktemp("ranks") / "place"
    other = multiprocessing.get_context("spawn").Process(target=serve, args=(place,), daemon=True)
    other.start()
    yield Company(place, 0, 2, CPU, TIMEOUT_S)
    dist.destroy_process_group()
    other.kill()
    other.join()


def pair(
    company: Company, settings: TrainerSettings, config: ModelConfig = TINY, reference: Tensor | None = None
) -> tuple[Trainer, Trainer]:
    """A trainer of two ranks and one of one, which begin alike."""
    start: Any = (config, settings)
    company.tell([start, start])
    flat = initial() if config is TINY else drawn_weights(config)
    ranks = Ranks(company, config, flat.clone(), settings, reference)
    return (
        Trainer(config, flat, settings, learner=ranks),
        Trainer(config, flat, settings, reference),
    )


def stale() -> list[Sample]:
    """Samples whose ratios are not all 1."""
    return [replace(s, logprobs=[x + 0.1 * (i % 3) for x in s.logprobs]) for i, s in enumerate(samples())]


def gap(one: Tensor, other: Tensor) -> float:
    """Relative to the second."""
    return float((one - other).norm() / other.norm())


def moment(trainer: Trainer) -> Tensor:
    """Adam's first one; after one step the gradient, scaled."""
    found: Tensor = trainer.state_dict()["optimizer"]["state"][0]["exp_avg"]
    return found


def test_pieces_are_the_flat_buffer_cut_at_the_layers() -> None:
    for config in CONFIGS.values():
        cut, flat = pieces(config), torch.arange(Layout(config).numel)
        assert len(cut) == config.num_hidden_layers + 2
        assert torch.equal(torch.cat([piece.of(flat) for piece in cut]), flat)
        named = {name: view for piece in cut for name, view in piece.views(piece.of(flat)).items()}
        assert all(torch.equal(view, named[name]) for name, view in Layout(config).views(flat).items())


def test_a_rank_holds_half_of_weights_and_gradient(company: Company) -> None:
    start: Any = (TINY, PLAIN)
    company.tell([start, start])
    share = Share(company, TINY, PLAIN, initial())
    shards = share.optimizer.shards
    for tensors in (shards, [cast(DTensor, shard.grad) for shard in shards]):
        held = sum(tensor.to_local().numel() for tensor in tensors)
        assert held == pytest.approx(Layout(TINY).numel / 2, abs=len(shards))
    share.keep()
    kept = sum(tensor.numel() for own in share.kept for tensor in own.values())
    assert kept == pytest.approx(Layout(TINY).numel / 2, abs=len(shards))  # there are no moments yet


@pytest.mark.parametrize("settings", [PLAIN, COMPARING], ids=["plain", "every term"])
def test_two_ranks_have_the_gradient_of_one(company: Company, settings: TrainerSettings) -> None:
    """Piece by piece, and with a last micro-batch that leaves one rank without."""
    trainers, batch = pair(company, settings, reference=1.1 * initial()), stale()
    for trainer in trainers:
        for i in range(0, len(batch), GROUP_SIZE):
            trainer.put(batch[i : i + GROUP_SIZE])
            while trainer.can_work:
                trainer.work()
    found, expected = (trainer.finish() for trainer in trainers)
    two, one = trainers
    assert gap(moment(two), moment(one)) < 1e-6
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_a_rank_reads_its_share_where_the_samples_are(company: Company) -> None:
    """What it is sent is what only rank 0 knows."""
    two, one = pair(company, PLAIN)
    batch = [replace(s, advantage=2.0 * s.advantages[0]) for s in stale()]
    found = two.step([replace(s, stream_index=i) for i, s in enumerate(batch)])
    assert found == pytest.approx(one.step(batch), rel=1e-5, abs=1e-7)
    assert gap(moment(two), moment(one)) < 1e-6


def test_a_mixture_of_experts_is_shared_too(company: Company) -> None:
    """Whichever experts the tokens of one rank go to."""
    two, one = pair(company, PLAIN, CONFIGS["qwen3_moe-mixed"])
    found, expected = two.step(samples()), one.step(samples())
    assert gap(moment(two), moment(one)) < 1e-5
    assert found["moe/load_imbalance"] == pytest.approx(expected["moe/load_imbalance"])


def test_steps_of_two_ranks_in_halves_go_where_those_of_one_go(company: Company) -> None:
    two, one = pair(company, replace(PLAIN, dtype="bfloat16", batch_tokens=50))
    for _ in range(3):
        found, expected = two.step(samples()), one.step(samples())
    assert found["actor/num_updates"] == expected["actor/num_updates"] > 1
    assert gap(two.flat - initial(), one.flat - initial()) < 0.05
    assert gap(two.flat, initial()) > 0.01


def test_updates_of_a_step_that_fails_are_taken_back_on_every_rank(company: Company) -> None:
    """Before there are moments, and after; each rank keeps its own shards, and nothing whole."""
    two, one = pair(company, replace(PLAIN, batch_tokens=50))
    batch = samples()
    first = updates([len(s.token_ids) for s in batch], 50)[0]
    broken = [s if i in first else replace(s, advantage=float("nan")) for i, s in enumerate(batch)]
    for _ in range(2):
        before = two.flat.clone()
        with pytest.raises(RunError, match="grad_norm"):
            two.step(broken)
        assert torch.equal(two.flat, before)
        assert gap(two.flat, one.flat) < 1e-6
        for trainer in (two, one):
            trainer.step(batch)
    assert gap(two.flat, one.flat) < 1e-6


def test_a_run_goes_on_with_another_number_of_ranks(company: Company) -> None:
    two, one = pair(company, PLAIN)
    assert two.state_dict() == one.state_dict()  # nothing yet
    for giver, taker in ((two, one), (one, two)):
        giver.step(samples())
        taker.flat.copy_(giver.flat)
        taker.load_state_dict(giver.state_dict())
        again = [trainer.step(samples()) for trainer in (giver, taker)]
        assert again[0] == pytest.approx(again[1], rel=1e-4, abs=1e-6)
        assert gap(two.flat, one.flat) < 1e-6


def test_a_gradient_that_is_not_finite_changes_no_rank(company: Company) -> None:
    two, one = pair(company, PLAIN)
    broken = [replace(s, advantage=float("nan")) for s in samples()]
    with pytest.raises(RunError, match="grad_norm"):
        two.step(broken)
    assert torch.equal(two.flat, initial())
    two.step(samples())
    one.step(samples())
    assert gap(two.flat, one.flat) < 1e-6


def test_a_rank_that_failed_alone_is_not_waited_for(company: Company) -> None:
    """What comes later fails with the same words. The last test: ranks do not find each other again."""
    two, _ = pair(company, PLAIN)
    broken = [replace(samples()[1], logprobs=[])]  # fewer than tokens
    with pytest.raises(RuntimeError):
        two.step(broken)
    for _ in range(2):
        with pytest.raises(RunError, match="rank 0 of the trainer failed, with"):
            two.step(samples())
