"""A running request changes hands between two engines of any kinds, without its KV.

The words are those that a driver carries.
"""

from __future__ import annotations

from pathlib import Path

from dora.core.records import RequestId
from dora.engine.sequence import Completion, Request
from dora.handover.moves import Answer, MovesRequests, NotReceived, Receive, Reserved, Send
from dora.runtime.stations import InferenceEngine

LEASE_S = 30.0
MAX_ROUNDS = 10_000  # of a move, or an answer; nobody needs so many


class Table:
    """Engines that move requests, and what they have said and finished; they meet in `folder`."""

    def __init__(self, folder: Path, lease_s: float = LEASE_S) -> None:
        self._folder, self._lease_s = folder, lease_s
        self._num_moves = 0
        self.finished: dict[RequestId, Completion] = {}

    def draw(self, engine: InferenceEngine, request: Request) -> None:
        """Step until a request has a token, and is not finished."""
        for _ in range(MAX_ROUNDS):
            self.step(engine)
            if engine.progress().get(request.id, 1):
                return

    def step(self, engine: InferenceEngine) -> None:
        self.finished |= {answer.id: answer for answer in engine.step()}

    def begin(self, request: Request, source: InferenceEngine, destination: InferenceEngine) -> list[Answer]:
        """Both words of a move; what is said against it at once."""
        assert isinstance(source, MovesRequests)
        assert isinstance(destination, MovesRequests)
        self._num_moves += 1
        place = destination.receive(Receive(self._num_moves, request, None, self._folder, self._lease_s))
        if isinstance(place, NotReceived):
            return [place]
        known = place.num_known_blocks, place.known_hash
        order = Send(self._num_moves, request.id, self._folder, *known, self._lease_s, carries_kv=False)
        refusal = source.send(order)
        return [] if refusal is None else [refusal]

    def move(self, request: Request, source: InferenceEngine, destination: InferenceEngine) -> list[Answer]:
        """What both say of a whole move; the source decodes on meanwhile."""
        answers = self.begin(request, source, destination)
        for _ in range(MAX_ROUNDS):
            if len(answers) >= 2:
                break
            answers += self.poll(source) + self.poll(destination)
            self.step(source)
        return answers

    def poll(self, engine: InferenceEngine) -> list[Answer]:
        assert isinstance(engine, MovesRequests)
        return [answer for answer in engine.poll_moves() if not isinstance(answer, Reserved)]

    def finish(self, engine: InferenceEngine, request: Request) -> Completion:
        """The answer, from an engine that has it."""
        for _ in range(MAX_ROUNDS):
            if request.id in self.finished:
                break
            self.step(engine)
        return self.finished[request.id]
