"""Warm-up, decay and clipping equal torch's."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.trainer.batches import SETTINGS, TINY, first_moment, gradient, initial, samples
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from torch.utils._python_dispatch import TorchDispatchMode

from dora.model.weights import WeightLayout
from dora.trainer.lora import LoraSettings
from dora.trainer.optimizer import FlatAdamW, Moments
from dora.trainer.recipe import EarlierSchedule, LearningRateSchedule, LrDecay
from dora.trainer.trainer import Trainer

WARMUP, NUM_STEPS, PEAK = 3, 10, 1e-3
WIDE = replace(TINY, vocab_size=2**18)  # 4 million parameters


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("decay", ["linear", "cosine", "constant"])
def test_the_learning_rate_is_that_of_torchs_schedules(decay: LrDecay, ratio: float) -> None:
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    warm = LinearLR(sgd, start_factor=1 / (WARMUP + 1), total_iters=WARMUP)
    rest: LRScheduler = LinearLR(sgd, 1.0, ratio if decay == "linear" else 1.0, NUM_STEPS - WARMUP)
    if decay == "cosine":
        rest = CosineAnnealingLR(sgd, NUM_STEPS - WARMUP, eta_min=PEAK * ratio)
    schedule = SequentialLR(sgd, [warm, rest], milestones=[WARMUP])
    for step in range(NUM_STEPS + 1):
        rate = LearningRateSchedule(PEAK, NUM_STEPS, WARMUP, decay, min_lr_ratio=ratio).lr_of(step)
        assert rate == pytest.approx(schedule.get_last_lr()[0]), step
        sgd.step()
        schedule.step()


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_without_a_lowest_rate_the_bits_are_those_of_the_plain_formula(decay: LrDecay) -> None:
    schedule = LearningRateSchedule(PEAK, NUM_STEPS, WARMUP, decay)
    for step in range(WARMUP, NUM_STEPS + 1):
        left = (NUM_STEPS - step) / (NUM_STEPS - WARMUP)
        cosine = PEAK * 0.5 * (1.0 - math.cos(math.pi * left))
        assert schedule.lr_of(step) == (cosine if decay == "cosine" else PEAK * left)


def test_steps_before_a_run_got_more_keep_their_rates() -> None:
    earlier = EarlierSchedule(6, 8, "linear", 0.5), EarlierSchedule(9, NUM_STEPS, "constant")
    rates = [*map(LearningRateSchedule(PEAK, 20, WARMUP, "linear", earlier).lr_of, range(20))]
    first = LearningRateSchedule(PEAK, 8, WARMUP, min_lr_ratio=0.5)
    assert rates[:6] == [*map(first.lr_of, range(6))]
    assert rates[6:9] == [PEAK] * 3
    assert rates[9:] == [*map(LearningRateSchedule(PEAK, 20, WARMUP).lr_of, range(9, 20))]


def test_the_norm_of_many_small_numbers_is_exact() -> None:
    flat = torch.zeros(WeightLayout(WIDE).numel)
    optimizer = FlatAdamW(WeightLayout(WIDE), flat, 0.0, (0.9, 0.999))
    optimizer.gradient.fill_(1e-4)
    expected = 1e-4 * math.sqrt(flat.numel())
    assert optimizer.step(lr=0.0, max_grad_norm=1.0) == pytest.approx(expected, rel=1e-4)


def test_offloaded_moments_give_the_same_bits() -> None:
    """A CPU rounds the last few numbers of a call differently, so chunks are whole vectors."""
    weights = [[x.clone() for x in (torch.randn(1000), torch.randn(7))] for _ in range(2)]
    for own, other in zip(*weights, strict=True):
        other.copy_(own)
    kept, offloaded = (
        Moments(own, 0.1, (0.9, 0.999), is_offloaded, chunk=320)
        for own, is_offloaded in zip(weights, (False, True), strict=True)
    )
    for _ in range(3):
        gradients = [torch.randn_like(x) for x in weights[0]]
        for moments, own in ((kept, weights[0]), (offloaded, weights[1])):
            moments.update(own, gradients, lr=1e-2)
    assert all(torch.equal(own, other) for own, other in zip(*weights, strict=True))
    for name in ("exp_avg", "exp_avg_sq"):
        pairs = zip(getattr(kept, name), getattr(offloaded, name), strict=True)
        assert all(torch.equal(own, other) for own, other in pairs)


class LittleMemory(TorchDispatchMode):
    """torch finds memory for so many calls of these functions, and then none."""

    def __init__(self, num_calls: int, *functions: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_left, self.functions = num_calls, functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.functions:
            self.num_left -= 1
            if self.num_left < 0:
                raise torch.OutOfMemoryError("no room")
        return func(*args, **(kwargs or {}))


def test_an_update_without_memory_for_offloaded_moments_can_be_repeated() -> None:
    """As if it had not begun, whichever chunk finds no memory."""
    gradient = torch.randn(1000)
    expected, weights = torch.zeros(1000), torch.zeros(1000)
    Moments([expected], 0.1, (0.9, 0.999)).update([expected], [gradient], lr=1e-2)
    moments = Moments([weights], 0.1, (0.9, 0.999), is_offloaded=True, chunk=320)
    copies, num_failures = (torch.ops.aten._to_copy.default, torch.ops.aten.new_empty.default), 0
    while moments.num_updates == 0:
        with suppress(torch.OutOfMemoryError), LittleMemory(num_failures, *copies):
            moments.update([weights], [gradient], lr=1e-2)
        num_failures += 1
        assert num_failures < 20
    assert num_failures > 1
    assert torch.equal(weights, expected)


def test_a_bf16_gradient_that_was_not_added_is_not_part_of_the_repeated_step() -> None:
    batch = samples()
    failed, expected = (Trainer(TINY, initial(), replace(SETTINGS, dtype="bfloat16")) for _ in range(2))
    with pytest.raises(torch.OutOfMemoryError), LittleMemory(7, torch.ops.aten.add_.Tensor):
        failed.step(batch)  # fails while it adds the gradient of a layer
    failed.step(batch)
    expected.step(batch)
    assert torch.equal(first_moment(failed), first_moment(expected))


@pytest.mark.parametrize("lora", [None, LoraSettings(2, 6.0, ("q_proj",))], ids=["full", "lora"])
def test_the_betas_are_those_of_torchs_adamw(lora: LoraSettings | None) -> None:
    """Moments after two equal gradients of size g: m = (1 - beta1 ** 2) g, and v the same with g ** 2."""
    settings = replace(SETTINGS, lora=lora, lr=0.0, betas=(0.8, 0.95))
    trainer = Trainer(TINY, initial(), settings)
    moments = []
    for _ in range(2):
        trainer.step(samples())
        state = trainer.state_dict()["optimizer"]["state"][0]
        moments.append((state["exp_avg"].clone(), state["exp_avg_sq"].clone()))
    (first, first_sq), (second, second_sq) = moments
    assert first.any()
    torch.testing.assert_close(second, first * (1 - 0.8**2) / (1 - 0.8))
    torch.testing.assert_close(second_sq, first_sq * (1 - 0.95**2) / (1 - 0.95))
    torch.testing.assert_close(first_sq, (first / (1 - 0.8)).square() * (1 - 0.95))


def test_a_large_gradient_is_clipped_as_in_torch() -> None:
    settings = replace(SETTINGS, max_grad_norm=0.5)
    whole, clipped = gradient(samples(), SETTINGS), gradient(samples(), settings)
    weights = torch.zeros_like(whole).requires_grad_()
    weights.grad = whole.clone()
    norm = torch.nn.utils.clip_grad_norm_([weights], 0.5)
    assert norm > 0.5
    torch.testing.assert_close(clipped, weights.grad)
    reported = Trainer(TINY, initial(), settings).step(samples())["actor/grad_norm"]
    assert reported == pytest.approx(float(norm), rel=1e-5)
