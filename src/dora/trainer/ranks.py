"""N trainer processes that hold one policy in shards: what rank 0 orders, and what every rank does.

Orders and samples go through a group of their own, where followers wait for as long as the trainer rests.
What the model exchanges has a deadline: a rank that is gone or stuck becomes an error of the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dora.errors import RunError
from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.gradient import Backward
from dora.trainer.optimizer import ShardedAdamW
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.sharded import ShardedPolicy
from dora.trainer.tally import Tally

WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")
_FOR_EVER = timedelta(days=365)  # a trainer may rest; if rank 0 dies, the group notices


Read = Callable[[Sequence[Sample]], Sequence[Sample]]


@dataclass(frozen=True)
class Add:
    """Add the gradient of one micro-batch; of none: take part in those of the others.

    Samples that are in the stream come without what can be read there. `num_updates` are those of the step
    so far.
    """

    samples: Sequence[Sample]
    num_updates: int


@dataclass(frozen=True)
class Step:
    """Update the weights; as `Learner.step`."""

    divisor: float
    lr: float
    max_grad_norm: float


@dataclass(frozen=True)
class Forget:
    """Begin the gradient anew."""


@dataclass(frozen=True)
class Keep:
    """Copy weights and moments to the host's memory."""


@dataclass(frozen=True)
class PutBack:
    """Go on from what was kept last."""


@dataclass(frozen=True)
class Gather:
    """Bring the weights, or a moment of the optimizer's, together on rank 0."""

    name: str


@dataclass(frozen=True)
class Resume:
    """Take shards of the weights from rank 0, and of the moments if there are any yet."""

    num_updates: int


Order = Add | Step | Forget | Keep | PutBack | Gather | Resume


class Company:
    """The ranks of one trainer, from the view of one of them."""

    def __init__(
        self, place: Path, rank: int, num_ranks: int, device: torch.device, timeout_s: float
    ) -> None:
        """Wait for the others; they meet in the new file `place`. `timeout_s` limits each exchange."""
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        if sys.platform == "linux":  # all are on one machine: nobody else is to reach them, unless told
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{place.absolute()}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        self.mesh = init_device_mesh(device.type, (num_ranks,))
        self._orders = dist.new_group(backend="gloo", timeout=_FOR_EVER)

    def tell(self, orders: Sequence[Order]) -> None:
        """One to each rank, rank 0's own included; by rank 0."""
        dist.scatter_object_list([None], list(orders), src=0, group=self._orders)

    def hear(self) -> Order:
        """The next order; by the others."""
        heard: list[Any] = [None]
        dist.scatter_object_list(heard, None, src=0, group=self._orders)
        order: Order = heard[0]
        return order

    def collect(self, own: Tally) -> list[Tally]:
        """Those of all ranks, on rank 0; elsewhere nothing."""
        found: list[Any] = [None] * self.num_ranks if self.rank == 0 else []
        dist.gather_object(own, found or None, dst=0, group=self._orders)
        return found


class Share:
    """One rank's part of a policy, its gradient and its optimizer.

    All ranks call the same at the same time; what only rank 0 has is None on the others.
    """

    def __init__(
        self,
        company: Company,
        config: ModelConfig,
        settings: TrainerSettings,
        flat: Tensor | None = None,
        reference: Tensor | None = None,
        read: Read = lambda samples: samples,
    ) -> None:
        """Rank 0 has the weights [numel], and those to compare with if the loss does.

        `read` completes samples that came without what is in the stream.
        """
        self._read = read
        self._policy = ShardedPolicy(config, settings, company.mesh)
        self._policy.fill(flat)
        self._reference: ShardedPolicy | None = None
        if settings.keeps_reference:
            self._reference = ShardedPolicy(config, settings, company.mesh, is_frozen=True)
            self._reference.fill(reference)
        self._backward = Backward(self._policy, settings, self._reference)
        self.optimizer = ShardedAdamW(self._policy.shards, settings.weight_decay, settings.betas)
        self.kept: list[dict[str, Tensor]] = []

    def obey(self, order: Order) -> Tally | None:
        """A follower's part of an order; what there is to tell."""
        match order:
            case Add(samples, num_updates):
                return self.add(self._read(samples), num_updates)
            case Step(divisor, lr, max_grad_norm):
                with suppress(RunError):  # rank 0 has the same, and tells it
                    self.optimizer.step(divisor, lr, max_grad_norm)
            case Forget():
                self.optimizer.forget()
            case Keep():
                self.keep()
            case PutBack():
                self.put_back()
            case Gather(name):
                self.gather(name, None)
            case Resume(num_updates):
                self.resume(num_updates, None, None)
        return None

    def add(self, samples: Sequence[Sample], num_updates: int) -> Tally:
        """Add the gradient of a micro-batch, or of none while others have one; what it counts."""
        tally = Tally(num_updates=num_updates)
        if samples:
            self._backward.add(samples, tally)
            return tally
        batch = pack([[0]], [[0]], self._policy.device)
        logprobs, _ = self._policy.logprobs(batch)
        if self._reference is not None:
            with torch.no_grad():
                self._reference.logprobs(batch)
        torch.autograd.backward((logprobs * 0.0).sum())
        return tally

    def keep(self) -> None:
        """Copy this rank's weights and moments to the host's memory, in the place of the copy before."""
        self.kept = []
        self.kept = self.optimizer.kept()

    def put_back(self) -> None:
        """Go on from that copy."""
        self.optimizer.put_back(self.kept)

    def gather(self, name: str, flat: Tensor | None) -> None:
        """Bring together in `flat` [numel] the weights, or one of the optimizer's moments."""
        shards = self._policy.shards if name == WEIGHTS else self.optimizer.moments(name)
        self._policy.gather(shards, flat)

    def resume(self, num_updates: int, flat: Tensor | None, moments: Sequence[Tensor] | None) -> None:
        """Take up the weights, and the optimizer's moments, after so many updates; [numel] each."""
        self._policy.fill(flat)
        shards = {}
        if num_updates:
            given: Sequence[Tensor | None] = moments or [None] * len(MOMENTS)
            shards = {name: self._policy.scatter(m) for name, m in zip(MOMENTS, given, strict=True)}
        self.optimizer.resume(num_updates, shards)


