"""The rollout engine's only door: hold versions, take requests, step, hand back answers.

It belongs to one thread and waits for nobody; whoever owns it calls `step` while not `idle`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from torch import Tensor

from dora.core.records import RequestId
from dora.engine.blocks import kv_seed, num_blocks_for
from dora.engine.exact import SPARE_ROWS, ExactRunner, self_test
from dora.engine.graphs import GraphRunner
from dora.engine.interleaving import NEVER, Interleaving
from dora.engine.plan import Plan, State
from dora.engine.refusal import reason_to_refuse
from dora.engine.rows import Rows
from dora.engine.runner import Prompt, Runner
from dora.engine.sampler import Int64s
from dora.engine.scheduler import Scheduler
from dora.engine.seats import Seats
from dora.engine.sequence import Completion, EngineError, Request
from dora.engine.sequence import Sequence as Seated
from dora.engine.stopping import Detokenize
from dora.engine.workspace import Memory, Workspace
from dora.model.config import ModelConfig
from dora.model.weights import weight_digest


@dataclass(frozen=True)
class _Loaded:
    """A version in a slot, and the digest of the bytes there."""

    slot: int
    digest: str


class Engine:
    """Decodes up to `max_rows` requests at once, of up to `version_slots` versions.

    `max_context` bounds prompt and answer, in tokens. `num_blocks` of KV default to what all
    rows at full context need; with fewer, some requests wait in host memory at times. A step computes
    at most `prefill_budget` tokens of prompts, or some times as many if nothing decodes. `pace_s` pads
    every decode step to that wall time, to stand in for an accelerator's flat step time. `detokenize`
    turns token ids into text; stop strings need it. With `returns_routes`, answers say which experts
    their tokens were sent to. `device` is "cpu" or "cuda", `dtype` that of weights and KV: "float32" or
    "bfloat16". `exact` answers have log-probs of the same bits in whatever batch, and a `Scorer` finds them
    again; it is refused where this machine cannot do it. `kv_memory` is where the KV lies instead of the
    engine's own memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_rows: int,
        max_context: int,
        version_slots: int,
        num_blocks: int | None = None,
        prefill_budget: int = 512,
        kernels: str = "auto",
        pace_s: float = 0.0,
        detokenize: Detokenize | None = None,
        returns_routes: bool = False,
        interleaving: Interleaving = NEVER,
        device: str = "cpu",
        dtype: str = "float32",
        exact: bool = False,
        kv_memory: Memory | None = None,
    ) -> None:
        least_one = {"max_rows": max_rows, "version_slots": version_slots, "prefill_budget": prefill_budget}
        for name, value in least_one.items():
            if value < 1:
                raise EngineError(f"{name} = {value} must be at least 1")
        if not 2 <= max_context <= config.max_position_embeddings:
            raise EngineError(
                f"max_context = {max_context} must be from 2 to the model's "
                f"max_position_embeddings = {config.max_position_embeddings}"
            )
        if num_blocks is None:
            # One more per row: the partial block a prompt ends in is kept beside its copies.
            num_blocks = max_rows * (num_blocks_for(max_context) + 1)
        self._config, self._max_context, self._pace_s = config, max_context, pace_s
        self._model_digest = config.digest()
        runner = GraphRunner if device == "cuda" or kernels == "triton" else Runner
        sizes = (max_rows + exact * SPARE_ROWS, max_context, version_slots, num_blocks)
        self._workspace = Workspace(config, *sizes, kv_memory, device, dtype, is_padded=runner is GraphRunner)
        self._runner: Runner = runner(self._workspace, kernels)
        if exact:
            self._runner = ExactRunner(self._workspace, kernels, self_test(config, kernels, dtype, device))
        self._scheduler = Scheduler(max_rows, num_blocks, prefill_budget)
        self._num_blocks = num_blocks
        self._rows, self._detokenize = Rows(max_rows, max_context, detokenize), detokenize
        self._returns_routes, self._interleaving = returns_routes, interleaving
        self._seats = Seats(self._rows, self._workspace.tables, self._workspace.kv, runner.num_ahead)
        self._held: dict[int, _Loaded] = {}
        self._placed: dict[int, int] = {}  # copied and not held yet -> slot
        self._free_slots = list(range(version_slots - 1, -1, -1))
        self._slot_stamps = np.full(version_slots, -1, np.int64)
        self._order: list[Seated] = []  # rows that decode
        self._resting = frozenset[int]()  # versions that sit this step out
        self._is_paused = False
        # When the last step was due to end, and rows that decoded times wall time, summed over steps.
        self._ended_s = self.busy_row_s = 0.0
        self.num_steps = 0  # decode steps so far
        self.num_decoded = 0  # tokens of answers so far
        self.num_prefilled = 0  # prompt tokens computed so far
        self.num_swapped = 0  # requests swapped out so far, each time counted
        self.swapped_bytes = 0  # of KV, copied to host memory for them

    @property
    def versions(self) -> dict[int, str]:
        """Versions held and the digests of their bytes."""
        return {version: loaded.digest for version, loaded in self._held.items()}

    @property
    def kernels(self) -> str:
        """Which kernels run: "numba", "eager" or "triton"."""
        return self._runner.kernels_name

    @property
    def num_rows(self) -> int:
        """Requests in rows that decode, or could."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """All other requests: waiting, in prefill or swapped out."""
        parts = self._scheduler
        return len(parts.waiting) + len(parts.prefilling) + len(parts.swapped)

    @property
    def kv_share(self) -> float:
        """Share of the KV blocks that hold tokens; what longest answers might need is not counted."""
        num_full = sum(num_blocks_for(self._rows.num_computed(s)) for s in self._scheduler.running.values())
        return num_full / self._num_blocks

    @property
    def idle(self) -> bool:
        """Whether no request is here."""
        return not self.num_rows and not self.num_waiting

    @property
    def can_step(self) -> bool:
        """Whether `step` has anything to do: not while it is paused or all rows stand still."""
        return not self._is_paused and bool(len(self._rows.active) or self._scheduler.can_schedule())

    def load(self, version: int, source: Tensor) -> str:
        """Take a version, as `place` says; returns the digest of its bytes here, rounded if they are."""
        return self.hold(version, weight_digest(self.place(version, source)))

    def place(self, version: int, source: Tensor) -> Tensor:
        """Copy a flat buffer [numel], fp32 or of the engine's dtype, into a free slot; returns the slot's.

        Nothing can be asked of the version until it is held. Raises EngineError if it is here
        already, no slot is free or the buffer has another size or dtype.
        """
        if version in self._held or version in self._placed:
            raise EngineError(f"version {version} is held already; drop it before loading it again")
        if not self._free_slots:
            raise EngineError(
                f"no free slot for version {version}: {sorted(self._held)} are held; "
                "drop one or raise version_slots"
            )
        self._workspace.check_fits(version, source)
        self._placed[version] = slot = self._free_slots.pop()
        return self._workspace.slot(slot).copy_(source)

    def hold(self, version: int, digest: str) -> str:
        """Generate with a placed version from now on; its bytes here have this digest."""
        slot = self._placed.pop(version)
        self._held[version] = _Loaded(slot, digest)
        self._slot_stamps[slot] = self._rows.stamp(version, digest)
        self._scheduler.add_version(version, kv_seed(self._model_digest, digest))
        return digest

    def drop(self, version: int) -> None:
        """Free the slot of a version and forget its prompts.

        Raises EngineError if it is unknown or has unfinished requests, those arriving included.
        """
        if version not in self._held:
            raise EngineError(f"version {version} is not held; held: {sorted(self._held)}")
        if num_users := sum(request.version == version for request in self._scheduler.requests()):
            raise EngineError(f"version {version} has {num_users} unfinished requests; finish or abort them")
        self._free_slots.append(self._held.pop(version).slot)
        self._scheduler.drop_version(version)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises EngineError naming those that cannot run; all others are queued."""
        refused: dict[RequestId, str] = {}
        for request in requests:
            if reason := self._reason_to_refuse(request):
                refused[request.id] = reason
            else:
                self._scheduler.submit(request)
        if refused:
            reasons = "; ".join(f"request {request_id}: {reason}" for request_id, reason in refused.items())
            raise EngineError(f"{len(refused)} of {len(requests)} requests refused: {reasons}", refused)

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        """Give up requests; returns the tokens thrown away for each.

        Ids that are not here are ignored.
        """
        progress = self.progress()
        thrown_away = {i: progress[i] for i in ids if self._scheduler.request(i) is not None}
        for request_id in thrown_away:
            self._scheduler.remove(request_id)
            self._seats.forget(request_id)
        if thrown_away:
            self._arrange()
        return thrown_away

    def progress(self) -> dict[RequestId, int]:
        """Tokens so far of every unfinished request."""
        parts = self._scheduler
        running = {request: self._rows.num_tokens(sequence) for request, sequence in parts.running.items()}
        swapped = {request_id: self._seats.num_tokens(request_id) for request_id in parts.swapped}
        return running | swapped | dict.fromkeys((*parts.prefilling, *parts.waiting), 0)

    def state_of(self, request_id: RequestId) -> State:
        """Where a request is here."""
        return self._scheduler.state_of(request_id)

    def rush(self, ids: Iterable[RequestId]) -> None:
        """Decode these requests only; the others keep row and KV and stand still.

        Once none of them is running here, and at once for no ids, all decode again.
        """
        self._scheduler.rush(ids)
        self._arrange()

    def pause(self) -> None:
        """Make `step` do nothing until `resume`; everything else goes on."""
        self._is_paused = True

    def resume(self) -> None:
        """Decode again."""
        self._is_paused = False

    def step(self) -> list[Completion]:
        """Schedule, prefill, decode, collect; returns the answers that this step finished."""
        if self._is_paused:
            return []
        # At a pace, a step begins as soon as the last one was due to end, as on a device.
        started_s = self._ended_s if (now_s := time.perf_counter()) < self._ended_s + self._pace_s else now_s
        self._choose_resting()
        self._prefill(self._schedule())
        num_rows = len(self._rows.active)
        if not num_rows:
            return []
        completions = self._collect([self._order[i] for i in self._decode()])
        self._ended_s = max(started_s + self._pace_s, time.perf_counter())
        if (rest_s := self._ended_s - time.perf_counter()) > 0:
            time.sleep(rest_s)
        self.num_steps += 1
        self.num_decoded += num_rows
        self.busy_row_s += num_rows * (self._ended_s - started_s)
        return completions

    def check(self) -> None:
        """Assert that rows, blocks and slots are conserved."""
        self._scheduler.check()
        assert len(self._seats) == len(self._scheduler.swapped), "host memory is kept for nobody"
        slots = [*(loaded.slot for loaded in self._held.values()), *self._placed.values(), *self._free_slots]
        assert sorted(slots) == list(range(len(self._slot_stamps))), f"slots held or free: {sorted(slots)}"

    def _schedule(self) -> Plan:
        """Let rows and blocks change hands; returns what is to be computed before the next decode step."""
        plan = self._scheduler.schedule(self._lacking())
        for sequence in plan.swapped_out:
            self.swapped_bytes += self._seats.swap_out(sequence)
            self.num_swapped += 1
        for sequence in plan.grown:
            self._seats.grow(sequence)
        for sequence, num_known in plan.swapped_in:
            self._seats.swap_in(sequence, num_known)
        return plan

    def _lacking(self) -> dict[Seated, int]:
        """Rows that need more blocks for what is computed next, and how many at least."""
        return dict.fromkeys((self._order[i] for i in self._seats.full()), 1)

    def _prefill(self, plan: Plan) -> None:
        """Compute prompts, or parts of them, and seat those who decode from now on."""
        by_version = sorted(plan.prefills, key=lambda prefill: prefill.key.version)
        for version, prefills in groupby(by_version, key=lambda prefill: prefill.key.version):
            prompts = [Prompt(p.key.prompt_ids[: p.stop], p.start, p.blocks) for p in prefills]
            self.num_prefilled += self._runner.prefill(self._held[version].slot, prompts)
        self._runner.copy_blocks(plan.copies)
        for sequence in plan.started:
            self._seats.seat(sequence)
        if plan.started or plan.swapped_in or plan.swapped_out:
            self._arrange()

    def _decode(self) -> Int64s:
        """One token for every row; returns which rows (by order) have finished."""
        rows = self._rows
        tokens, positions = rows.inputs()
        drawn = self._runner.draw(tokens, positions, rows.active_rules, self._has_next)
        return rows.append(drawn, self._stamps)

    def _has_next(self) -> bool:
        """Whether the rows that decode now will do so once more, without any others."""
        return self._seats.has_next() and not self._scheduler.can_schedule()

    def _collect(self, done: list[Seated]) -> list[Completion]:
        """The answers of rows that have their last token; others have their places."""
        if not done:
            return []
        completions = [self._rows.completion(sequence) for sequence in done]
        if self._returns_routes:
            routes = [self._runner.routes(s.blocks, self._rows.num_computed(s)).numpy() for s in done]
            completions = [replace(c, routes=r) for c, r in zip(completions, routes, strict=True)]
        for sequence in done:
            self._scheduler.remove(sequence.request.id)
        self._arrange()
        return completions

    def _arrange(self) -> None:
        """The set of rows that decode may have changed: put them in order again."""
        order = self._scheduler.rows_by_version(self._resting)
        if order == self._order:
            return
        self._order = order
        self._rows.arrange([sequence.row for sequence in self._order])
        slots = np.array([self._held[sequence.request.version].slot for sequence in self._order], np.int64)
        # The stamp is that of the slot whose weights are used, not the one the request asks for.
        self._stamps = self._slot_stamps[slots]
        self._runner.arrange(self._rows.active, slots)

    def _choose_resting(self) -> None:
        """Versions that sit this step out; rows that wake up are asked for room with all others."""
        if self._interleaving.interval > 1:
            num_rows = Counter(s.request.version for s in self._scheduler.running.values())
            newest = max(self._held, default=0)
            self._resting = self._interleaving.resting(self.num_steps, num_rows, newest)
            self._arrange()

    def _reason_to_refuse(self, request: Request) -> str:
        """Why a request cannot run here, or an empty string."""
        if self.state_of(request.id) is not State.DONE:
            return "it is here already"
        if request.version not in self._held:
            return f"version {request.version} is not held; held: {sorted(self._held)}"
        can_read = self._detokenize is not None
        reason = reason_to_refuse(request, self._config.vocab_size, self._max_context, can_read=can_read)
        if not reason and (num_needed := self._scheduler.num_needed(request)) > self._num_blocks:
            needs = f"it may need {num_needed} KV blocks and the engine has {self._num_blocks} in all"
            return f"{needs}; raise num_blocks or lower max_tokens"
        return reason
