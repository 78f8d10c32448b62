"""A rollout engine as a fluid model: all its rows advance together, one token a decode step.

Between two events only the step count advances, at the rate that the cost model gives for the rows and
contexts of the engine. A response of a thousand tokens costs two events, not a thousand.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from dora.core.types import RequestId
from dora.planner.costs import StepTime, StepTimeTerms

NEVER = float("inf")
TOLERANCE = 1e-4  # of a token, for rounding
SWAP_IN_RESERVE = 0.05  # fraction of the KV that stays free when a request is swapped in


class EngineCosts(Protocol):
    """Costs of an engine: by roofline (`EngineCost`), or fitted to real runs (`FittedCosts`)."""

    @property
    def ep_size(self) -> int: ...
    @property
    def kv_capacity(self) -> int: ...
    @property
    def kv_bytes(self) -> float: ...
    @property
    def kv_growth(self) -> float: ...
    @property
    def load_s(self) -> float: ...
    @property
    def load_stop_s(self) -> float: ...
    def kv_tokens(self, context: float, final: float = 0.0) -> float: ...
    def terms(self, num_rows: int, rank_rows: int) -> StepTimeTerms: ...
    def prefill_s(self, num_tokens: float) -> float: ...
    def migrate_s(self, num_tokens: float) -> float: ...
    def swap_s(self, num_tokens: float) -> float: ...


@dataclass(slots=True, eq=False)
class FluidRequest:
    """One request on an engine. Lengths in tokens; `since` and `stops_at` are step counts of the engine."""

    id: RequestId
    version: int
    prompt: int
    length: int
    stop_length: int  # response tokens at the end of the turn, or of the response
    started_s: float = 0.0
    num_tokens: float = 0.0  # of the response, at `since`
    since: float = 0.0
    rank: int = 0
    stops_at: float | None = None  # None while it is not decoded

    @property
    def is_active(self) -> bool:
        """Whether it is decoded now."""
        return self.stops_at is not None


class FluidEngine:
    """Requests, a count of decode steps, and the time until which the engine decodes nothing."""

    def __init__(self, number: int, cost: EngineCosts, num_rows: int, is_colocated: bool = False) -> None:
        self.id, self.cost, self.num_rows, self.is_colocated = number, cost, num_rows, is_colocated
        self.requests: dict[RequestId, FluidRequest] = {}
        self.is_paused = is_colocated
        self.now = 0.0
        self.busy_until_s = 0.0  # it decodes nothing before
        self.slowdown = 1.0  # of its steps, while the trainer works on the same cores
        self.num_steps = 0.0
        self.num_active = 0
        self.next_stop_s = NEVER  # when the next request stops, if nothing changes
        self.next_check_s = NEVER  # when the simulator checks for this stop
        # Totals over the run
        self.row_s = 0.0  # decoded rows x seconds
        self.decode_s = 0.0
        self.stall_s = 0.0  # part of it in which the mean rank waits for the fullest
        # Internal state
        self._decode_only: frozenset[RequestId] = frozenset()
        self._versions: Counter[int] = Counter()  # of active requests
        self._swapped_out: list[FluidRequest] = []  # the last request is swapped in first
        self._kv_capacity, self._kv_growth = cost.kv_capacity, cost.kv_growth
        self._rank_rows = [0] * cost.ep_size
        self._rank_context = [0.0] * cost.ep_size  # KV of active requests, as `_kv_tokens` counts it
        self._stops = array("d")  # negative `stops_at` of active requests, so that the next one is last
        self._stopping: list[FluidRequest] = []  # these requests, in the same order
        self._step_time: StepTime | None = None

    @property
    def kv_usage(self) -> float:
        return sum(self._rank_context) / self._kv_capacity

    def tokens_of(self, request: FluidRequest) -> float:
        """Answer tokens of a request so far."""
        if request.stops_at is None:
            return request.num_tokens
        return request.num_tokens + self.num_steps - request.since

    # Time

    def decoding_s(self, now: float) -> float:
        """Seconds of decoding since the last `advance`."""
        if not self.num_active or self.is_paused:
            return 0.0
        return max(0.0, now - max(self.now, self.busy_until_s))

    def advance(self, now: float) -> None:
        """Decode until `now`."""
        elapsed_s = self.decoding_s(now)
        self.now = now
        if not elapsed_s:
            return
        num_steps = self.step_time().steps(elapsed_s)
        self.num_steps += num_steps
        self.row_s += elapsed_s * self.num_active
        self.decode_s += elapsed_s
        if len(self._rank_rows) > 1 and (fullest := max(self._rank_context)) > 0:
            mean = sum(self._rank_context) / len(self._rank_context)
            self.stall_s += elapsed_s * (1 - mean / fullest)
        for rank, num in enumerate(self._rank_rows):
            self._rank_context[rank] += num * num_steps * self._kv_growth
        self._step_time = None

    def step_time(self) -> StepTime:
        """Time of decode steps with the rows that are active now."""
        if self._step_time is None:
            terms = self.cost.terms(self.num_active, max(self._rank_rows))
            alone = terms.step_time(max(self._rank_context), len(self._versions) or 1)
            is_slower = self.slowdown != 1.0
            self._step_time = StepTime(*(self.slowdown * term for term in alone)) if is_slower else alone
        return self._step_time

    def set_slowdown(self, slowdown: float) -> None:
        self.slowdown, self._step_time = slowdown, None

    def delay(self, seconds: float) -> None:
        """Decode nothing for this time (s), for example during a load."""
        self.busy_until_s = max(self.busy_until_s, self.now) + seconds

    def find_next_stop(self) -> float:
        """Time at which the next request stops or the KV is full; NEVER while no request is decoded."""
        if self.is_paused or not self.num_active:
            return NEVER
        left, free = -self._stops[-1] - self.num_steps, self._kv_capacity - sum(self._rank_context)
        growing = self.num_active * self._kv_growth  # KV of one step
        is_full_first = self.num_active > 1 and free < growing * left
        num_steps = max(0.0, (free / growing if growing else 0.0) if is_full_first else left)
        return max(self.now, self.busy_until_s) + self.step_time().seconds(num_steps)

    # Requests

    def add(self, request: FluidRequest) -> None:
        """Start or continue a request here, on the rank with the fewest rows."""
        self.requests[request.id] = request
        request.rank = min(range(len(self._rank_rows)), key=self._rank_rows.__getitem__)
        if not self._decode_only or request.id in self._decode_only:
            self.resume(request)

    def remove(self, request_id: RequestId) -> FluidRequest:
        """Take a request off the engine."""
        request = self.requests.pop(request_id)
        self._stop(request)
        if request in self._swapped_out:
            self._swapped_out.remove(request)
        return request

    def resume(self, request: FluidRequest) -> None:
        """Decode a request from now on, unless it waits at the end of a turn."""
        if request.is_active or request.num_tokens >= request.stop_length:
            return
        request.since = self.num_steps
        self.num_active += 1
        self._versions[request.version] += 1
        self._rank_rows[request.rank] += 1
        self._rank_context[request.rank] += self._kv_tokens(request)
        request.stops_at = request.since + request.stop_length - request.num_tokens
        index = bisect_left(self._stops, -request.stops_at)  # of equal stops, the first to start is last
        self._stops.insert(index, -request.stops_at)
        self._stopping.insert(index, request)
        self._step_time = None

    def _stop(self, request: FluidRequest) -> None:
        """Decode a request no more for now."""
        if request.stops_at is None:
            return
        request.num_tokens = self.tokens_of(request)
        index = self._stopping.index(request, bisect_left(self._stops, -request.stops_at))
        del self._stops[index], self._stopping[index]
        request.stops_at = None
        self.num_active -= 1
        self._versions[request.version] -= 1
        if not self._versions[request.version]:
            del self._versions[request.version]
        self._rank_rows[request.rank] -= 1
        self._rank_context[request.rank] -= self._kv_tokens(request)
        self._step_time = None

    def stop_finished(self) -> list[FluidRequest]:
        """Stop the requests that have reached the end of their turn or response, and return them."""
        stopped: list[FluidRequest] = []
        while self._stops and -self._stops[-1] <= self.num_steps + TOLERANCE:
            request = self._stopping[-1]
            self._stop(request)
            request.num_tokens = float(request.stop_length)
            stopped.append(request)
        return stopped

    def swap(self) -> float:
        """Swap out the youngest requests while the KV is full, and in again while there is room.

        Returns the seconds that it takes.
        """
        swap_s = 0.0
        free = self._kv_capacity - sum(self._rank_context)
        while free < self.num_active * self._kv_growth and self.num_active > 1:
            request = next(r for r in reversed(self.requests.values()) if r.is_active)
            self._stop(request)
            free += self._kv_tokens(request)
            self._swapped_out.append(request)
            swap_s += self.cost.swap_s(request.prompt + request.num_tokens)
        while self._swapped_out and not self._decode_only:
            request = self._swapped_out[-1]
            context = self._kv_tokens(request)
            if self.num_active and free - context < SWAP_IN_RESERVE * self._kv_capacity:
                break
            self._swapped_out.pop()
            free -= context
            self.resume(request)
            swap_s += self.cost.swap_s(request.prompt + request.num_tokens)
        return swap_s

    def _kv_tokens(self, request: FluidRequest) -> float:
        """KV of a request that is not decoded now, in tokens that every layer keeps."""
        return self.cost.kv_tokens(request.prompt + request.num_tokens, request.prompt + request.length)

    def decode_only(self, requests: tuple[RequestId, ...]) -> None:
        """Decode these requests only; with none, decode all again."""
        self._decode_only = frozenset(requests)
        for request_id, request in self.requests.items():
            if requests and request_id not in self._decode_only:
                self._stop(request)
            elif request not in self._swapped_out:
                self.resume(request)

    def switch_version(self, version: int) -> None:
        """Continue all requests with a newer version."""
        for request in self.requests.values():
            request.version = max(request.version, version)
        self._versions = Counter({version: self.num_active} if self.num_active else {})
        self._step_time = None
