"""The rollout engine's only door: hold versions, take requests, step, hand back answers.

It belongs to one thread and waits for nobody; whoever owns it calls `step` while not `idle`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dora.core.records import RequestId
from dora.engine.blocks import num_blocks_for
from dora.engine.rows import MAX_STOP_IDS, Int64s, Rows
from dora.engine.runner import Runner
from dora.engine.sampler import sample
from dora.engine.scheduler import Admission, Scheduler
from dora.engine.sequence import Completion, EngineError, Request
from dora.engine.workspace import Workspace
from dora.model.config import ModelConfig
from dora.model.weights import weight_digest


@dataclass(frozen=True)
class _Loaded:
    """A version in a slot; `stamp` numbers the load, so that tokens can name the bytes they came from."""

    slot: int
    stamp: int
    digest: str


class Engine:
    """Decodes up to `max_rows` requests at once, of up to `version_slots` versions.

    `max_context` bounds prompt and answer, in tokens. `num_blocks` of KV default to what all
    rows at full context need. `pace_s` pads every decode step to that wall time, to stand in
    for an accelerator's flat step time.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_rows: int,
        max_context: int,
        version_slots: int,
        num_blocks: int | None = None,
        kernels: str = "auto",
        pace_s: float = 0.0,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("version_slots", version_slots)):
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
        self._workspace = Workspace(config, max_rows, max_context, version_slots, num_blocks)
        self._runner = Runner(self._workspace, kernels)
        self._scheduler = Scheduler(max_rows, num_blocks)
        self._rows = Rows(max_rows, max_context)
        self._held: dict[int, _Loaded] = {}
        self._free_slots = list(range(version_slots - 1, -1, -1))
        self._slot_stamps = np.full(version_slots, -1, np.int64)
        self._loads: list[tuple[int, str]] = []  # version and digest by stamp
        self.busy_row_s = 0.0  # occupied rows times wall time, summed over steps
        self.num_prefilled = 0  # prompt tokens computed so far

    @property
    def versions(self) -> dict[int, str]:
        """Versions held and the digests of their bytes."""
        return {version: loaded.digest for version, loaded in self._held.items()}

    @property
    def kernels(self) -> str:
        """Which kernels run: "numba" or "eager"."""
        return self._runner.kernels_name

    @property
    def num_rows(self) -> int:
        """Rows occupied."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def idle(self) -> bool:
        return not self._scheduler.running and not self._scheduler.waiting

    def load(self, version: int, source: Tensor) -> str:
        """Copy a flat fp32 buffer [numel] into a free slot.

        Returns the digest of the bytes in the slot. Raises EngineError if the version is held
        already, no slot is free or the buffer has another size or dtype.
        """
        if version in self._held:
            raise EngineError(f"version {version} is held already; drop it before loading it again")
        if not self._free_slots:
            raise EngineError(
                f"no free slot for version {version}: {sorted(self._held)} are held; "
                "drop one or raise version_slots"
            )
        numel = self._workspace.layout.numel
        if source.shape != (numel,) or source.dtype != torch.float32:
            raise EngineError(
                f"version {version}: weights are {source.dtype} {list(source.shape)}, not float32 [{numel}]"
            )
        slot = self._free_slots.pop()
        buffer = self._workspace.slot(slot)
        buffer.copy_(source)
        loaded = _Loaded(slot, len(self._loads), weight_digest(buffer))
        self._held[version] = loaded
        self._loads.append((version, loaded.digest))
        self._slot_stamps[slot] = loaded.stamp
        return loaded.digest

    def drop(self, version: int) -> None:
        """Free the slot of a version. Raises EngineError if it is unknown or has unfinished requests."""
        if version not in self._held:
            raise EngineError(f"version {version} is not held; held: {sorted(self._held)}")
        num_users = sum(request.version == version for request in self._scheduler.requests())
        if num_users:
            raise EngineError(f"version {version} has {num_users} unfinished requests; finish or abort them")
        self._free_slots.append(self._held.pop(version).slot)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises EngineError naming those that cannot run; all others are queued."""
        refused: dict[RequestId, str] = {}
        for request in requests:
            reason = self._reason_to_refuse(request)
            if reason:
                refused[request.id] = reason
            else:
                self._scheduler.submit(request)
        if refused:
            reasons = "; ".join(f"request {request_id}: {reason}" for request_id, reason in refused.items())
            raise EngineError(f"{len(refused)} of {len(requests)} requests refused: {reasons}", refused)

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        """Give up requests; returns the tokens thrown away for each. Ids that are not here are ignored."""
        progress = self.progress()
        thrown_away = {request_id: progress[request_id] for request_id in ids if request_id in progress}
        for request_id in thrown_away:
            self._scheduler.remove(request_id)
        if thrown_away:
            self._arrange()
        return thrown_away

    def progress(self) -> dict[RequestId, int]:
        """Tokens so far of every unfinished request."""
        running = {i: self._rows.num_tokens(sequence) for i, sequence in self._scheduler.running.items()}
        return running | dict.fromkeys(self._scheduler.waiting, 0)

    def step(self) -> list[Completion]:
        """Schedule, prefill, decode, collect; returns the answers that this step finished."""
        started_s = time.perf_counter()
        self._prefill(self._scheduler.admit())
        if not self.num_rows:
            return []
        num_rows, completions = self.num_rows, self._collect(self._decode())
        rest_s = started_s + self._pace_s - time.perf_counter()
        if rest_s > 0:
            time.sleep(rest_s)
        self.busy_row_s += num_rows * (time.perf_counter() - started_s)
        return completions

    def check(self) -> None:
        """Assert that rows, blocks and slots are conserved."""
        self._scheduler.check()
        slots = [loaded.slot for loaded in self._held.values()] + self._free_slots
        assert sorted(slots) == list(range(len(self._slot_stamps))), f"slots held or free: {sorted(slots)}"

    def _prefill(self, admission: Admission) -> None:
        """Compute new prompts, fork them to their siblings and seat these."""
        if not admission.sequences:
            return
        by_version = sorted(admission.prefills, key=lambda prefill: prefill.key.version)
        for version, prefills in groupby(by_version, key=lambda prefill: prefill.key.version):
            prompts = [(p.key.prompt_ids[:-1], p.blocks) for p in prefills if p.blocks]
            self._runner.prefill(self._held[version].slot, prompts)
            self.num_prefilled += sum(len(ids) for ids, _ in prompts)
        self._runner.copy_blocks(admission.copies)
        for sequence in admission.sequences:
            self._rows.seat(sequence)
            self._workspace.tables[sequence.row, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
        self._arrange()

    def _decode(self) -> Int64s:
        """One token for every row; returns which rows (by order) have finished."""
        rows = self._rows
        tokens, positions = rows.inputs()
        logits = self._runner.decode(tokens, positions)
        drawn, logprobs = sample(logits.numpy(), rows.active_seeds, positions + 1, rows.active_temperatures)
        # The stamp is that of the slot whose weights were used, not the one the request asked for.
        stamps = self._slot_stamps[self._runner.batch.slots]
        return rows.append(drawn, logprobs, stamps)

    def _collect(self, finished: Int64s) -> list[Completion]:
        if not finished.size:
            return []
        done = [self._order[i] for i in finished]
        completions = [self._rows.completion(sequence, self._loads) for sequence in done]
        for sequence in done:
            self._scheduler.remove(sequence.request.id)
        self._arrange()
        return completions

    def _arrange(self) -> None:
        """The set of running rows has changed: put them in order again."""
        self._order = self._scheduler.rows_by_version()
        self._rows.arrange([sequence.row for sequence in self._order])
        slots = [self._held[sequence.request.version].slot for sequence in self._order]
        self._runner.arrange(self._rows.active, np.array(slots, np.int64))

    def _reason_to_refuse(self, request: Request) -> str:
        """Why a request cannot run here, or an empty string."""
        length, num_stop_ids = request.max_length, len(request.sampling.stop_ids)
        if request.id in self._scheduler:
            return "it is here already"
        if request.version not in self._held:
            return f"version {request.version} is not held; held: {sorted(self._held)}"
        if not request.prompt_ids:
            return "its prompt is empty"
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._config.vocab_size:
            return f"its prompt has token ids outside 0..{self._config.vocab_size - 1}"
        if length > self._max_context:
            return f"prompt and max_tokens are {length} tokens, over max_context = {self._max_context}"
        if num_stop_ids > MAX_STOP_IDS:
            return f"it has {num_stop_ids} stop_ids; at most {MAX_STOP_IDS} are possible"
        if not self._scheduler.can_hold(request):
            return "it needs more KV blocks than the engine has; raise num_blocks"
        return ""
