"""Two or more engines on a table: moves are driven word by word, and time stands still unless told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.tiny import TINY, weights

from dora.core.records import RequestId
from dora.engine.sequence import Completion, Request
from dora.handover.engine import MovingEngine
from dora.handover.moves import Answer, Kept, NotReceived, Receive, Received, Reserved, Send, Sent
from dora.handover.ways import Ways
from dora.model.config import ModelConfig

LEASE_S = 10.0


class Stage:
    """Engines by name with their pools in `folder`, and all that they have answered and finished."""

    def __init__(
        self, folder: Path, kernels: str = "eager", exact: bool = False, dtype: str = "float32"
    ) -> None:
        self.folder, self.kernels, self.exact, self.dtype = folder, kernels, exact, dtype
        self.now_s = 100.0
        self.engines: dict[str, MovingEngine] = {}
        self.answers: list[tuple[str, Answer]] = []
        self.finished: dict[RequestId, Completion] = {}
        self._num_moves = 0

    def engine(
        self,
        name: str,
        *,
        versions: tuple[int, ...] = (0,),
        max_rows: int = 8,
        num_blocks: int | None = None,
        config: ModelConfig = TINY,
    ) -> MovingEngine:
        """Put an engine on the table."""
        made = self.engines[name] = MovingEngine(
            config,
            max_rows=max_rows,
            max_context=96,
            version_slots=2,
            num_blocks=num_blocks,
            kernels=self.kernels,
            exact=self.exact,
            dtype=self.dtype,
            pool=self.pool(name),
            clock=lambda: self.now_s,
            ways=self.ways(),
        )
        for version in versions:
            made.load(version, weights(version))
        return made

    def pool(self, name: str) -> Path:
        return self.folder / f"pool-{name}.kv"

    def ways(self) -> Ways | None:
        """How a new engine reaches the others."""
        return None

    def kv(self, name: str) -> Any:
        """Where others read the KV of one."""
        return self.pool(name)

    def step(self, name: str, num_steps: int = 1) -> None:
        """Let one engine decode; nobody finishes twice."""
        for _ in range(num_steps):
            for completion in self.engines[name].step():
                assert completion.id not in self.finished
                self.finished[completion.id] = completion
            self.engines[name].check()

    def poll(self, name: str) -> None:
        """Let one engine look after its moves."""
        self.answers += [(name, answer) for answer in self.engines[name].poll_moves()]
        self.engines[name].check()

    def reserve(self, request: Request, source: str, destination: str) -> Reserved:
        """The first word of a new move; the destination must agree."""
        answer = self.ask(request, source, destination)
        assert isinstance(answer, Reserved), answer
        return answer

    def ask(self, request: Request, source: str, destination: str) -> Reserved | NotReceived:
        """The first word of a new move."""
        self._num_moves += 1
        order = Receive(self._num_moves, request, self.kv(source), self.folder, LEASE_S)
        return self.engines[destination].receive(order)

    def send(self, request: Request, source: str, place: Reserved) -> Kept | None:
        """The second word."""
        known = place.num_known_blocks, place.known_hash
        order = Send(place.move, request.id, self.folder, *known, LEASE_S)
        return self.engines[source].send(order)

    def begin(self, request: Request, source: str, destination: str) -> int:
        """Both words, heard on both sides; the number of the move."""
        place = self.reserve(request, source, destination)
        assert self.send(request, source, place) is None
        return place.move

    def move(self, request: Request, source: str, destination: str) -> Received:
        """A whole move, while nobody decodes."""
        move = self.begin(request, source, destination)
        for name in (source, destination, source, destination, source):
            self.poll(name)
        assert self.word_of(source, move) == Sent(move)
        received = self.word_of(destination, move)
        assert isinstance(received, Received), received
        return received

    def word_of(self, name: str, move: int) -> Answer | None:
        """What an engine has answered about a move; it may do so only once."""
        words = [answer for engine, answer in self.answers if engine == name and answer.move == move]
        assert len(words) <= 1
        return words[0] if words else None

    def run(self) -> dict[RequestId, Completion]:
        """Step and poll all engines until no request and no move is left anywhere; all that finished.

        A round takes half a second, so every lease ends at last.
        """
        while any(not engine.idle or engine.num_moves for engine in self.engines.values()):
            for name in self.engines:
                self.poll(name)
                self.step(name)
            self.now_s += 0.5
        for engine in self.engines.values():
            engine.check()
            assert engine.kv_share == 0
        return self.finished

    def file(self, move: int, ending: str) -> Path:
        return self.folder / f"move-{move}.{ending}"