def follow(company: Company, share: Share) -> None:
    """Life of a rank other than 0: do what rank 0 says, until the process ends."""
    while True:
        told = share.obey(company.hear())
        if told is not None:
            company.collect(told)


class Ranks:
    """A `Learner` of several processes, by rank 0; `flat` is where it brings the weights together."""

    def __init__(
        self,
        company: Company,
        config: ModelConfig,
        flat: Tensor,
        settings: TrainerSettings,
        reference: Tensor | None,
    ) -> None:
        """As `Trainer`; the other ranks `follow`. The flat buffers may be anywhere."""
        self.num_ranks, self._company = company.num_ranks, company
        self._flat, self._is_current = flat, True
        self._share = Share(company, config, settings, flat, flat if reference is None else reference)
        self._layout, self._dtype = Layout(config), getattr(torch, settings.dtype)
        here = {"model.norm.weight": torch.empty(0, device=company.device)}
        self._alone = Policy(
            config, here, settings.temperature, logits_chunk_tokens=settings.logits_chunk_tokens
        )
        self._failure: str | None = None

    @property
    def flat(self) -> Tensor:
        if not self._is_current:
            self._gather(WEIGHTS, self._flat)
            self._is_current = True
        return self._flat

    def add(self, packs: Sequence[Sequence[Sample]], tally: Tally) -> None:
        others: list[Sequence[Sample]] = [[_without_columns(s) for s in pack] for pack in packs[1:]]
        others += [()] * (self.num_ranks - 1 - len(others))
        with self._all_told([Add(samples, tally.num_updates) for samples in ((), *others)]):
            for found in self._company.collect(self._share.add(packs[0], tally.num_updates)):
                tally.join(found)

    def step(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        with self._all_told(Step(divisor, lr, max_grad_norm)):
            norm = self._share.optimizer.step(divisor, lr, max_grad_norm)
        self._is_current = False
        return norm

    def forget(self) -> None:
        if self._failure is None:
            with self._all_told(Forget()):
                self._share.optimizer.forget()

    def keep(self) -> Callable[[], None]:
        """Every rank its own shards; nothing is brought together."""
        with self._all_told(Keep()):
            self._share.keep()
        return self._put_back

    def _put_back(self) -> None:
        with self._all_told(PutBack()):
            self._share.put_back()
        self._is_current = False

    def under(self, flat: Tensor) -> Policy:
        """Rank 0 computes it alone; what it needs of the weights is brought to its device one by one."""
        return self._alone.under(_Moved(self._layout.views(flat), self._company.device, self._dtype), None)

    def state_dict(self) -> dict[str, Any]:
        optimizer = self._share.optimizer
        state: dict[str, Any] = {}
        if optimizer.num_updates:
            state["step"] = torch.tensor(float(optimizer.num_updates))
            for name in MOMENTS:
                state[name] = torch.empty_like(self._flat)
                self._gather(name, state[name])
        return {"state": {0: state} if state else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = state["state"].get(0, {"step": 0})
        num_updates, moments = int(found["step"]), [found[name] for name in MOMENTS if name in found]
        with self._all_told(Resume(num_updates)):
            self._share.resume(num_updates, self._flat, moments)
        self._is_current = True

    def _gather(self, name: str, flat: Tensor) -> None:
        with self._all_told(Gather(name)):
            self._share.gather(name, flat)

    @contextmanager
    def _all_told(self, orders: Order | Sequence[Order]) -> Iterator[None]:
        """Followers do their part of it while rank 0 does its own.

        Once that has failed on rank 0 alone, ranks are no longer at the same place, and nothing is possible
        any more: it raises the same again.
        """
        if self._failure is not None:
            raise RunError(self._failure)
        self._company.tell(orders if isinstance(orders, Sequence) else [orders] * self.num_ranks)
        try:
            yield
        except RunError:  # of all ranks alike
            raise
        except Exception as error:
            self._failure = f"rank 0 of the trainer failed, with {type(error).__name__}: {error}"
            raise


def _without_columns(sample: Sample) -> Sample:
    """What another rank cannot read in the stream."""
    if sample.stream_index is None:
        return sample
    return replace(sample, prompt_ids=(), token_ids=(), logprobs=(), routes=None, loss_mask=None)


class _Moved(Mapping[str, Tensor]):
    """Weights that are brought to a device, in a type, whenever they are asked for."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._weights, self._device, self._dtype = weights, device, dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].to(self._device, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
