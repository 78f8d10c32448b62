"""Which waiting request gets a row, and which rows decode next.

First come, first served. A request is admitted when a row and all blocks of its longest
answer are free, so a running one never has to give anything back. A prompt is computed once
per group and version and its KV kept while a sibling lives; what no running sibling uses is
let go when blocks run short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from dora.core.records import RequestId
from dora.engine.blocks import BLOCK_SIZE, BlockManager, num_blocks_for
from dora.engine.sequence import PromptKey, Request, Sequence


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt whose KV (all tokens but the last) is to be computed into `blocks`."""

    key: PromptKey
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Admission:
    """What to do before the next decode step: prefills first, then block copies (from, to)."""

    prefills: list[Prefill] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)


class Scheduler:
    """The queue, the decode rows and the prompts held."""

    def __init__(self, max_rows: int, num_blocks: int) -> None:
        self._max_rows = max_rows
        self._num_blocks = num_blocks
        self._blocks = BlockManager(num_blocks)
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._prompts: dict[PromptKey, list[int]] = {}
        self._siblings: Counter[PromptKey] = Counter()  # unfinished requests by prompt
        self.waiting: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Sequence] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self.waiting or request_id in self.running

    def requests(self) -> Iterator[Request]:
        """All unfinished requests."""
        yield from (sequence.request for sequence in self.running.values())
        yield from self.waiting.values()

    def can_hold(self, request: Request) -> bool:
        """Whether the whole pool is large enough for this request alone."""
        return _num_own_blocks(request) + num_blocks_for(request.num_prompt_kv) <= self._num_blocks

    def submit(self, request: Request) -> None:
        self.waiting[request.id] = request
        self._siblings[request.prompt_key] += 1

    def admit(self) -> Admission:
        """Seat waiting requests, oldest first, until one lacks a row or blocks."""
        admission = Admission()
        while self.waiting and self._free_rows:
            request = next(iter(self.waiting.values()))
            if not self._fits(request):
                self._release_idle_prompts(keep=request.prompt_key)
                if not self._fits(request):
                    break
            del self.waiting[request.id]
            self._seat(request, admission)
        return admission

    def rows_by_version(self) -> list[Sequence]:
        """Running sequences such that each version is one contiguous segment."""
        return sorted(self.running.values(), key=lambda sequence: (sequence.request.version, sequence.row))

    def remove(self, request_id: RequestId) -> None:
        """Forget a request that is finished or aborted; its row and blocks are free again."""
        sequence = self.running.pop(request_id, None)
        request = sequence.request if sequence else self.waiting.pop(request_id)
        if sequence:
            self._free_rows.append(sequence.row)
            self._blocks.release(sequence.blocks)
        key = request.prompt_key
        self._siblings[key] -= 1
        if self._siblings[key] == 0:
            del self._siblings[key]
            self._blocks.release(self._prompts.pop(key, []))

    def check(self) -> None:
        """Rows and blocks are conserved, and every prompt held has a living sibling.

        So where no request is left, every block is free.
        """
        rows = [sequence.row for sequence in self.running.values()] + self._free_rows
        assert sorted(rows) == list(range(self._max_rows)), f"rows in use or free: {sorted(rows)}"
        assert self._siblings == Counter(r.prompt_key for r in self.requests()), "siblings miscounted"
        assert self._prompts.keys() <= self._siblings.keys(), "a prompt without siblings is held"
        self._blocks.check([*(s.blocks for s in self.running.values()), *self._prompts.values()])

    def _fits(self, request: Request) -> bool:
        known = request.prompt_key in self._prompts
        num_prompt = 0 if known else num_blocks_for(request.num_prompt_kv)
        return _num_own_blocks(request) + num_prompt <= self._blocks.num_free

    def _seat(self, request: Request, admission: Admission) -> None:
        key, num_tokens = request.prompt_key, request.num_prompt_kv
        if key not in self._prompts:
            self._prompts[key] = self._blocks.allocate(num_blocks_for(num_tokens))
            admission.prefills.append(Prefill(key, self._prompts[key]))
        # The last token of the longest answer is never an input, so it needs no place.
        blocks, copy = self._blocks.fork(
            self._prompts[key], num_tokens, num_blocks_for(request.max_length - 1)
        )
        if copy:
            admission.copies.append(copy)
        sequence = Sequence(request, self._free_rows.pop(), tuple(blocks))
        self.running[request.id] = sequence
        admission.sequences.append(sequence)

    def _release_idle_prompts(self, keep: PromptKey) -> None:
        used = {sequence.request.prompt_key for sequence in self.running.values()} | {keep}
        for key in self._prompts.keys() - used:
            self._blocks.release(self._prompts.pop(key))


def _num_own_blocks(request: Request) -> int:
    """Blocks of a request that it shares with no sibling."""
    return num_blocks_for(request.max_length - 1) - request.num_prompt_kv // BLOCK_SIZE
