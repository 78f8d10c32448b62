"""Which waiting request gets a row, and which rows decode next.

First come, first served. A request is admitted when a row and all blocks of its longest
answer are free, so a running one never has to give anything back. A prompt is computed once
per group and version and its KV kept while a sibling lives; what no running sibling uses is
let go when blocks run short. Full blocks of a prompt that other prompts of the version begin
with, or that came with a moved sibling, are found by name and not computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dora.core.records import RequestId
from dora.engine.blocks import BLOCK_SIZE, BlockManager, chain_hashes, num_blocks_for
from dora.engine.sequence import PromptKey, Request, Sequence


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt whose KV (all tokens but the last) is to be computed into `blocks`.

    The first `num_known` tokens are there already, or are computed by an earlier prefill.
    """

    key: PromptKey
    blocks: list[int]
    num_known: int


@dataclass(frozen=True, slots=True)
class Admission:
    """What to do before the next decode step: prefills first, then block copies (from, to)."""

    prefills: list[Prefill] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)


class Scheduler:
    """The queue, the decode rows and the prompts held.

    `arriving` requests have a row and blocks, but still belong to another engine.
    """

    def __init__(self, max_rows: int, num_blocks: int) -> None:
        self._max_rows = max_rows
        self._num_blocks = num_blocks
        self._blocks = BlockManager(num_blocks)
        self._seeds: dict[int, str] = {}  # what names of blocks begin with, by version
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._prompts: dict[PromptKey, list[int]] = {}
        self._siblings: Counter[PromptKey] = Counter()  # unfinished requests by prompt
        self._rushed: frozenset[RequestId] = frozenset()  # they decode alone, as long as one is running
        self._frozen: set[RequestId] = set()
        self.waiting: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Sequence] = {}
        self.arriving: dict[RequestId, Sequence] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        return any(request_id in part for part in (self.waiting, self.running, self.arriving))

    @property
    def kv_share(self) -> float:
        """Share of the pool's blocks that have an owner."""
        return 1 - self._blocks.num_free / self._num_blocks

    def request(self, request_id: RequestId) -> Request | None:
        """An unfinished request that belongs to this engine."""
        if request_id in self.running:
            return self.running[request_id].request
        return self.waiting.get(request_id)

    def requests(self) -> Iterator[Request]:
        """All unfinished requests, those arriving included."""
        yield from (sequence.request for sequence in self.running.values())
        yield from (sequence.request for sequence in self.arriving.values())
        yield from self.waiting.values()

    def add_version(self, version: int, seed: str) -> None:
        """Requests of `version` may come; `seed` begins the names of its blocks (see `kv_seed`)."""
        self._seeds[version] = seed

    def drop_version(self, version: int) -> None:
        """No request of `version` is left, and its prompts are of no use any more."""
        self._blocks.forget(self._seeds.pop(version))

    def can_hold(self, request: Request) -> bool:
        """Whether the whole pool is large enough for this request alone."""
        return _num_own_blocks(request) + num_blocks_for(request.num_prompt_kv) <= self._num_blocks

    def submit(self, request: Request) -> None:
        self.waiting[request.id] = request
        self._siblings[request.prompt_key] += 1

    def can_admit(self) -> bool:
        """Whether `admit` would seat a request."""
        return bool(self.waiting and self._free_rows) and self._make_room(next(iter(self.waiting.values())))

    def admit(self) -> Admission:
        """Seat waiting requests, oldest first, until one lacks a row or blocks."""
        admission = Admission()
        while self.can_admit():
            self._seat(self.waiting.pop(next(iter(self.waiting))), admission)
        return admission

    def reserve(self, request: Request) -> tuple[int, str] | None:
        """Give a row and blocks to a request that another engine decodes; None where they are lacking.

        Returns how many leading blocks of its prompt are here already, and the name of the last.
        """
        num_blocks = num_blocks_for(request.max_length - 1)
        if num_blocks > self._blocks.num_free:
            self._release_idle_prompts(keep=request.prompt_key)
        if not self._free_rows or num_blocks > self._blocks.num_free:
            return None
        known, hashes = self._known_blocks(request)
        self._blocks.share(known)
        blocks = known + self._blocks.allocate(num_blocks - len(known))
        self.arriving[request.id] = Sequence(request, self._free_rows.pop(), tuple(blocks))
        self._siblings[request.prompt_key] += 1
        return len(known), hashes[len(known) - 1] if known else ""

    def settle(self, request_id: RequestId) -> Sequence:
        """An arriving request belongs to this engine now, and its blocks hold what they should."""
        sequence = self.running[request_id] = self.arriving.pop(request_id)
        hashes = self.prompt_hashes(sequence.request)
        self._blocks.name(sequence.blocks[: len(hashes)], hashes)
        return sequence

    def prompt_hashes(self, request: Request) -> list[str]:
        """The names of the full blocks of a request's prompt."""
        return chain_hashes(self._seeds[request.version], request.prompt_ids[: request.num_prompt_kv])

    def freeze(self, request_id: RequestId) -> None:
        """A running request keeps row and blocks but does not decode."""
        self._frozen.add(request_id)

    def thaw(self, request_id: RequestId) -> None:
        """It decodes again, if it is still here."""
        self._frozen.discard(request_id)

    def rush(self, ids: Iterable[RequestId]) -> None:
        """Only these requests decode from now on; once none of them is running, all do."""
        self._rushed = frozenset(ids)

    def rows_by_version(self) -> list[Sequence]:
        """Sequences that decode, such that each version is one contiguous segment."""
        rushed = self._rushed & self.running.keys()
        decoding = (rushed or self.running.keys()) - self._frozen
        sequences = (self.running[request_id] for request_id in decoding)
        return sorted(sequences, key=lambda sequence: (sequence.request.version, sequence.row))

    def remove(self, request_id: RequestId) -> None:
        """Forget a request that is finished, aborted or elsewhere; its row and blocks are free again."""
        sequence = self.running.pop(request_id, None) or self.arriving.pop(request_id, None)
        request = sequence.request if sequence else self.waiting.pop(request_id)
        if sequence:
            self._free_rows.append(sequence.row)
            self._blocks.release(sequence.blocks)
        self._frozen.discard(request_id)
        key = request.prompt_key
        self._siblings[key] -= 1
        if self._siblings[key] == 0:
            del self._siblings[key]
            self._blocks.release(self._prompts.pop(key, []))

    def check(self) -> None:
        """Rows and blocks are conserved, and every prompt held has a living sibling.

        So where no request is left, every block is free or cached.
        """
        seated = [*self.running.values(), *self.arriving.values()]
        rows = [sequence.row for sequence in seated] + self._free_rows
        assert sorted(rows) == list(range(self._max_rows)), f"rows in use or free: {sorted(rows)}"
        assert self._siblings == Counter(r.prompt_key for r in self.requests()), "siblings miscounted"
        assert self._prompts.keys() <= self._siblings.keys(), "a prompt without siblings is held"
        assert self._frozen <= self.running.keys(), f"frozen, but not here: {self._frozen}"
        self._blocks.check([*(s.blocks for s in seated), *self._prompts.values()])

    def _make_room(self, request: Request) -> bool:
        """Whether there are blocks for a request, if need be those of prompts that nobody decodes."""
        if not self._fits(request):
            self._release_idle_prompts(keep=request.prompt_key)
        return self._fits(request)

    def _fits(self, request: Request) -> bool:
        known = request.prompt_key in self._prompts
        num_prompt = 0 if known else num_blocks_for(request.num_prompt_kv)
        return _num_own_blocks(request) + num_prompt <= self._blocks.num_free

    def _seat(self, request: Request, admission: Admission) -> None:
        key, num_tokens = request.prompt_key, request.num_prompt_kv
        if key not in self._prompts:
            admission.prefills.append(self._begin_prompt(request))
        # The last token of the longest answer is never an input, so it needs no place.
        blocks, copy = self._blocks.fork(
            self._prompts[key], num_tokens, num_blocks_for(request.max_length - 1)
        )
        if copy:
            admission.copies.append(copy)
        sequence = Sequence(request, self._free_rows.pop(), tuple(blocks))
        self.running[request.id] = sequence
        admission.sequences.append(sequence)

    def _begin_prompt(self, request: Request) -> Prefill:
        """Hold the blocks of a prompt. They are named at once, for prefills are computed in order."""
        known, hashes = self._known_blocks(request)
        self._blocks.share(known)
        blocks = known + self._blocks.allocate(num_blocks_for(request.num_prompt_kv) - len(known))
        self._blocks.name(blocks[: len(hashes)], hashes)
        self._prompts[request.prompt_key] = blocks
        return Prefill(request.prompt_key, blocks, len(known) * BLOCK_SIZE)

    def _known_blocks(self, request: Request) -> tuple[list[int], list[str]]:
        """The leading blocks of a prompt that are here already, and the names of all its full blocks."""
        hashes = self.prompt_hashes(request)
        return self._blocks.find(hashes), hashes

    def _release_idle_prompts(self, keep: PromptKey) -> None:
        used = {sequence.request.prompt_key for sequence in self.running.values()} | {keep}
        for key in self._prompts.keys() - used:
            self._blocks.release(self._prompts.pop(key))


def _num_own_blocks(request: Request) -> int:
    """Blocks of a request that it shares with no sibling."""
    return num_blocks_for(request.max_length - 1) - request.num_prompt_kv // BLOCK_SIZE
