"""The scheduler against a pool of plain memory: whoever decodes must find all of its own KV there."""

from functools import lru_cache
from itertools import accumulate

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.engine.test_scheduler import MAX_ROWS, NUM_BLOCKS, made, request

from dora.core.records import RequestId
from dora.engine.blocks import BLOCK_SIZE, num_blocks_for
from dora.engine.plan import Plan, State
from dora.engine.sequence import Request, Sequence

BUDGET = 20
NUM_VERSIONS = 3


@lru_cache(maxsize=1000)
def kv(version: int, prompt_ids: tuple[int, ...], answers: RequestId | None, length: int) -> list[int]:
    """What the model computes for each token: it depends on the version and all tokens so far."""
    tokens = [*prompt_ids, *([answers] * (length - len(prompt_ids)))]
    return list(accumulate(tokens, lambda so_far, token: hash((so_far, token)), initial=version))[1:]


def kv_of(asked: Request, length: int) -> list[int]:
    """That of the first `length` tokens of a request, whose answer is its own name again and again."""
    return kv(asked.version, asked.prompt_ids, asked.id, asked.max_length)[:length]


class PlainMemory(RuleBasedStateMachine):
    """Carries out plans on a list of places, as the engine does on its pool."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = made(BUDGET)
        self.memory: list[list[int]] = [[0] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.host: dict[RequestId, list[int]] = {}
        self.lengths: dict[RequestId, int] = {}  # tokens of requests that have begun, swapped ones included
        self.unread: dict[RequestId, int] = {}  # tokens of those whose turn has been answered
        self.num_rows = 0

    # What the outside does.

    def asked(self, prompt: tuple[int, int], version: int, max_tokens: int, sibling: int) -> Request:
        token, length = prompt
        return request(self.num_rows, sibling, (token,) * length, version, max_tokens)

    def fits(self, asked: Request) -> bool:
        return self.scheduler.num_needed(asked) <= NUM_BLOCKS

    @rule(
        prompt=st.tuples(st.integers(0, 1), st.integers(1, 60)),
        version=st.integers(0, NUM_VERSIONS - 1),
        max_tokens=st.integers(1, 100),
        num_siblings=st.integers(1, 4),
    )
    def submit(self, prompt: tuple[int, int], version: int, max_tokens: int, num_siblings: int) -> None:
        self.num_rows += 1
        for sibling in range(num_siblings):
            asked = self.asked(prompt, version, max_tokens, sibling)
            if self.fits(asked):
                self.scheduler.submit(asked)

    @rule(
        prompt=st.tuples(st.integers(0, 1), st.integers(1, 60)),
        version=st.integers(0, NUM_VERSIONS - 1),
        num_tokens=st.integers(0, 50),
        num_more=st.integers(1, 50),
        is_cancelled=st.booleans(),
    )
    def receive(
        self, prompt: tuple[int, int], version: int, num_tokens: int, num_more: int, is_cancelled: bool
    ) -> None:
        """Another engine's request arrives after some steps, or gives up."""
        self.num_rows += 1
        asked = self.asked(prompt, version, num_tokens + num_more, 0)
        if not self.fits(asked):
            return
        place = self.scheduler.reserve(asked)
        if place is None:
            return
        self.step(2)
        num_computed = len(asked.prompt_ids) - 1 + num_tokens
        sequence = self.scheduler.arriving[asked.id]
        if is_cancelled or not self.scheduler.extend(sequence, num_blocks_for(num_computed)):
            self.scheduler.remove(asked.id)
            return
        self.write(sequence.blocks, place[0] * BLOCK_SIZE, kv_of(asked, num_computed))
        assert self.scheduler.settle(asked.id) is sequence
        self.lengths[asked.id] = num_computed + 1

    @precondition(lambda self: any(self.scheduler.requests()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from([asked.id for asked in self.scheduler.requests()])))

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), num_steps=st.integers(1, 20), is_kept=st.booleans())
    def send(self, data: st.DataObject, num_steps: int, is_kept: bool) -> None:
        """A row stands still for some steps; then it is taken away, or goes on."""
        leaving = data.draw(st.sampled_from(self.decoding))
        self.scheduler.frozen.add(leaving)
        self.step(num_steps)
        assert self.scheduler.state_of(leaving) is State.MIGRATING_OUT
        if is_kept:
            self.scheduler.frozen.discard(leaving)
        else:
            self.end(leaving)

    @property
    def decoding(self) -> list[RequestId]:
        """Running requests whose turn is not over."""
        return sorted(self.scheduler.running.keys() - self.scheduler.still.keys())

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def end_turn(self, data: st.DataObject) -> None:
        self.scheduler.still[data.draw(st.sampled_from(self.decoding))] = False

    @precondition(lambda self: self.scheduler.still)
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def answer_turn(self, data: st.DataObject, num_tokens: int) -> None:
        """Tokens to read, which leave room for one more; what has no room for that has ended."""
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.still)))
        asked = self.scheduler.request(request_id)
        assert asked is not None
        num_tokens = min(num_tokens, asked.max_length - 1 - self.lengths[request_id])
        if num_tokens > 0 and not self.scheduler.still[request_id]:
            self.unread[request_id] = num_tokens
            self.scheduler.still[request_id] = True

    @rule(data=st.data())
    def rush(self, data: st.DataObject) -> None:
        ids = [asked.id for asked in self.scheduler.requests()]
        self.scheduler.rush(data.draw(st.sets(st.sampled_from(ids))) if ids else ())

    @rule(num_steps=st.integers(1, 15))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step_once()

    def teardown(self) -> None:
        """Left alone, every request ends, and every block is free; but those at rest are given up."""
        for request_id in [i for i, is_answered in self.scheduler.still.items() if not is_answered]:
            self.end(request_id)
        for _ in range(5000):
            if not any(self.scheduler.requests()):
                break
            assert self.step_once(), "nobody got any further"
        assert not any(self.scheduler.requests())
        self.scheduler.check()

    # What the engine does.

    def step_once(self) -> bool:
        """Plan, carry out, decode; whether anything happened."""
        scheduler = self.scheduler
        before, prefilling = dict(scheduler.running), {*scheduler.prefilling}
        decoding = scheduler.rows_by_version()
        full = [s for s in decoding if self.lengths[s.request.id] > len(s.blocks) * BLOCK_SIZE]
        plan = scheduler.schedule(dict.fromkeys(full, 1) | self.lacking())
        num_computed = sum(prefill.stop - prefill.start for prefill in plan.prefills)
        assert num_computed <= BUDGET * (1 if before else 8)
        if any(s.request.id not in scheduler.still for s in plan.swapped_out):  # those that decode come first
            assert not plan.swapped_in
            assert {s.request.id for s in plan.started} <= prefilling
        self.carry_out(plan)
        num_read = self.read_answers()
        rows = scheduler.rows_by_version()
        assert [s.request.version for s in rows] == sorted(s.request.version for s in rows)
        if not (plan.swapped_in or plan.started or num_read):
            assert {*decoding} - {*plan.swapped_out} <= {*rows}, "a row that decoded must decode on"
        for sequence in rows:
            self.decode(sequence)
        return bool(rows or plan.prefills or plan.swapped_in or plan.swapped_out or num_read)

    def lacking(self) -> dict[Sequence, int]:
        """Blocks that rows lack for what they are to read, and the step after it."""
        rows = [self.scheduler.running[i] for i in self.unread if i in self.scheduler.running]
        wanted = {s: self.lengths[s.request.id] + self.unread[s.request.id] for s in rows}
        lacks = {s: num_blocks_for(num_tokens) - len(s.blocks) for s, num_tokens in wanted.items()}
        return {s: num for s, num in lacks.items() if num > 0}

    def read_answers(self) -> int:
        """Rows that have the blocks read, and decode from now on; how many they are."""
        lacking, running = self.lacking(), self.scheduler.running
        able = [i for i in self.unread if i in running and running[i] not in lacking]
        for request_id in able:
            sequence, start = running[request_id], self.lengths[request_id] - 1
            num_tokens = self.unread.pop(request_id)
            del self.scheduler.still[request_id]
            assert self.read(sequence.blocks, start) == kv_of(sequence.request, start)
            self.write(sequence.blocks, start, kv_of(sequence.request, start + num_tokens))
            self.lengths[request_id] += num_tokens
        return len(able)

    def carry_out(self, plan: Plan) -> None:
        for sequence in plan.swapped_out:
            num_computed = self.lengths[sequence.request.id] - 1
            self.host[sequence.request.id] = self.read(sequence.blocks, num_computed)
        for sequence, num_known in plan.swapped_in:
            kept = self.host.pop(sequence.request.id)
            self.write(sequence.blocks, num_known * BLOCK_SIZE, kept)
        for prefill in plan.prefills:
            expected = kv(prefill.key.version, prefill.key.prompt_ids, None, len(prefill.key.prompt_ids))
            assert self.read(prefill.blocks, prefill.start) == expected[: prefill.start]
            assert prefill.start < prefill.stop
            self.write(prefill.blocks, prefill.start, expected[: prefill.stop])
        for source, target in plan.copies:
            self.memory[target] = self.memory[source].copy()
        for sequence in plan.started:
            self.lengths[sequence.request.id] = len(sequence.request.prompt_ids)

    def decode(self, sequence: Sequence) -> None:
        """Read all KV, write that of the last token, draw another."""
        asked, length = sequence.request, self.lengths[sequence.request.id]
        assert self.read(sequence.blocks, length - 1) == kv_of(asked, length - 1)
        self.write(sequence.blocks, length - 1, kv_of(asked, length))
        self.lengths[asked.id] = length + 1
        if length + 1 == asked.max_length:
            self.end(asked.id)

    def end(self, request_id: RequestId) -> None:
        self.scheduler.remove(request_id)
        self.lengths.pop(request_id, None)
        self.host.pop(request_id, None)
        self.unread.pop(request_id, None)

    def read(self, blocks: list[int], num_tokens: int) -> list[int]:
        return [token for block in blocks for token in self.memory[block]][:num_tokens]

    def write(self, blocks: list[int], start: int, values: list[int]) -> None:
        """Values from place `start` on; those before are there already."""
        for position in range(start, len(values)):
            self.memory[blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = values[position]

    @invariant()
    def everybody_is_somewhere(self) -> None:
        self.scheduler.check()
        states = {asked.id: self.scheduler.state_of(asked.id) for asked in self.scheduler.requests()}
        assert {i for i, state in states.items() if state is State.SWAPPED} == self.host.keys()
        begun = {State.RUNNING, State.MIGRATING_OUT, State.SWAPPED}
        assert {i for i, state in states.items() if state in begun} == self.lengths.keys()
        assert State.DONE not in states.values()
        assert (
            sum(state in {*State} - {State.WAITING, State.SWAPPED} for state in states.values()) <= MAX_ROWS
        )


PlainMemory.TestCase.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)
test_whoever_decodes_finds_its_own_kv_whatever_happens = PlainMemory.TestCase
