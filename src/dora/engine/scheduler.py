"""Which request has a row and blocks, which one gives them up for others, and which rows decode.

Rows that decode come first: their blocks are allocated as answers grow. Where none is free, a
request is swapped out to host memory, and comes back before any new one. What is left goes to
waiting requests, first come, first served. A prompt is computed once per group and version, a
bounded number of tokens per step, and its KV kept while a sibling lives and blocks last. Full
blocks of a prompt that other prompts of the version begin with, or that came with a sibling
from elsewhere, are found by name and not computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count

from dora.core.records import RequestId
from dora.engine.blocks import BLOCK_SIZE, BlockManager, chain_hashes, num_blocks_for
from dora.engine.plan import Plan, Prefill, State
from dora.engine.sequence import PromptKey, Request, Sequence

_IDLE_BUDGETS = 8  # prefill budgets in a step before which nothing decodes
_RUN = 4  # blocks a row gets at a time while many are free: neighbours are moved in one go


@dataclass(slots=True)
class _Prompt:
    """KV kept for siblings: `num_computed` tokens are there, or will be when the plan is carried out."""

    blocks: list[int]
    num_computed: int


class Scheduler:
    """The queue, the decode rows and the prompts held. Each request is in one of five places.

    Every request ends: of the rows that decode, the oldest gives up its blocks only where no other
    has any left to give, and those it lacks are held by a prompt being computed or by moves, which
    end by themselves; what was swapped out comes back oldest first; and `num_needed` says whether the
    pool is enough for each alone.

    At most one is `prefilling`, so that no prompt is built on one that might not be completed.
    Those `arriving` have a row and blocks, but still belong to another engine. Those `swapped`
    keep the record of what they had.

    Those `still` do not decode, for their turn is over. Until it is answered they give way to whoever lacks
    a place, and do not come back.
    """

    def __init__(self, max_rows: int, num_blocks: int, prefill_budget: int = 512) -> None:
        self._max_rows = max_rows
        self._num_blocks = num_blocks
        self._prefill_budget = prefill_budget
        self._blocks = BlockManager(num_blocks)
        self._seeds: dict[int, str] = {}  # what names of blocks begin with, by version
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._numbers = count()
        self._prompts: dict[PromptKey, _Prompt] = {}
        self._siblings: Counter[PromptKey] = Counter()  # unfinished requests by prompt
        self._rushed: frozenset[RequestId] = frozenset()  # they decode alone, as long as one is running
        self.frozen: set[RequestId] = set()  # they keep row and blocks, but do not decode
        self.still: dict[RequestId, bool] = {}  # running or swapped; whether their turn has been answered
        self.waiting: dict[RequestId, Request] = {}
        self.prefilling: dict[RequestId, Sequence] = {}
        self.running: dict[RequestId, Sequence] = {}
        self.arriving: dict[RequestId, Sequence] = {}
        self.swapped: dict[RequestId, Sequence] = {}

    def state_of(self, request_id: RequestId) -> State:
        if request_id in self.running:
            return State.MIGRATING_OUT if request_id in self.frozen else State.RUNNING
        places: dict[State, Container[RequestId]] = {
            State.WAITING: self.waiting,
            State.PREFILL: self.prefilling,
            State.MIGRATING_IN: self.arriving,
            State.SWAPPED: self.swapped,
        }
        return next((state for state, place in places.items() if request_id in place), State.DONE)

    def request(self, request_id: RequestId) -> Request | None:
        """An unfinished request that belongs to this engine."""
        for place in (self.running, self.prefilling, self.swapped):
            if request_id in place:
                return place[request_id].request
        return self.waiting.get(request_id)

    def requests(self) -> Iterator[Request]:
        """All unfinished requests, those arriving included."""
        for place in (self.running, self.arriving, self.prefilling, self.swapped):
            yield from (sequence.request for sequence in place.values())
        yield from self.waiting.values()

    def add_version(self, version: int, seed: str) -> None:
        """Requests of `version` may come; `seed` begins the names of its blocks (see `kv_seed`)."""
        self._seeds[version] = seed

    def drop_version(self, version: int) -> None:
        """No request of `version` is left, and its prompts are of no use any more."""
        self._blocks.forget(self._seeds.pop(version))

    def num_needed(self, request: Request) -> int:
        """Most blocks that this request takes where it is alone."""
        num_own = num_blocks_for(request.max_length - 1) - request.num_prompt_kv // BLOCK_SIZE
        return num_own + num_blocks_for(request.num_prompt_kv)

    def submit(self, request: Request) -> None:
        self.waiting[request.id] = request
        self._siblings[request.prompt_key] += 1

    def can_schedule(self) -> bool:
        """Whether `schedule` would do anything for requests that do not decode yet."""
        return bool(self.prefilling) or self._can_return() or self._can_seat() or self._must_make_way()

    def schedule(self, lacking: Mapping[Sequence, int] | None = None) -> Plan:
        """Blocks for rows that lack so many; then back with what was swapped out; then new requests."""
        plan = Plan()
        budget = self._prefill_budget * (1 if self.running else _IDLE_BUDGETS)
        for sequence, num_blocks in sorted((lacking or {}).items(), key=lambda item: self._rank(item[0])):
            self._grow(sequence, num_blocks, plan)
        if self._must_make_way():
            self._swap_out(self._victim(), plan)
        while not plan.swapped_out and self._can_return():
            self._swap_in(plan)
        while self._can_seat() or (self.prefilling and budget):
            if self.prefilling:
                budget -= self._compute(budget, plan)
            else:
                self._seat(plan)
        return plan

    def reserve(self, request: Request) -> tuple[int, str] | None:
        """Give a row and a few blocks to a request that another engine decodes; None where they are lacking.

        Returns how many leading blocks of its prompt are here already, and the name of the last.
        """
        num_blocks = min(num_blocks_for(len(request.prompt_ids)) + 1, _most_blocks(request))
        if self._first_back() or not self._has_place(request, num_blocks):
            return None
        blocks, num_known = self._table(request, num_blocks)
        self.arriving[request.id] = Sequence(request, self._free_rows.pop(), blocks, next(self._numbers))
        self._siblings[request.prompt_key] += 1
        return num_known, self.prompt_hashes(request)[num_known - 1] if num_known else ""

    def extend(self, sequence: Sequence, num_blocks: int) -> bool:
        """See that an arriving request has `num_blocks` blocks; False where they are lacking."""
        num_more = max(0, num_blocks - len(sequence.blocks))
        if not self._has_room(num_more, needed_by=()):
            return False
        sequence.blocks += self._blocks.allocate(num_more)
        return True

    def settle(self, request_id: RequestId) -> Sequence:
        """An arriving request belongs to this engine now, and its blocks hold what they should."""
        sequence = self.running[request_id] = self.arriving.pop(request_id)
        self._name(sequence.request, sequence.blocks)
        return sequence

    def prompt_hashes(self, request: Request) -> tuple[str, ...]:
        """The names of the full blocks of a request's prompt."""
        return chain_hashes(self._seeds[request.version], request.prompt_ids[: request.num_prompt_kv])

    def rush(self, ids: Iterable[RequestId]) -> None:
        """Only these requests decode from now on; once none of them is running, all do."""
        self._rushed = frozenset(ids)

    def rows_by_version(self, resting: Container[int] = ()) -> list[Sequence]:
        """Sequences that decode, such that each version is one contiguous segment.

        Versions `resting` are left out, unless they are rushed or there are no others.
        """
        decoding = self.running.keys() - self.frozen - self.still.keys()
        rushed = self._rushed & decoding
        sequences = [self.running[request_id] for request_id in rushed or decoding]
        if not rushed:
            sequences = [s for s in sequences if s.request.version not in resting] or sequences
        return sorted(sequences, key=lambda sequence: (sequence.request.version, sequence.row))

    def remove(self, request_id: RequestId) -> None:
        """Forget a request that is finished, aborted or elsewhere; its row and blocks are free again."""
        request = self.waiting.pop(request_id, None)
        for place in (self.running, self.arriving, self.prefilling, self.swapped):
            if sequence := place.pop(request_id, None):
                request = sequence.request
                if place is not self.swapped:
                    self._vacate(sequence)
        assert request is not None, f"{request_id} is not here"
        self.frozen.discard(request_id)
        self.still.pop(request_id, None)
        key = request.prompt_key
        self._siblings[key] -= 1
        if self._siblings[key] == 0:
            del self._siblings[key]
            self._let_go(key)

    def check(self) -> None:
        """Rows and blocks are conserved, and every prompt held has a living sibling.

        So where no request is left, every block is free or cached.
        """
        seated = [*self.running.values(), *self.arriving.values(), *self.prefilling.values()]
        rows = [sequence.row for sequence in seated] + self._free_rows
        assert sorted(rows) == list(range(self._max_rows)), f"rows in use or free: {sorted(rows)}"
        ids = Counter(request.id for request in self.requests())
        assert max(ids.values(), default=1) == 1, f"requests in two places: {ids}"
        assert self._siblings == Counter(r.prompt_key for r in self.requests()), "siblings miscounted"
        assert self._prompts.keys() <= self._siblings.keys(), "a prompt without siblings is held"
        assert self.frozen <= self.running.keys(), f"frozen, but not here: {self.frozen}"
        assert self.still.keys() <= self.running.keys() | self.swapped.keys(), f"still: {self.still}"
        assert len(self.prefilling) <= 1, f"more than one in prefill: {self.prefilling}"
        for sequence in self.prefilling.values():
            prompt, num_tokens = self._prompts[sequence.request.prompt_key], sequence.request.num_prompt_kv
            assert prompt.num_computed < num_tokens, f"nothing left to compute for {sequence}"
        self._blocks.check(chain((s.blocks for s in seated), (p.blocks for p in self._prompts.values())))

    def _rank(self, sequence: Sequence) -> tuple[bool, int]:
        """The less, the sooner a request is served and the later it gives up its row."""
        return sequence.request.id not in self._rushed, sequence.number

    def _grow(self, sequence: Sequence, num_blocks: int, plan: Plan) -> None:
        """At least so many more blocks for a row, unless it has been or must be swapped out itself."""
        request_id = sequence.request.id
        while request_id in self.running and not self._has_room(num_blocks, needed_by=()):
            self._swap_out(self._victim(), plan)
        if request_id in self.running:
            num_blocks = max(num_blocks, self._num_to_give(sequence.request, len(sequence.blocks)))
            sequence.blocks += self._blocks.allocate(num_blocks)
            plan.grown.append(sequence)

    def _victim(self) -> Sequence:
        """The youngest of the version with most rows, for that version's answers lose the least by it.

        Of equally many it is the newest version, whose deadline is the farthest. Rows that stand still
        for a rush go first, and before them those at rest. The oldest of the others goes last, so that one
        always gets to its end.
        """
        rows = [sequence for key, sequence in self.running.items() if key not in self.frozen]
        num_rows = Counter(sequence.request.version for sequence in rows)
        oldest = min(rows, key=lambda sequence: (self._rests(sequence), self._rank(sequence)))

        def cheapness(sequence: Sequence) -> tuple[bool, bool, bool, int, int, int]:
            request, rests = sequence.request, self._rests(sequence)
            is_rushed = request.id in self._rushed
            version = request.version
            return rests, sequence is not oldest, not is_rushed, num_rows[version], version, sequence.number

        return max(rows, key=cheapness)

    def _swap_out(self, sequence: Sequence, plan: Plan) -> None:
        self.swapped[sequence.request.id] = self.running.pop(sequence.request.id)
        self._vacate(sequence)
        plan.swapped_out.append(sequence)

    def _rests(self, sequence: Sequence) -> bool:
        """Whether a request waits for an answer to its turn."""
        return self.still.get(sequence.request.id) is False

    def _first_back(self) -> Sequence | None:
        """Who of those swapped out is the first to come back."""
        back = (sequence for sequence in self.swapped.values() if not self._rests(sequence))
        return min(back, key=self._rank, default=None)

    def _can_return(self) -> bool:
        first = self._first_back()
        return first is not None and self._has_place(first.request, _num_to_return(first))

    def _must_make_way(self) -> bool:
        """Whether somebody finds no place, and there is a row at rest."""
        at_rest = (request_id for request_id, is_answered in self.still.items() if not is_answered)
        if self.running.keys().isdisjoint(at_rest) or self._can_return() or self._can_seat():
            return False
        return self._first_back() is not None or bool(self.waiting and not self.prefilling)

    def _swap_in(self, plan: Plan) -> None:
        before = self._first_back()
        assert before is not None
        del self.swapped[before.request.id]
        blocks, num_known = self._table(before.request, _num_to_return(before))
        sequence = replace(before, row=self._free_rows.pop(), blocks=blocks)
        self._name(sequence.request, sequence.blocks)
        self.running[sequence.request.id] = sequence
        plan.swapped_in.append((sequence, num_known))

    def _can_seat(self) -> bool:
        """Whether there is a row for the first in the queue, and blocks for its prompt and one token."""
        if self.prefilling or self._first_back() or not (self.waiting and self._free_rows):
            return False
        request = next(iter(self.waiting.values()))
        if request.prompt_key in self._prompts:
            known, num_new = [], 1
        else:
            known = self._known_blocks(request)
            num_new = num_blocks_for(request.num_prompt_kv) - len(known) + 1
        needed_by = [request, *(sequence.request for sequence in self.running.values())]
        return self._has_room(num_new + self._num_growing(), needed_by, known)

    def _seat(self, plan: Plan) -> None:
        """The first in the queue gets a row, and decodes at once if its prompt is here."""
        request = self.waiting.pop(next(iter(self.waiting)))
        sequence = Sequence(request, self._free_rows.pop(), [], next(self._numbers))
        prompt = self._prompts.get(request.prompt_key) or self._begin_prompt(request)
        sequence.blocks += prompt.blocks[: request.num_prompt_kv // BLOCK_SIZE]
        self._blocks.share(sequence.blocks)
        sequence.blocks += self._blocks.allocate(self._num_to_give(request, len(sequence.blocks)))
        self.prefilling[request.id] = sequence
        if prompt.num_computed == request.num_prompt_kv:
            self._start(plan)

    def _begin_prompt(self, request: Request) -> _Prompt:
        blocks, num_known = self._table(request, num_blocks_for(request.num_prompt_kv))
        prompt = self._prompts[request.prompt_key] = _Prompt(blocks, num_known * BLOCK_SIZE)
        return prompt

    def _compute(self, budget: int, plan: Plan) -> int:
        """As much of the prompt begun as the budget allows; the number of tokens."""
        (sequence,) = self.prefilling.values()
        request, prompt = sequence.request, self._prompts[sequence.request.prompt_key]
        start, stop = prompt.num_computed, min(prompt.num_computed + budget, request.num_prompt_kv)
        blocks = prompt.blocks[: num_blocks_for(stop)]
        plan.prefills.append(Prefill(request.prompt_key, blocks, start, stop))
        prompt.num_computed = stop
        if stop == request.num_prompt_kv:
            self._name(request, prompt.blocks)
            self._start(plan)
        return stop - start

    def _start(self, plan: Plan) -> None:
        """The request in prefill has all of its prompt, but for a copy of the block that it ends in."""
        request_id, sequence = self.prefilling.popitem()
        num_full, rest = divmod(sequence.request.num_prompt_kv, BLOCK_SIZE)
        if rest:
            source = self._prompts[sequence.request.prompt_key].blocks[num_full]
            plan.copies.append((source, sequence.blocks[num_full]))
        self.running[request_id] = sequence
        plan.started.append(sequence)

    def _name(self, request: Request, blocks: list[int]) -> None:
        """These blocks hold a request's prompt: let others find them."""
        hashes = self.prompt_hashes(request)
        self._blocks.name(blocks[: len(hashes)], hashes)

    def _known_blocks(self, request: Request) -> list[int]:
        """The leading blocks of a prompt that are here already."""
        return self._blocks.find(self.prompt_hashes(request))

    def _has_place(self, request: Request, num_blocks: int) -> bool:
        """Whether there is a row and a table of `num_blocks` for a request that brings its KV along."""
        if not self._free_rows:
            return False
        known = self._known_blocks(request)
        return self._has_room(num_blocks - len(known) + self._num_growing(), (), known)

    def _table(self, request: Request, num_blocks: int) -> tuple[list[int], int]:
        """Blocks for a request, and how many of them, the first ones, hold its prompt already."""
        known = self._known_blocks(request)
        self._blocks.share(known)
        return known + self._blocks.allocate(num_blocks - len(known)), len(known)

    def _has_room(self, num_new: int, needed_by: Iterable[Request], shared: Iterable[int] = ()) -> bool:
        """Whether so many blocks can be had beside those `shared`.

        If need be they are taken from prompts that are held for siblings to come, but not from one being
        computed and those that `needed_by` have.
        """
        if num_new > self._blocks.num_free_beside(shared):
            computing = (sequence.request for sequence in self.prefilling.values())
            for key in self._prompts.keys() - {request.prompt_key for request in (*needed_by, *computing)}:
                self._let_go(key)
        return num_new <= self._blocks.num_free_beside(shared)

    def _num_growing(self) -> int:
        """A block for each row that may need one: newcomers leave these, or somebody is swapped out soon."""
        seated = chain(self.running.values(), self.arriving.values(), self.prefilling.values())
        return sum(len(sequence.blocks) < _most_blocks(sequence.request) for sequence in seated)

    def _num_to_give(self, request: Request, num_blocks: int) -> int:
        """How many more blocks a row gets that has `num_blocks` and needs another."""
        is_roomy = self._blocks.num_free > _RUN * self._max_rows
        return min(_RUN if is_roomy else 1, _most_blocks(request) - num_blocks)

    def _let_go(self, key: PromptKey) -> None:
        if key in self._prompts:
            self._blocks.release(self._prompts.pop(key).blocks)

    def _vacate(self, sequence: Sequence) -> None:
        self._free_rows.append(sequence.row)
        self._blocks.release(sequence.blocks)


def _most_blocks(request: Request) -> int:
    """Blocks of the longest answer and its prompt; its last token is never an input and needs no place."""
    return num_blocks_for(request.max_length - 1)


def _num_to_return(sequence: Sequence) -> int:
    """What a request had that was swapped out, and a block for its next token."""
    return min(len(sequence.blocks) + 1, _most_blocks(sequence.request))
