"""The rollout engine: loads versions, accepts requests, steps, and returns completions.

An engine belongs to one thread and never blocks. Call `step` while `can_step`.

Three kinds of requests do more than decode to their end:

* An episode (`SamplingParams.max_turn_tokens`) is one sequence of the model's turns and of the observations
  between them. An observation is prefilled like a part of a prompt. Sampling depends only on the position of
  a token, so the same observations lead to the same tokens whenever they arrive.
* A running request can migrate to another engine with its KV (`dora.engine.kv_transfer`).
* With `inflight_update`, running requests continue with each newer version, as in most asynchronous trainers.
  Their outputs have chunks of several versions, and each log-prob is that of the weights that sampled the
  token. Held-out requests keep their version.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dora.core.types import RequestId
from dora.engine.batch_invariant import SPARE_ROWS, BatchInvariantRunner, self_test
from dora.engine.block_manager import BLOCK_SIZE, hash_seed, num_blocks_for
from dora.engine.cuda_graphs import CUDAGraphRunner
from dora.engine.decode_batch import (
    MAX_STOP_IDS,
    DecodeBatch,
    Detokenize,
    KVCache,
    PartialOutput,
    can_continue,
    turn_end,
)
from dora.engine.interface import NATIVE, Capabilities, KVTransfer
from dora.engine.kernels.workspace import DTYPES, KVAllocator, Workspace
from dora.engine.kv_transfer.device_kv import DeviceKV
from dora.engine.kv_transfer.handoff import FORMAT_VERSION, KVFormat
from dora.engine.kv_transfer.kv_migrator import KVMigrator
from dora.engine.kv_transfer.pool import EngineKV, SharedKV, create_pool, view_as_blocks
from dora.engine.kv_transfer.staging import StagedKV
from dora.engine.kv_transfer.transfer import KVTransport
from dora.engine.messages import (
    ExportFailed,
    ImportFailed,
    MigrationReply,
    ReserveMigration,
    StartExport,
    TurnFinished,
)
from dora.engine.request import (
    Completion,
    EngineError,
    PrefillInput,
    Request,
    SamplingParams,
    Sequence,
    check_observation,
)
from dora.engine.runner import ModelRunner
from dora.engine.scheduler import RequestStatus, Scheduler, SchedulerOutput
from dora.model.config import ModelConfig
from dora.model.weights import copy_with_digest

_WARM_UP_VERSION, _WARM_UP_PROMPT, _WARM_UP_SAMPLING = -1, (0, 0), SamplingParams(1.0, 2)


@dataclass(frozen=True)
class _LoadedVersion:
    """The slot of a version, and the digest of the bytes in it."""

    slot: int
    digest: str


class Engine:
    """Decodes up to `max_rows` requests at once, of up to `version_slots` versions.

    max_context     maximum prompt and output tokens of a request
    num_blocks      KV blocks; the default fits all rows at full context, with fewer blocks requests are
                    preempted and swapped to host memory
    prefill_budget  prompt tokens per step; several times as many while nothing decodes
    kernels         "auto", "numba", "eager" or "triton"
    pace_s          pads each decode step to this time, to emulate an accelerator's flat step time
    detokenize      token ids -> text; required for stop strings
    returns_routes  completions contain the experts of each token
    device, dtype   "cpu" or "cuda"; "float32" or "bfloat16", of weights and KV
    exact           log-probs have the same bits in any batch, and `LogprobScorer` reproduces them; raises
                    EngineError if this machine cannot do so
    inflight_update continue running requests with each newer version: "inflight" keeps the KV of the older
                    weights, "partial" computes it again; such requests do not migrate
    pool            file through which other engines of this machine reach the KV; without it a request that
                    migrates is prefilled again
    kv_transfer     "shared": the file has the KV; "staged": what passes through it in a migration; "ipc": the
                    handle of the KV on a GPU, or on the CPU the KV. Default: "shared", on a GPU "staged"
    transport       reaches the pools and files of other engines
    clock           times the leases of migrations; all engines of a run share it
    """

    capabilities: Capabilities = NATIVE  # of the class; an instance has those that its settings leave

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
        device: str = "cpu",
        dtype: str = "float32",
        exact: bool = False,
        inflight_update: str | None = None,
        pool: Path | None = None,
        kv_transfer: KVTransfer | None = None,
        transport: KVTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_positive(max_rows=max_rows, version_slots=version_slots, prefill_budget=prefill_budget)
        _check_context(max_context, config)
        if inflight_update not in (None, "partial", "inflight"):
            raise EngineError(f'inflight_update = {inflight_update!r} must be None, "partial" or "inflight"')
        if num_blocks is None:
            # One more per row: the partial block of a prompt is kept beside its copies.
            num_blocks = max_rows * (num_blocks_for(max_context) + 1)
        self._config, self._max_context, self._pace_s = config, max_context, pace_s
        self._prefill_budget, self._dtype, self._inflight_update = prefill_budget, dtype, inflight_update
        self._max_rows = max_rows
        self._model_digest = config.digest()
        self.capabilities = replace(
            NATIVE,
            max_versions=version_slots, stop_strings=detokenize is not None,
            migrates_without_kv=inflight_update is None, kv_transfer=pool is not None,
            inflight_update=inflight_update is not None, routes=returns_routes,
        )  # fmt: skip
        runner = CUDAGraphRunner if device == "cuda" or kernels == "triton" else ModelRunner
        kv_transfer = kv_transfer or ("staged" if device == "cuda" else "shared")
        sizes = (max_rows + exact * SPARE_ROWS, max_context, version_slots, num_blocks)
        in_file = pool if device == "cpu" and kv_transfer != "staged" else None
        allocate, is_padded = _allocator(in_file, dtype), runner is CUDAGraphRunner
        self._workspace = Workspace(config, *sizes, allocate, device, dtype, is_padded=is_padded)
        self._runner: ModelRunner = runner(self._workspace, kernels)
        if exact:
            row_counts = self_test(config, kernels, dtype, device)
            self._runner = BatchInvariantRunner(self._workspace, kernels, row_counts)
        self._scheduler = Scheduler(max_rows, num_blocks, prefill_budget)
        self._num_blocks = num_blocks
        self._batch, self._detokenize = DecodeBatch(max_rows, max_context, detokenize), detokenize
        block_tables, kv = self._workspace.block_tables, self._workspace.kv
        self._kv_cache = KVCache(self._batch, block_tables, kv, runner.num_steps_ahead)
        self.shared_kv: EngineKV[Any] | None = None  # None: requests migrate without KV
        if pool is not None:
            self.shared_kv = _shared_kv(kv_transfer, kv, pool)
        self._migrator = KVMigrator(
            self._scheduler, self._batch, self._kv_cache, self.shared_kv,
            kv_format=self._kv_format, prefill=self._prefill_imported,
            transport=transport or KVTransport(), clock=clock,
        )  # fmt: skip
        self._finished_turns: list[TurnFinished] = []
        self._returns_routes = returns_routes
        self._loaded: dict[int, _LoadedVersion] = {}
        self._copied: dict[int, int] = {}  # versions in a slot that are not active yet -> slot
        self._free_slots = list(range(version_slots - 1, -1, -1))
        self._slot_weights_ids = np.full(version_slots, -1, np.int64)
        self._decoding: list[Sequence] = []  # in the order of the batch
        self._is_paused = False
        self._step_ended_s = 0.0  # when the last step ended, or should have ended at `pace_s`
        self.busy_row_s = 0.0  # decoding rows times wall time, summed over steps
        self.num_steps = 0  # decode steps
        self.num_decoded = 0  # output tokens
        self.num_prefilled = 0  # prompt tokens computed
        self.num_swapped = 0  # times that a request was swapped out
        self.swapped_bytes = 0  # of KV copied to host memory
        self.num_recomputed = 0  # tokens whose KV was discarded for a newer version and computed again

    @property
    def versions(self) -> dict[int, str]:
        """Active versions and the digests of their bytes."""
        return {version: loaded.digest for version, loaded in self._loaded.items()}

    @property
    def kernels(self) -> str:
        """The kernels in use: "numba", "eager" or "triton"."""
        return self._runner.kernels_name

    @property
    def num_running(self) -> int:
        """Requests in decode rows whose prompt is computed."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """All other requests: waiting, in prefill or swapped out."""
        scheduler = self._scheduler
        return len(scheduler.waiting) + len(scheduler.prefilling) + len(scheduler.swapped)

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks in use. Those that requests share count once, cached ones do not."""
        return self._scheduler.num_used_blocks / self._num_blocks

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no request."""
        return not self.num_running and not self.num_waiting

    @property
    def can_step(self) -> bool:
        """Whether `step` has anything to do: false if paused or if no request can decode or start."""
        return not self._is_paused and bool(
            len(self._batch.active) or self._scheduler.can_schedule() or self._scheduler.has_arrivals
        )

    def warm_up(self) -> None:
        """Compile the kernels and capture the graphs of one version, which would delay the first requests.

        The engine decodes with weights of zero, for each size of a graph once. It must have no version yet.
        """
        if self._max_context < len(_WARM_UP_PROMPT) + _WARM_UP_SAMPLING.max_tokens:
            return
        assert not self._loaded, "an engine warms up before it loads a version"
        pace_s, self._pace_s = self._pace_s, 0.0
        self._copied[_WARM_UP_VERSION] = slot = self._free_slots.pop()
        self._workspace.slot_weights(slot).zero_()
        self.activate(_WARM_UP_VERSION, "")
        sizes = {min(2**power, self._max_rows) for power in range(self._max_rows.bit_length() + 1)}
        for size in sorted(sizes, reverse=True):
            ids = [RequestId(_WARM_UP_VERSION, 0, sibling) for sibling in range(size)]
            self.submit(
                [
                    Request(r, r.group, _WARM_UP_PROMPT, _WARM_UP_VERSION, r.sibling, _WARM_UP_SAMPLING)
                    for r in ids
                ]
            )
            while not self.is_idle:
                self.step()
        self.drop(_WARM_UP_VERSION)
        self._pace_s, self._step_ended_s, self.busy_row_s = pace_s, 0.0, 0.0
        self.num_steps = self.num_decoded = self.num_prefilled = self.num_swapped = self.swapped_bytes = 0

    # Versions.

    def load(self, version: int, source: Tensor) -> str:
        """Load and activate a version (see `copy_to_slot`); returns the digest of the bytes in the slot."""
        return self.activate(version, copy_with_digest(self._claim_slot(version, source), source))

    def copy_to_slot(self, version: int, source: Tensor) -> Tensor:
        """Copy a flat buffer [numel], fp32 or of the engine's dtype, to a free slot; returns the slot's
        buffer.

        The version takes requests once it is active. Raises EngineError if it is loaded already, no slot is
        free, or the buffer has another size or dtype.
        """
        return self._claim_slot(version, source).copy_(source)

    def _claim_slot(self, version: int, source: Tensor) -> Tensor:
        """The buffer of a free slot, for `source`. Raises as `copy_to_slot` does."""
        if version in self._loaded or version in self._copied:
            raise EngineError(f"version {version} is loaded already; drop it before loading it again")
        if not self._free_slots:
            raise EngineError(
                f"no free slot for version {version}: {sorted(self._loaded)} are loaded; "
                "drop one or raise version_slots"
            )
        self._workspace.check_fits(version, source)
        self._copied[version] = slot = self._free_slots.pop()
        return self._workspace.slot_weights(slot)

    def activate(self, version: int, digest: str) -> str:
        """Accept requests of a copied version, whose bytes in the slot have this digest; returns it.

        With `inflight_update`, unfinished requests continue with the version.
        """
        slot = self._copied.pop(version)
        self._loaded[version] = _LoadedVersion(slot, digest)
        self._slot_weights_ids[slot] = self._batch.weights_id(version, digest)
        self._scheduler.add_version(version, hash_seed(self._model_digest, digest))
        if self._inflight_update is not None:
            self._continue_with_newest()
        return digest

    def drop(self, version: int) -> None:
        """Free the slot of a version and remove its prompts from the prefix cache.

        Raises EngineError if it is unknown or has unfinished requests, including those migrating in.
        """
        self._migrator.release_imported()
        if version not in self._loaded:
            raise EngineError(f"version {version} is not loaded; loaded: {sorted(self._loaded)}")
        if num_requests := sum(request.version == version for request in self._scheduler.requests()):
            raise EngineError(
                f"version {version} has {num_requests} unfinished requests; finish or abort them"
            )
        self._free_slots.append(self._loaded.pop(version).slot)
        self._scheduler.drop_version(version)

    # Requests.

    def submit(
        self, requests: Collection[Request], outputs: Mapping[RequestId, PartialOutput] | None = None
    ) -> None:
        """Queue requests. Raises EngineError with those that cannot run; all others are queued.

        A request with a partial output of its version's weights continues it after one prefill; any other
        output is ignored. An episode whose output ends with a whole turn waits for `continue_episode` or
        `end_episode`. With `inflight_update`, requests of an older version start with the newest one.
        """
        rejected: dict[RequestId, str] = {}
        for request in map(self._with_newest_version, requests):
            if reason := self._reason_to_reject(request):
                rejected[request.id] = reason
            elif (output := (outputs or {}).get(request.id)) and self._can_continue(request, output):
                num_computed = len(request.prompt_ids) + len(output.token_ids) - 1
                self._scheduler.add_without_kv(request, num_blocks_for(num_computed))
                self._kv_cache.add_without_kv(request.id, output)
                if turn_end(request, output, self._detokenize):  # it awaits an observation
                    self._scheduler.between_turns[request.id] = None
            else:
                self._scheduler.add(request)
        if rejected:
            reasons = "; ".join(f"request {request_id}: {reason}" for request_id, reason in rejected.items())
            raise EngineError(f"{len(rejected)} of {len(requests)} requests rejected: {reasons}", rejected)

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        """Abort requests; returns the output tokens lost for each. Ignores ids that are unknown or that
        another engine has imported.
        """
        own = [i for i in ids if self._scheduler.request(i) is not None and self._migrator.reclaim(i)]
        progress = self.progress()
        lost = {i: progress[i] for i in own}
        for request_id in lost:
            self._scheduler.remove(request_id)
            self._kv_cache.discard(request_id)
        if lost:
            self._update_batch()
        return lost

    def progress(self) -> dict[RequestId, int]:
        """Output tokens so far of each unfinished request that no other engine may have imported."""
        scheduler = self._scheduler
        running = {i: self._batch.num_output_tokens(sequence) for i, sequence in scheduler.running.items()}
        swapped = {i: len(self._kv_cache.partial_output(i).token_ids) for i in scheduler.swapped}
        found = running | swapped | dict.fromkeys((*scheduler.prefilling, *scheduler.waiting), 0)
        return {i: num for i, num in found.items() if not self._migrator.is_exported(i)}

    def partial_outputs(self, ids: Collection[RequestId] | None = None) -> dict[RequestId, PartialOutput]:
        """A copy of the output so far of each of these requests (None: of all) that has any and is not
        exported.

        None with in-flight updates: no other engine could continue it.
        """
        if self._inflight_update is not None:
            return {}
        running, swapped = self._scheduler.running, self._scheduler.swapped
        chosen = [i for i in (*running, *swapped) if ids is None or i in ids]
        found = {
            i: self._batch.partial_output(running[i]) if i in running else self._kv_cache.partial_output(i)
            for i in chosen
            if not self._migrator.is_exported(i)
        }
        return {i: output for i, output in found.items() if len(output.token_ids)}

    def _can_continue(self, request: Request, output: PartialOutput) -> bool:
        """Whether an output is an unfinished one of the request, with the weights loaded here."""
        digest = self._loaded[request.version].digest
        return self._inflight_update is None and can_continue(request, output, digest)

    def status_of(self, request_id: RequestId) -> RequestStatus:
        return self._scheduler.status_of(request_id)

    def decode_only(self, ids: Iterable[RequestId]) -> None:
        """Decode only these requests; the others keep row and KV, and are paused.

        Once none of them is running, and at once for no ids, all requests decode again.
        """
        self._scheduler.decode_only(ids)
        self._update_batch()

    def pause(self) -> None:
        """Make `step` do nothing until `resume`; all other methods work."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    # Episodes.

    def pop_finished_turns(self) -> list[TurnFinished]:
        """The turns that have finished since the last call. Their requests wait for `continue_episode` or
        `end_episode`.
        """
        finished, self._finished_turns = self._finished_turns, []
        return finished

    def continue_episode(self, request_id: RequestId, token_ids: Collection[int]) -> None:
        """Append an observation, after which the request generates its next turn.

        Raises EngineError if the request does not wait for an observation here, or the observation is empty,
        too long or has unknown token ids.
        """
        request = self._request_between_turns(request_id)
        num_left = request.sampling.max_tokens - self.progress()[request_id]
        check_observation(request_id, token_ids, num_left, self._config.vocab_size)
        self._scheduler.set_observation(request_id, [*token_ids])

    def end_episode(self, request_id: RequestId) -> None:
        """Complete the request with the turns so far, in a later step.

        Raises EngineError if the request does not wait for an observation here.
        """
        self._request_between_turns(request_id)
        self._scheduler.set_observation(request_id, [])

    def _request_between_turns(self, request_id: RequestId) -> Request:
        request = self._scheduler.request(request_id)
        if request is None or not self._scheduler.awaits_observation(request_id):
            raise EngineError(f"request {request_id} does not wait for an observation; nothing was appended")
        return request

    # Migration.

    @property
    def num_migrations(self) -> int:
        """Migrations in progress, in both directions."""
        return len(self._migrator)

    def reserve_migration(self, command: ReserveMigration) -> ImportFailed | None:
        """Reserve a row and KV blocks for a request that another engine decodes."""
        self._migrator.release_imported()  # the request may be migrating back
        reason = self._reason_to_reject(command.request)
        if not reason and not self.capabilities.migrates_without_kv:
            reason = "requests that continue with newer versions do not migrate"
        return ImportFailed(command.migration_id, reason) if reason else self._migrator.reserve(command)

    def start_export(self, command: StartExport) -> ExportFailed | None:
        """Begin to export a request, which this engine decodes meanwhile."""
        return self._migrator.start_export(command)

    def cancel_migration(self, migration_id: int) -> None:
        """End a migration at the next poll, unless its import is committed by then."""
        self._migrator.cancel(migration_id)

    def poll_migrations(self) -> list[MigrationReply]:
        """Advance all migrations and return new replies. Call it between steps."""
        replies = self._migrator.poll()
        self._update_batch()
        return replies

    def _prefill_imported(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Compute the KV of a sequence, without its first `num_cached_tokens` tokens and its next input."""
        version, chunk = self._chunk(sequence, num_cached_tokens, self._batch.num_computed_tokens(sequence))
        self._runner.prefill(self._loaded[version].slot, [chunk])

    def _kv_format(self, version: int) -> KVFormat:
        shape = tuple(self._workspace.kv.shape[1:])
        return KVFormat(FORMAT_VERSION, self._model_digest, self._loaded[version].digest, self._dtype, shape)

    # In-flight updates.

    def _with_newest_version(self, request: Request) -> Request:
        """The request with the version that decodes it from now on."""
        if self._inflight_update is None or request.id.is_held_out:
            return request
        return replace(request, version=max((request.version, *self._loaded)))

    def _continue_with_newest(self) -> None:
        """Continue all unfinished requests with the newest version, which has just become active."""
        self._runner.discard_step()  # it uses the old weights
        self._decoding = []
        self._batch.set_active([])
        self._runner.set_batch(self._batch.active, self._batch.active)
        for request in [*self._scheduler.requests()]:
            updated = self._with_newest_version(request)
            if updated.version == request.version:
                continue
            sequence = self._scheduler.running.get(request.id)
            # A row without output has the KV of its prompt only, which would pass for the new weights'.
            has_output = sequence is not None and self._batch.num_output_tokens(sequence) > 0
            keeps_kv = self._inflight_update == "inflight" and has_output
            sequence = self._scheduler.change_version(updated, keeps_kv=keeps_kv)
            if sequence is not None and not keeps_kv:
                self._kv_cache.discard_kv(sequence)
        self._update_batch()

    # Steps.

    def step(self) -> list[Completion]:
        """Schedule, prefill, decode one token per row, and return the completions of this step."""
        if self._is_paused:
            return []
        # At a pace, a step starts when the last one was due to end, as on a device.
        is_early = (now_s := time.perf_counter()) < self._step_ended_s + self._pace_s
        started_s = self._step_ended_s if is_early else now_s
        completions = self._complete(self._scheduler.ended_episodes())
        is_read_first, num_rows = self._must_read_first(), len(self._batch.active)
        if is_read_first:
            completions += self._complete(self._decode(lambda: False))
            self._update_batch()  # those that waited for that step join, and the scheduler grows their rows
        self._prefill(self._schedule())
        if is_read_first:
            if len(self._batch.active):
                self._runner.start_ahead(*self._batch.inputs(), self._batch.active_sampling)
        elif num_rows := len(self._batch.active):
            completions += self._complete(self._decode(self._can_decode_again))
        else:
            return completions
        self._step_ended_s = max(started_s + self._pace_s, time.perf_counter())
        if (remaining_s := self._step_ended_s - time.perf_counter()) > 0:
            time.sleep(remaining_s)
        self.num_steps += 1
        self.num_decoded += num_rows
        self.busy_row_s += num_rows * (self._step_ended_s - started_s)
        return completions

    def check(self) -> None:
        """Assert that rows, blocks, slots and host memory are conserved."""
        self._scheduler.check()
        self._migrator.check()
        assert self._kv_cache.num_swapped == len(self._scheduler.swapped), "host memory is leaked"
        slots = [
            *(loaded.slot for loaded in self._loaded.values()),
            *self._copied.values(),
            *self._free_slots,
        ]
        assert sorted(slots) == list(range(len(self._slot_weights_ids))), (
            f"slots used or free: {sorted(slots)}"
        )

    def _schedule(self) -> SchedulerOutput:
        """Let the scheduler reassign rows and blocks, and swap sequences; returns what to compute next."""
        missing = dict.fromkeys((self._decoding[i] for i in self._kv_cache.rows_to_grow()), 1)
        missing |= {sequence: num for sequence, _, num in self._observation_chunks() if num > 0}
        scheduled = self._scheduler.schedule(missing)
        for sequence in scheduled.swapped_out:
            self._swap_out(sequence)
        for sequence in scheduled.grown:
            self._kv_cache.update_block_table(sequence)
        for sequence, num_cached in scheduled.swapped_in:
            self._kv_cache.swap_in(sequence, num_cached)
        # First, for other prefills may share the prompt.
        scheduled.prefills[:0] = [self._recompute(*recomputed) for recomputed in scheduled.recomputed]
        for sequence, chunk, num_missing in [*self._observation_chunks()]:
            if num_missing <= 0:
                scheduled.prefills.append(self._append_observation(sequence, chunk))
        return scheduled

    def _swap_out(self, sequence: Sequence) -> None:
        request_id = sequence.request.id
        self._migrator.fail_export(request_id, "the request was swapped out: too few KV blocks are free")
        self.num_swapped += 1
        if request_id in self._scheduler.without_kv:
            self._kv_cache.discard_kv(sequence)
        else:
            self.swapped_bytes += self._kv_cache.swap_out(sequence)

    def _recompute(self, sequence: Sequence, num_cached: int) -> tuple[int, PrefillInput]:
        """What to compute of a sequence without KV, whose first `num_cached` blocks are there."""
        start, stop = num_cached * BLOCK_SIZE, self._batch.num_computed_tokens(sequence)
        self.num_recomputed += stop - start
        return self._chunk(sequence, start, stop)

    def _observation_chunks(self) -> Iterator[tuple[Sequence, list[int], int]]:
        """Observation tokens for the next step, first come, first served, and the blocks that they miss."""
        budget = self._prefill_budget
        for request_id, tokens in self._scheduler.between_turns.items():
            sequence = self._scheduler.running.get(request_id)
            if tokens and sequence is not None and (chunk := tokens[:budget]):
                budget -= len(chunk)
                # One more for the next decode input.
                num_tokens = self._batch.num_computed_tokens(sequence) + len(chunk) + 1
                yield sequence, chunk, num_blocks_for(num_tokens) - len(sequence.block_table)

    def _append_observation(self, sequence: Sequence, chunk: list[int]) -> tuple[int, PrefillInput]:
        """Append tokens to the output; returns what to prefill. The last token is a decode input."""
        request, start = sequence.request, self._batch.num_computed_tokens(sequence)
        weights_id = self._slot_weights_ids[self._loaded[request.version].slot]
        self._batch.append_observation(sequence, chunk, int(weights_id))
        self._scheduler.consume_observation(request.id, len(chunk))
        return self._chunk(sequence, start, start + len(chunk))

    def _chunk(self, sequence: Sequence, start: int, stop: int) -> tuple[int, PrefillInput]:
        """Tokens `start` to `stop` of a sequence's prompt and output, to prefill with its version."""
        output = self._batch.partial_output(sequence)
        tokens = (*sequence.request.prompt_ids, *output.token_ids.tolist())[:stop]
        return sequence.request.version, PrefillInput(tokens, start, sequence.block_table)

    def _prefill(self, scheduled: SchedulerOutput) -> None:
        """Compute the scheduled chunks, and add the sequences that start to decode to the batch."""
        by_version = sorted(scheduled.prefills, key=itemgetter(0))
        for version, chunks in groupby(by_version, key=itemgetter(0)):
            slot, inputs = self._loaded[version].slot, [chunk for _, chunk in chunks]
            self.num_prefilled += self._runner.prefill(slot, inputs)
        self._runner.copy_blocks(scheduled.copies)
        for sequence in scheduled.started:
            self._kv_cache.add(sequence)
        if scheduled.prefills or scheduled.started or scheduled.swapped_in or scheduled.swapped_out:
            self._update_batch()

    def _decode(self, can_continue: Callable[[], bool]) -> list[Sequence]:
        """Decode one token per row; returns the sequences whose output has ended."""
        sampled = self._runner.decode_and_sample(
            *self._batch.inputs(), self._batch.active_sampling, can_continue
        )
        ended = [self._decoding[i] for i in self._batch.append(sampled, self._active_weights_ids)]
        turns = [sequence for sequence in ended if sequence.request.sampling.max_turn_tokens]
        for sequence in turns:
            self._finish_turn(sequence)
        if turns:
            self._update_batch()
        return [sequence for sequence in ended if sequence not in turns]

    def _can_decode_again(self) -> bool:
        """Whether the next step decodes the same rows."""
        return self._kv_cache.can_decode_again() and not self._scheduler.can_schedule()

    def _must_read_first(self) -> bool:
        """Whether a step is in flight that must be read before the scheduler lets sequences join the batch.

        Otherwise the next step starts before that one is read, so that the device does not wait.
        """
        if not self._runner.has_step_in_flight:
            return False
        scheduler = self._scheduler
        can_join = len(scheduler.decode_order()) > len(self._decoding)
        return can_join or scheduler.can_schedule() or scheduler.has_arrivals

    def _finish_turn(self, sequence: Sequence) -> None:
        """Pause an episode, which keeps its row, until an observation arrives."""
        request = sequence.request
        num_left = request.sampling.max_tokens - self._batch.num_output_tokens(sequence)
        turn = self._batch.turn_token_ids(sequence.row).tolist()
        reason = self._batch.finish_reason(sequence)
        logprobs = self._batch.turn_logprobs(sequence.row)
        self._finished_turns.append(TurnFinished(request.id, turn, reason, num_left, logprobs))
        self._scheduler.between_turns[request.id] = None

    def _complete(self, done: list[Sequence]) -> list[Completion]:
        """Remove finished sequences, whose rows are then free; returns their completions."""
        if not done:
            return []
        completions = [self._batch.completion(sequence) for sequence in done]
        if self._returns_routes:
            routes = [
                self._runner.routes(s.block_table, self._batch.num_computed_tokens(s)).numpy() for s in done
            ]
            completions = [replace(c, routes=r) for c, r in zip(completions, routes, strict=True)]
        for sequence in done:
            self._scheduler.remove(sequence.request.id)
            self._migrator.fail_export(sequence.request.id, "the request finished before it was exported")
        self._update_batch()
        return completions

    def _update_batch(self) -> None:
        """Call this when the sequences that decode may have changed.

        While a step is in flight, sequences leave the batch, and others join once it is read.
        """
        decoding = self._scheduler.decode_order()
        if self._runner.has_step_in_flight:
            in_step = {*self._decoding}
            if staying := [sequence for sequence in decoding if sequence in in_step]:
                decoding = staying
            else:
                self._runner.discard_step()
        if decoding == self._decoding:
            return
        self._decoding = decoding
        self._batch.set_active([sequence.row for sequence in decoding])
        slots = np.array([self._loaded[sequence.request.version].slot for sequence in decoding], np.int64)
        # The ids are those of the slots that decode, not of the versions that the requests name.
        self._active_weights_ids = self._slot_weights_ids[slots]
        self._runner.set_batch(self._batch.active, slots)

    def _reason_to_reject(self, request: Request) -> str:
        """Why a request cannot run here, or an empty string."""
        if self.status_of(request.id) is not RequestStatus.ABSENT:
            return "the engine has this request already"
        if request.version not in self._loaded:
            return f"version {request.version} is not loaded; loaded: {sorted(self._loaded)}"
        can_detokenize = self._detokenize is not None
        if reason := reason_to_reject(
            request, self._config.vocab_size, self._max_context, can_detokenize=can_detokenize
        ):
            return reason
        if (num_required := self._scheduler.num_blocks_required(request)) > self._num_blocks:
            required = f"it may need {num_required} KV blocks and the engine has {self._num_blocks}"
            return f"{required}; raise num_blocks or lower max_tokens"
        return ""


def _shared_kv(kv_transfer: KVTransfer, kv: Tensor, pool: Path) -> EngineKV[Any]:
    """How other engines copy from `kv`; on the CPU it lies in the file `pool`, unless it is staged."""
    if kv_transfer == "staged":
        return StagedKV(kv, pool)
    if kv_transfer == "ipc":
        return DeviceKV(kv, pool)
    return SharedKV(view_as_blocks(kv.flatten().view(torch.uint8).numpy(), len(kv)))


def _check_context(max_context: int, config: ModelConfig) -> None:
    if not 2 <= max_context <= config.max_position_embeddings:
        raise EngineError(
            f"max_context = {max_context} must be from 2 to the model's "
            f"max_position_embeddings = {config.max_position_embeddings}"
        )


def _check_positive(**settings: int) -> None:
    for name, value in settings.items():
        if value < 1:
            raise EngineError(f"{name} = {value} must be at least 1")


def _allocator(pool: Path | None, dtype: str) -> KVAllocator | None:
    """Allocates the KV in the file `pool`, if there is one."""
    if pool is None:
        return None

    def allocate(shape: tuple[int, ...]) -> Tensor:
        kv_bytes = create_pool(pool, math.prod(shape) * DTYPES[dtype].itemsize)
        return torch.from_numpy(kv_bytes).view(DTYPES[dtype]).view(shape)

    return allocate


def reason_to_reject(request: Request, vocab_size: int, max_context: int, *, can_detokenize: bool) -> str:
    """Why a request could never run on an engine of these sizes, with the remedy, or an empty string."""
    prompt_ids, sampling = request.prompt_ids, request.sampling
    if not prompt_ids:
        return "its prompt is empty; give at least one token"
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        return f"its prompt has token ids outside 0..{vocab_size - 1}; use the model's own tokenizer"
    if request.max_length > max_context:
        return (
            f"prompt and max_tokens are {len(prompt_ids)} + {sampling.max_tokens} tokens, over max_context = "
            f"{max_context}; shorten the prompt, lower max_tokens or raise max_context"
        )
    if len(sampling.stop_ids) > MAX_STOP_IDS:
        return f"it has {len(sampling.stop_ids)} stop_ids; give at most {MAX_STOP_IDS}"
    if sampling.stop_strings and not can_detokenize:
        return "it has stop_strings, but the engine has no tokenizer; pass Engine(detokenize=...)"
    return ""
