"""The request scheduler: assigns decode rows and KV blocks, preempts requests, and chooses the rows that
decode.

Decoding rows come first: their blocks are allocated as the outputs grow. If no block is free, a sequence is
preempted: it is swapped out to host memory, and returns before any new request is admitted. Waiting requests
get the remaining rows and blocks, first come, first served.

A prompt is prefilled once per group and version, in chunks within a budget per step. Its KV is kept while
it has unfinished siblings and blocks last. Full prompt blocks are also found by hash, for other prompts of
the version with the same beginning and for siblings of a request that migrated here.

The scheduler touches no KV: `schedule` returns what the engine must do before the next decode step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import chain, count

from dora.core.types import RequestId
from dora.engine.block_manager import BLOCK_SIZE, BlockManager, block_hashes, num_blocks_for
from dora.engine.request import PrefillInput, PromptKey, Request, Sequence

_IDLE_BUDGETS = 8  # prefill budgets spent per step while no sequence runs
_GROWTH_BLOCKS = 4  # allocated at a time while many are free: neighbours are copied in one go


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = auto()  # for a row
    PREFILL = auto()  # it has a row; its prompt is being computed
    RUNNING = auto()
    MIGRATING_OUT = auto()  # it has a row and is paused; another engine may already own it
    MIGRATING_IN = auto()  # it has a row; another engine still owns it
    SWAPPED = auto()  # it was preempted; its KV is in host memory
    ABSENT = auto()  # unknown, finished, aborted or migrated away


@dataclass(slots=True)
class SchedulerOutput:
    """What the engine does before the next decode step, in this order."""

    swapped_out: list[Sequence] = field(default_factory=list)  # with the rows and blocks they had
    grown: list[Sequence] = field(default_factory=list)  # their block tables are longer
    swapped_in: list[tuple[Sequence, int]] = field(default_factory=list)  # and cached leading blocks
    recomputed: list[tuple[Sequence, int]] = field(default_factory=list)  # of these, those without KV
    prefills: list[tuple[int, PrefillInput]] = field(default_factory=list)  # with their versions
    copies: list[tuple[int, int]] = field(default_factory=list)  # of whole blocks, (from, to)
    started: list[Sequence] = field(default_factory=list)  # they decode from now on


@dataclass(slots=True)
class _SharedPrompt:
    """Prompt KV kept for siblings: `num_computed` tokens, counting scheduled chunks."""

    blocks: list[int]
    num_computed: int


class Scheduler:
    """The waiting queue, the decode rows and the shared prompts.

    A request is in exactly one of `waiting`, `prefilling`, `running`, `migrating_in` and `swapped`. At most
    one is `prefilling`, so no prompt builds on one that may never be completed.

    Every request finishes. The oldest running sequence is preempted only if no other can be, and the blocks
    that it needs are then held by a prefill or by migrations, both of which end. Preempted sequences
    return oldest first. A request fits the pool alone if `num_blocks_required` is at most its size.

    `migrating_out` are running requests that keep row and blocks but do not decode. `between_turns` are
    running or swapped episodes whose turn has ended. The value is None until an observation arrives, then its
    tokens that are not appended yet; no tokens end the episode. Episodes that await an observation are
    preempted first, and not swapped in.

    `without_kv` are swapped requests that have output but no KV, which is computed once they have a row: they
    continue an output of a lost engine, or a newer version. With in-flight updates of versions, `mixed_kv`
    are running requests on the KV of several versions.
    """

    def __init__(self, max_rows: int, num_blocks: int, prefill_budget: int = 512) -> None:
        self._max_rows = max_rows
        self._prefill_budget = prefill_budget
        self._blocks = BlockManager(num_blocks)
        self._hash_seeds: dict[int, str] = {}  # by version
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._seq_ids = count()
        self._prompts: dict[PromptKey, _SharedPrompt] = {}
        self._num_siblings: Counter[PromptKey] = Counter()  # unfinished requests by prompt
        self._prioritized: frozenset[RequestId] = frozenset()  # they decode alone while any is running
        self.waiting: dict[RequestId, Request] = {}
        self.prefilling: dict[RequestId, Sequence] = {}
        self.running: dict[RequestId, Sequence] = {}
        self.migrating_in: dict[RequestId, Sequence] = {}
        self.swapped: dict[RequestId, Sequence] = {}
        self.migrating_out: set[RequestId] = set()
        self.between_turns: dict[RequestId, list[int] | None] = {}
        self.mixed_kv: set[RequestId] = set()
        self.without_kv: set[RequestId] = set()

    # Requests and versions.

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting[request.id] = request
        self._num_siblings[request.prompt_key] += 1

    def add_without_kv(self, request: Request, num_blocks: int) -> None:
        """Queue a request that continues an output, whose `num_blocks` blocks of KV must be computed.

        It is scheduled like a swapped one: before requests without output.
        """
        table = [-1] * num_blocks  # only its length counts until the sequence has a row
        self.swapped[request.id] = Sequence(request, -1, table, next(self._seq_ids))
        self.without_kv.add(request.id)
        self._num_siblings[request.prompt_key] += 1

    def remove(self, request_id: RequestId) -> None:
        """Forget a finished, aborted or migrated request, and free its row and blocks."""
        request = self.waiting.pop(request_id, None)
        for sequences in (self.running, self.migrating_in, self.prefilling, self.swapped):
            if sequence := sequences.pop(request_id, None):
                request = sequence.request
                if sequences is not self.swapped:
                    self._free(sequence)
        assert request is not None, f"request {request_id} is unknown"
        for ids in (self.migrating_out, self.mixed_kv, self.without_kv):
            ids.discard(request_id)
        self.between_turns.pop(request_id, None)
        self._drop_sibling(request.prompt_key)

    def change_version(self, request: Request, *, keeps_kv: bool) -> Sequence | None:
        """Replace the request with the same id by `request`, which has a newer version.

        Returns its sequence if it has started. With `keeps_kv` the sequence keeps its row; otherwise it has
        none and is scheduled like a swapped one. A request without any token is queued again.
        """
        sequence = self.running.get(request.id) or self.swapped.get(request.id)
        if sequence is None:
            self.remove(request.id)
            self.add(request)
            return None
        old_key = sequence.request.prompt_key
        sequence.request = request
        self._num_siblings[request.prompt_key] += 1
        self._drop_sibling(old_key)
        if keeps_kv:
            self.mixed_kv.add(request.id)
        else:
            self._discard_kv(request.id)
            if request.id in self.running:
                self.swapped[request.id] = self.running.pop(request.id)
                self._free(sequence)
        return sequence

    def status_of(self, request_id: RequestId) -> RequestStatus:
        if request_id in self.running:
            is_leaving = request_id in self.migrating_out
            return RequestStatus.MIGRATING_OUT if is_leaving else RequestStatus.RUNNING
        places: dict[RequestStatus, Container[RequestId]] = {
            RequestStatus.WAITING: self.waiting,
            RequestStatus.PREFILL: self.prefilling,
            RequestStatus.MIGRATING_IN: self.migrating_in,
            RequestStatus.SWAPPED: self.swapped,
        }
        return next((status for status, ids in places.items() if request_id in ids), RequestStatus.ABSENT)

    def request(self, request_id: RequestId) -> Request | None:
        """An unfinished request that this engine owns."""
        for sequences in (self.running, self.prefilling, self.swapped):
            if request_id in sequences:
                return sequences[request_id].request
        return self.waiting.get(request_id)

    def requests(self) -> Iterator[Request]:
        """All unfinished requests, including those that are migrating in."""
        for sequences in (self.running, self.migrating_in, self.prefilling, self.swapped):
            yield from (sequence.request for sequence in sequences.values())
        yield from self.waiting.values()

    def add_version(self, version: int, seed: str) -> None:
        """Accept requests of `version`; `seed` begins the hashes of its blocks (see `hash_seed`)."""
        self._hash_seeds[version] = seed

    def drop_version(self, version: int) -> None:
        """Remove the prompts of a version without requests from the prefix cache."""
        self._blocks.unregister(self._hash_seeds.pop(version))

    @property
    def num_used_blocks(self) -> int:
        """Blocks of rows. Prompts that are kept for siblings make room once a row needs it."""
        in_rows = (*self.running.values(), *self.migrating_in.values(), *self.prefilling.values())
        return len({block for sequence in in_rows for block in sequence.block_table})

    def num_blocks_required(self, request: Request) -> int:
        """The maximum number of blocks of a request that is alone in the engine."""
        num_shared = request.num_prefill_tokens // BLOCK_SIZE
        return _max_blocks(request) - num_shared + num_blocks_for(request.num_prefill_tokens)

    # Scheduling.

    def can_schedule(self) -> bool:
        """Whether `schedule` would do anything beside growing block tables."""
        return (
            bool(self.prefilling)
            or self._can_swap_in()
            or self._can_admit()
            or self._must_preempt_between_turns()
        )

    @property
    def has_arrivals(self) -> bool:
        """Whether an observation, or the end of an episode, has arrived for a request with a row."""
        return any(tokens is not None and i in self.running for i, tokens in self.between_turns.items())

    def awaits_observation(self, request_id: RequestId) -> bool:
        """Whether a turn of the request has ended and no observation has arrived."""
        return self.between_turns.get(request_id, []) is None

    def set_observation(self, request_id: RequestId, tokens: list[int]) -> None:
        """Give a request the observation that it awaits; no tokens end the episode."""
        del self.between_turns[request_id]  # inserted again: observations are served in the order of arrival
        self.between_turns[request_id] = tokens

    def consume_observation(self, request_id: RequestId, num_tokens: int) -> None:
        """Remove tokens that have been appended; after the last one the request decodes again."""
        tokens = self.between_turns[request_id]
        assert tokens is not None
        del tokens[:num_tokens]
        if not tokens:
            del self.between_turns[request_id]

    def ended_episodes(self) -> list[Sequence]:
        """The running episodes that get no other turn."""
        ended = (request_id for request_id, tokens in self.between_turns.items() if tokens == [])
        return [self.running[request_id] for request_id in ended if request_id in self.running]

    def schedule(self, missing_blocks: Mapping[Sequence, int] | None = None) -> SchedulerOutput:
        """Grow rows by their `missing_blocks`, then swap in, then admit and prefill new requests."""
        out = SchedulerOutput()
        budget = self._prefill_budget * (1 if self.running else _IDLE_BUDGETS)
        by_priority = sorted((missing_blocks or {}).items(), key=lambda item: self._priority(item[0]))
        for sequence, num_blocks in by_priority:
            self._grow(sequence, num_blocks, out)
        if self._must_preempt_between_turns():
            self._swap_out(self._victim(), out)
        while not out.swapped_out and self._can_swap_in():
            self._swap_in(out)
        while self._can_admit() or (self.prefilling and budget):
            if self.prefilling:
                budget -= self._prefill(budget, out)
            else:
                self._admit(out)
        return out

    def decode_only(self, ids: Iterable[RequestId]) -> None:
        """Decode only these requests until none of them is running; then, and for no ids, all."""
        self._prioritized = frozenset(ids)

    def decode_order(self) -> list[Sequence]:
        """The sequences that decode, each version as one contiguous segment."""
        ready = self.running.keys() - self.migrating_out - self.between_turns.keys()
        sequences = (self.running[request_id] for request_id in (self._prioritized & ready) or ready)
        return sorted(sequences, key=lambda sequence: (sequence.request.version, sequence.row))

    # Migration to this engine.

    def reserve(self, request: Request) -> tuple[int, str] | None:
        """Reserve a row and a few blocks for a request that another engine decodes; None if none are free.

        Returns the number of leading prompt blocks that are cached here, and the hash of the last.
        """
        num_blocks = min(num_blocks_for(len(request.prompt_ids)) + 1, _max_blocks(request))
        if self._next_to_swap_in() or not self._has_room_for_sequence(request, num_blocks):
            return None
        blocks, num_cached = self._allocate_table(request, num_blocks)
        row, seq_id = self._free_rows.pop(), next(self._seq_ids)
        self.migrating_in[request.id] = Sequence(request, row, blocks, seq_id)
        self._num_siblings[request.prompt_key] += 1
        return num_cached, self.prompt_block_hashes(request)[num_cached - 1] if num_cached else ""

    def allocate_up_to(self, sequence: Sequence, num_blocks: int) -> bool:
        """Grow a sequence that is migrating in to `num_blocks` blocks; False if they are not free."""
        num_more = max(0, num_blocks - len(sequence.block_table))
        if not self._make_room(num_more, needed_by=()):
            return False
        sequence.block_table += self._blocks.allocate(num_more)
        return True

    def activate(self, request_id: RequestId) -> Sequence:
        """Make a request that has migrated in running; its KV is in its blocks."""
        sequence = self.running[request_id] = self.migrating_in.pop(request_id)
        self._register_prompt(sequence.request, sequence.block_table)
        return sequence

    def prompt_block_hashes(self, request: Request) -> tuple[str, ...]:
        """The hashes of the full blocks of a request's prompt."""
        seed = self._hash_seeds[request.version]
        return block_hashes(seed, request.prompt_ids[: request.num_prefill_tokens])

    def check(self) -> None:
        """Assert that rows and blocks are conserved and each shared prompt has a sibling.

        It follows that without requests every block is free or cached.
        """
        in_rows = [*self.running.values(), *self.migrating_in.values(), *self.prefilling.values()]
        rows = [sequence.row for sequence in in_rows] + self._free_rows
        assert sorted(rows) == list(range(self._max_rows)), f"rows in use or free: {sorted(rows)}"
        ids = Counter(request.id for request in self.requests())
        assert max(ids.values(), default=1) == 1, f"requests in two places: {ids}"
        siblings = Counter(request.prompt_key for request in self.requests())
        assert self._num_siblings == siblings, f"siblings miscounted: {self._num_siblings}"
        assert self._prompts.keys() <= siblings.keys(), "a prompt without siblings is kept"
        assert self.migrating_out <= self.running.keys(), f"not running: {self.migrating_out}"
        started = self.running.keys() | self.swapped.keys()
        assert self.between_turns.keys() <= started, f"not started: {self.between_turns}"
        assert self.mixed_kv <= self.running.keys(), f"not running: {self.mixed_kv}"
        assert self.without_kv <= self.swapped.keys(), f"not swapped: {self.without_kv}"
        assert len(self.prefilling) <= 1, f"more than one in prefill: {self.prefilling}"
        for sequence in self.prefilling.values():
            request, prompt = sequence.request, self._prompts[sequence.request.prompt_key]
            assert prompt.num_computed < request.num_prefill_tokens, f"nothing left to compute for {sequence}"
        shared = (prompt.blocks for prompt in self._prompts.values())
        self._blocks.check(chain((sequence.block_table for sequence in in_rows), shared))

    # Preemption and swapping.

    def _priority(self, sequence: Sequence) -> tuple[bool, int]:
        """Lower values are served first and preempted last."""
        return sequence.request.id not in self._prioritized, sequence.seq_id

    def _awaits_observation(self, sequence: Sequence) -> bool:
        return self.awaits_observation(sequence.request.id)

    def _grow(self, sequence: Sequence, num_blocks: int, out: SchedulerOutput) -> None:
        """Give a row at least `num_blocks` more blocks, unless it is or must be preempted itself."""
        request_id = sequence.request.id
        while request_id in self.running and not self._make_room(num_blocks, needed_by=()):
            self._swap_out(self._victim(), out)
        if request_id in self.running:
            num_blocks = max(num_blocks, self._growth(sequence.request, len(sequence.block_table)))
            sequence.block_table += self._blocks.allocate(num_blocks)
            out.grown.append(sequence)

    def _victim(self) -> Sequence:
        """The sequence to preempt: the youngest of the version with most rows, which loses least by it.

        Among versions with equally many rows: the newest, whose deadline is farthest. Sequences that await
        an observation go first, then those that `decode_only` pauses. The oldest goes last, so it finishes.
        """
        candidates = [s for request_id, s in self.running.items() if request_id not in self.migrating_out]
        num_rows = Counter(sequence.request.version for sequence in candidates)
        oldest = min(candidates, key=lambda s: (self._awaits_observation(s), self._priority(s)))

        def order(sequence: Sequence) -> tuple[bool, bool, bool, int, int, int]:
            version = sequence.request.version
            return (
                self._awaits_observation(sequence),
                sequence is not oldest,
                sequence.request.id not in self._prioritized,
                num_rows[version],
                version,
                sequence.seq_id,
            )

        return max(candidates, key=order)

    def _swap_out(self, sequence: Sequence, out: SchedulerOutput) -> None:
        request_id = sequence.request.id
        self.swapped[request_id] = self.running.pop(request_id)
        self._free(sequence)
        if request_id in self.mixed_kv:  # back in a row, its prompt would be cached for the newest version
            self._discard_kv(request_id)
        out.swapped_out.append(sequence)

    def _discard_kv(self, request_id: RequestId) -> None:
        self.mixed_kv.discard(request_id)
        self.without_kv.add(request_id)

    def _must_preempt_between_turns(self) -> bool:
        """Whether another request needs the row or blocks of one that awaits an observation."""
        awaiting = (request_id for request_id, tokens in self.between_turns.items() if tokens is None)
        if self.running.keys().isdisjoint(awaiting) or self._can_swap_in() or self._can_admit():
            return False
        return self._next_to_swap_in() is not None or bool(self.waiting and not self.prefilling)

    def _next_to_swap_in(self) -> Sequence | None:
        ready = (sequence for sequence in self.swapped.values() if not self._awaits_observation(sequence))
        return min(ready, key=self._priority, default=None)

    def _can_swap_in(self) -> bool:
        sequence = self._next_to_swap_in()
        return sequence is not None and self._has_room_for_sequence(
            sequence.request, _num_blocks_to_swap_in(sequence)
        )

    def _swap_in(self, out: SchedulerOutput) -> None:
        swapped = self._next_to_swap_in()
        assert swapped is not None
        del self.swapped[swapped.request.id]
        blocks, num_cached = self._allocate_table(swapped.request, _num_blocks_to_swap_in(swapped))
        sequence = replace(swapped, row=self._free_rows.pop(), block_table=blocks)
        self._register_prompt(sequence.request, sequence.block_table)
        self.running[sequence.request.id] = sequence
        out.swapped_in.append((sequence, num_cached))
        if sequence.request.id in self.without_kv:
            self.without_kv.remove(sequence.request.id)
            out.recomputed.append((sequence, num_cached))

    # Admission and prefill.

    def _can_admit(self) -> bool:
        """Whether there is a row for the first waiting request, and blocks for its prompt and one token."""
        if self.prefilling or self._next_to_swap_in() or not (self.waiting and self._free_rows):
            return False
        request = next(iter(self.waiting.values()))
        if request.prompt_key in self._prompts:
            cached, num_new = [], 1
        else:
            cached = self._cached_blocks(request)
            num_new = num_blocks_for(request.num_prefill_tokens) - len(cached) + 1
        needed_by = [request, *(sequence.request for sequence in self.running.values())]
        return self._make_room(num_new + self._growth_reserve(), needed_by, cached)

    def _admit(self, out: SchedulerOutput) -> None:
        """Give the first waiting request a row; it runs at once if its prompt is computed."""
        request = self.waiting.pop(next(iter(self.waiting)))
        sequence = Sequence(request, self._free_rows.pop(), [], next(self._seq_ids))
        prompt = self._prompts.get(request.prompt_key) or self._start_prompt(request)
        sequence.block_table += prompt.blocks[: request.num_prefill_tokens // BLOCK_SIZE]
        self._blocks.share(sequence.block_table)
        sequence.block_table += self._blocks.allocate(self._growth(request, len(sequence.block_table)))
        self.prefilling[request.id] = sequence
        if prompt.num_computed == request.num_prefill_tokens:
            self._start_decoding(out)

    def _start_prompt(self, request: Request) -> _SharedPrompt:
        blocks, num_cached = self._allocate_table(request, num_blocks_for(request.num_prefill_tokens))
        prompt = self._prompts[request.prompt_key] = _SharedPrompt(blocks, num_cached * BLOCK_SIZE)
        return prompt

    def _prefill(self, budget: int, out: SchedulerOutput) -> int:
        """Schedule the next chunk of the prompt in prefill; returns its number of tokens."""
        (sequence,) = self.prefilling.values()
        request, prompt = sequence.request, self._prompts[sequence.request.prompt_key]
        start, stop = prompt.num_computed, min(prompt.num_computed + budget, request.num_prefill_tokens)
        blocks = prompt.blocks[: num_blocks_for(stop)]
        out.prefills.append((request.version, PrefillInput(request.prompt_ids[:stop], start, blocks)))
        prompt.num_computed = stop
        if stop == request.num_prefill_tokens:
            self._register_prompt(request, prompt.blocks)
            self._start_decoding(out)
        return stop - start

    def _start_decoding(self, out: SchedulerOutput) -> None:
        """Move the sequence in prefill to running, with a copy of the prompt's partial block."""
        request_id, sequence = self.prefilling.popitem()
        num_full, remainder = divmod(sequence.request.num_prefill_tokens, BLOCK_SIZE)
        if remainder:
            source = self._prompts[sequence.request.prompt_key].blocks[num_full]
            out.copies.append((source, sequence.block_table[num_full]))
        self.running[request_id] = sequence
        out.started.append(sequence)

    # Blocks.

    def _register_prompt(self, request: Request, blocks: list[int]) -> None:
        """Add the full prompt blocks of a request to the prefix cache."""
        hashes = self.prompt_block_hashes(request)
        self._blocks.register(blocks[: len(hashes)], hashes)

    def _cached_blocks(self, request: Request) -> list[int]:
        """The leading prompt blocks of a request that are in the prefix cache."""
        return self._blocks.lookup(self.prompt_block_hashes(request))

    def _has_room_for_sequence(self, request: Request, num_blocks: int) -> bool:
        """Whether a row and `num_blocks` blocks are free for a request whose KV is copied here."""
        if not self._free_rows:
            return False
        cached = self._cached_blocks(request)
        return self._make_room(num_blocks - len(cached) + self._growth_reserve(), (), cached)

    def _allocate_table(self, request: Request, num_blocks: int) -> tuple[list[int], int]:
        """A block table for a request, and how many of its leading blocks hold the prompt already."""
        cached = self._cached_blocks(request)
        self._blocks.share(cached)
        return cached + self._blocks.allocate(num_blocks - len(cached)), len(cached)

    def _make_room(self, num_new: int, needed_by: Iterable[Request], shared: Iterable[int] = ()) -> bool:
        """Whether `num_new` blocks can be allocated beside those `shared`.

        If too few are free, releases shared prompts that are kept for siblings to come, except those of
        `needed_by` and the one in prefill.
        """
        if num_new > self._blocks.num_free_after_sharing(shared):
            in_prefill = (sequence.request for sequence in self.prefilling.values())
            needed = {request.prompt_key for request in (*needed_by, *in_prefill)}
            for key in self._prompts.keys() - needed:
                self._release_prompt(key)
        return num_new <= self._blocks.num_free_after_sharing(shared)

    def _growth_reserve(self) -> int:
        """Blocks that newcomers must leave free, one per row that may grow: else a row is soon preempted."""
        in_rows = chain(self.running.values(), self.migrating_in.values(), self.prefilling.values())
        return sum(len(sequence.block_table) < _max_blocks(sequence.request) for sequence in in_rows)

    def _growth(self, request: Request, num_blocks: int) -> int:
        """How many blocks to allocate for a row that has `num_blocks` and needs another."""
        has_many = self._blocks.num_free > _GROWTH_BLOCKS * self._max_rows
        return min(_GROWTH_BLOCKS if has_many else 1, _max_blocks(request) - num_blocks)

    def _drop_sibling(self, key: PromptKey) -> None:
        self._num_siblings[key] -= 1
        if self._num_siblings[key] == 0:
            del self._num_siblings[key]
            self._release_prompt(key)

    def _release_prompt(self, key: PromptKey) -> None:
        if key in self._prompts:
            self._blocks.release(self._prompts.pop(key).blocks)

    def _free(self, sequence: Sequence) -> None:
        self._free_rows.append(sequence.row)
        self._blocks.release(sequence.block_table)


def _max_blocks(request: Request) -> int:
    """Blocks of the prompt and the longest output, whose last token is never an input."""
    return num_blocks_for(request.max_length - 1)


def _num_blocks_to_swap_in(sequence: Sequence) -> int:
    """The blocks that a swapped sequence had, and one for its next token."""
    return min(len(sequence.block_table) + 1, _max_blocks(sequence.request))
