"""The scheduler with a pool of plain memory: each decoding row must find all of its own KV there."""

from functools import lru_cache
from itertools import accumulate

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.engine.test_scheduler import MAX_ROWS, NUM_BLOCKS, make_request, make_scheduler

from dora.core.types import RequestId
from dora.engine.block_manager import BLOCK_SIZE, num_blocks_for
from dora.engine.request import Request, Sequence
from dora.engine.scheduler import RequestStatus, SchedulerOutput

BUDGET = 20
NUM_VERSIONS = 3


@lru_cache(maxsize=1000)
def kv(version: int, prompt_ids: tuple[int, ...], output: RequestId | None, length: int) -> list[int]:
    """The KV of each token: a hash of the version and all tokens so far."""
    tokens = [*prompt_ids, *([output] * (length - len(prompt_ids)))]
    return list(accumulate(tokens, lambda so_far, token: hash((so_far, token)), initial=version))[1:]


def kv_of(request: Request, length: int) -> list[int]:
    """The KV of the first `length` tokens of a request, whose output repeats its own id."""
    return kv(request.version, request.prompt_ids, request.id, request.max_length)[:length]


class SchedulerMachine(RuleBasedStateMachine):
    """Executes the scheduler's output on a list of blocks, as the engine does on its pool."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(BUDGET)
        self.memory: list[list[int]] = [[0] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.host: dict[RequestId, list[int]] = {}
        self.lengths: dict[
            RequestId, int
        ] = {}  # tokens of requests that have started, including swapped ones
        self.observations: dict[RequestId, int] = {}  # tokens that have arrived for requests between turns
        self.num_rows = 0

    # What the driver does.

    def make_request(self, prompt: tuple[int, int], version: int, max_tokens: int, sibling: int) -> Request:
        token, length = prompt
        return make_request(self.num_rows, sibling, (token,) * length, version, max_tokens)

    def fits(self, request: Request) -> bool:
        return self.scheduler.num_blocks_required(request) <= NUM_BLOCKS

    @rule(
        prompt=st.tuples(st.integers(0, 1), st.integers(1, 60)),
        version=st.integers(0, NUM_VERSIONS - 1),
        max_tokens=st.integers(1, 100),
        num_siblings=st.integers(1, 4),
    )
    def submit(self, prompt: tuple[int, int], version: int, max_tokens: int, num_siblings: int) -> None:
        self.num_rows += 1
        for sibling in range(num_siblings):
            request = self.make_request(prompt, version, max_tokens, sibling)
            if self.fits(request):
                self.scheduler.add(request)

    @rule(
        prompt=st.tuples(st.integers(0, 1), st.integers(1, 60)),
        version=st.integers(0, NUM_VERSIONS - 1),
        num_tokens=st.integers(0, 50),
        num_more=st.integers(1, 50),
        is_cancelled=st.booleans(),
    )
    def migrate_in(
        self, prompt: tuple[int, int], version: int, num_tokens: int, num_more: int, is_cancelled: bool
    ) -> None:
        """A request migrates in within some steps, or its migration is cancelled."""
        self.num_rows += 1
        request = self.make_request(prompt, version, num_tokens + num_more, 0)
        if not self.fits(request):
            return
        reservation = self.scheduler.reserve(request)
        if reservation is None:
            return
        self.step(2)
        num_computed = len(request.prompt_ids) - 1 + num_tokens
        sequence = self.scheduler.migrating_in[request.id]
        if is_cancelled or not self.scheduler.allocate_up_to(sequence, num_blocks_for(num_computed)):
            self.scheduler.remove(request.id)
            return
        self.write(sequence.block_table, reservation[0] * BLOCK_SIZE, kv_of(request, num_computed))
        assert self.scheduler.activate(request.id) is sequence
        self.lengths[request.id] = num_computed + 1

    @precondition(lambda self: any(self.scheduler.requests()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from([request.id for request in self.scheduler.requests()])))

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), num_steps=st.integers(1, 20), is_kept=st.booleans())
    def migrate_out(self, data: st.DataObject, num_steps: int, is_kept: bool) -> None:
        """A row is paused for some steps; then it migrates away, or continues."""
        leaving = data.draw(st.sampled_from(self.decoding))
        self.scheduler.migrating_out.add(leaving)
        self.step(num_steps)
        assert self.scheduler.status_of(leaving) is RequestStatus.MIGRATING_OUT
        if is_kept:
            self.scheduler.migrating_out.discard(leaving)
        else:
            self.end(leaving)

    @property
    def decoding(self) -> list[RequestId]:
        """Running requests that are not between turns."""
        return sorted(self.scheduler.running.keys() - self.scheduler.between_turns.keys())

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def end_turn(self, data: st.DataObject) -> None:
        self.scheduler.between_turns[data.draw(st.sampled_from(self.decoding))] = None

    @precondition(lambda self: self.scheduler.between_turns)
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def continue_episode(self, data: st.DataObject, num_tokens: int) -> None:
        """An observation arrives that leaves room for at least one token."""
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.between_turns)))
        request = self.scheduler.request(request_id)
        assert request is not None
        num_tokens = min(num_tokens, request.max_length - 1 - self.lengths[request_id])
        if num_tokens > 0 and self.scheduler.awaits_observation(request_id):
            self.observations[request_id] = num_tokens
            self.scheduler.set_observation(request_id, [0] * num_tokens)

    @rule(data=st.data())
    def decode_only(self, data: st.DataObject) -> None:
        ids = [request.id for request in self.scheduler.requests()]
        self.scheduler.decode_only(data.draw(st.sets(st.sampled_from(ids))) if ids else ())

    @rule(num_steps=st.integers(1, 15))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step_once()

    def teardown(self) -> None:
        """Abort requests between turns; all others must finish, and leave every block free."""
        for request_id in [i for i, tokens in self.scheduler.between_turns.items() if tokens is None]:
            self.end(request_id)
        for _ in range(5000):
            if not any(self.scheduler.requests()):
                break
            assert self.step_once(), "no request made progress"
        assert not any(self.scheduler.requests())
        self.scheduler.check()

    # What the engine does.

    def step_once(self) -> bool:
        """Schedule, execute, decode; returns whether anything happened."""
        scheduler = self.scheduler
        before, prefilling = dict(scheduler.running), {*scheduler.prefilling}
        decoding = scheduler.decode_order()
        full = [s for s in decoding if self.lengths[s.request.id] > len(s.block_table) * BLOCK_SIZE]
        output = scheduler.schedule(dict.fromkeys(full, 1) | self.missing_blocks())
        num_computed = sum(prefill.num_new for _, prefill in output.prefills)
        assert num_computed <= BUDGET * (1 if before else 8)
        if any(
            s.request.id not in scheduler.between_turns for s in output.swapped_out
        ):  # decoding rows come first
            assert not output.swapped_in
            assert {s.request.id for s in output.started} <= prefilling
        self.execute(output)
        num_appended = self.append_observations()
        rows = scheduler.decode_order()
        assert [s.request.version for s in rows] == sorted(s.request.version for s in rows)
        if not (output.swapped_in or output.started or num_appended):
            assert {*decoding} - {*output.swapped_out} <= {*rows}, "a row that decoded must decode on"
        for sequence in rows:
            self.decode(sequence)
        return bool(rows or output.prefills or output.swapped_in or output.swapped_out or num_appended)

    def missing_blocks(self) -> dict[Sequence, int]:
        """The blocks that rows need for their observation and the next step."""
        rows = [self.scheduler.running[i] for i in self.observations if i in self.scheduler.running]
        wanted = {s: self.lengths[s.request.id] + self.observations[s.request.id] for s in rows}
        missing = {s: num_blocks_for(num_tokens) - len(s.block_table) for s, num_tokens in wanted.items()}
        return {s: num for s, num in missing.items() if num > 0}

    def append_observations(self) -> int:
        """Rows with enough blocks append their observation and decode; returns their number."""
        missing, running = self.missing_blocks(), self.scheduler.running
        able = [i for i in self.observations if i in running and running[i] not in missing]
        for request_id in able:
            sequence, start = running[request_id], self.lengths[request_id] - 1
            num_tokens = self.observations.pop(request_id)
            self.scheduler.consume_observation(request_id, num_tokens)
            assert self.read(sequence.block_table, start) == kv_of(sequence.request, start)
            self.write(sequence.block_table, start, kv_of(sequence.request, start + num_tokens))
            self.lengths[request_id] += num_tokens
        return len(able)

    def execute(self, output: SchedulerOutput) -> None:
        for sequence in output.swapped_out:
            num_computed = self.lengths[sequence.request.id] - 1
            self.host[sequence.request.id] = self.read(sequence.block_table, num_computed)
        for sequence, num_cached in output.swapped_in:
            kept = self.host.pop(sequence.request.id)
            self.write(sequence.block_table, num_cached * BLOCK_SIZE, kept)
        for version, prefill in output.prefills:
            expected, start = kv(version, prefill.token_ids, None, len(prefill.token_ids)), prefill.num_cached
            assert self.read(prefill.block_table, start) == expected[:start]
            assert prefill.num_new > 0
            self.write(prefill.block_table, start, expected)
        for source, target in output.copies:
            self.memory[target] = self.memory[source].copy()
        for sequence in output.started:
            self.lengths[sequence.request.id] = len(sequence.request.prompt_ids)

    def decode(self, sequence: Sequence) -> None:
        """Check all KV, write that of the last token, sample another."""
        request, length = sequence.request, self.lengths[sequence.request.id]
        assert self.read(sequence.block_table, length - 1) == kv_of(request, length - 1)
        self.write(sequence.block_table, length - 1, kv_of(request, length))
        self.lengths[request.id] = length + 1
        if length + 1 == request.max_length:
            self.end(request.id)

    def end(self, request_id: RequestId) -> None:
        self.scheduler.remove(request_id)
        self.lengths.pop(request_id, None)
        self.host.pop(request_id, None)
        self.observations.pop(request_id, None)

    def read(self, blocks: list[int], num_tokens: int) -> list[int]:
        return [token for block in blocks for token in self.memory[block]][:num_tokens]

    def write(self, blocks: list[int], start: int, values: list[int]) -> None:
        """Write values from position `start` on."""
        for position in range(start, len(values)):
            self.memory[blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = values[position]

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        self.scheduler.check()
        states = {request.id: self.scheduler.status_of(request.id) for request in self.scheduler.requests()}
        assert {i for i, state in states.items() if state is RequestStatus.SWAPPED} == self.host.keys()
        begun = {RequestStatus.RUNNING, RequestStatus.MIGRATING_OUT, RequestStatus.SWAPPED}
        assert {i for i, state in states.items() if state in begun} == self.lengths.keys()
        assert RequestStatus.ABSENT not in states.values()
        assert (
            sum(
                state in {*RequestStatus} - {RequestStatus.WAITING, RequestStatus.SWAPPED}
                for state in states.values()
            )
            <= MAX_ROWS
        )


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=25)
test_every_decoding_row_finds_its_own_kv = SchedulerMachine.TestCase
