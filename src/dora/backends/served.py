"""An engine behind an HTTP server: token ids in, token ids and log-probs out.

What all such engines have in common; a subclass has the words of one product. A thread listens to each
answer. A server has one version at a time, unless a subclass says more, and its weights are changed when it
works on nothing. Running requests move to other engines and
come from them without KV: what they have so far becomes part of the prompt.
"""

from __future__ import annotations

import math
import queue
import secrets
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from dora.backends.server import Body, Product, Server, check
from dora.backends.weights_file import write_safetensors
from dora.backends.words import Row, Word
from dora.core.records import Chunk, RequestId
from dora.engine.rows import Draft
from dora.engine.sequence import Completion, EngineError, Request
from dora.errors import RunError
from dora.handover.bare import BareMover
from dora.handover.files import FORMAT, KVFormat
from dora.handover.moves import Answer, Kept, NotReceived, Receive, Reserved, Send
from dora.model.folder import load_config
from dora.model.weights import Layout
from dora.runtime.stations import Capabilities
from dora.weights.store import make_store_folder

WAIT_S = 0.02  # longest that a step waits for the server
GIVE_UP_S = 30.0  # longest that the server may go on with what was given up


class Served(ABC):
    """One server."""

    product: ClassVar[Product]
    capabilities: ClassVar[Capabilities]
    kernels: str
    num_slots = 1  # versions that it holds at most

    def __init__(
        self, server: Server, *, model: str, max_rows: int, max_context: int, dtype: str, silence_s: float
    ) -> None:
        """One that says nothing for `silence_s` while it has requests is lost."""
        self.server, self._dtype, self._silence_s = server, dtype, silence_s
        self._model, self._config = Path(model), load_config(Path(model))
        self._layout = Layout(self._config)
        self._max_rows, self._max_context = max_rows, max_context
        self._held: dict[int, str] = {}
        self._labels: dict[int, str] = {}  # what the versions held are called at the server
        self._waiting: deque[Request] = deque()
        self._rows: dict[RequestId, Row] = {}
        self._streams: set[Row] = set()  # that the server may still be working on
        self._said: queue.SimpleQueue[tuple[Row, Any]] = queue.SimpleQueue()
        self._done: list[Completion] = []
        self._mover = BareMover(self)
        self._heard_s = 0.0
        self._is_paused = False
        self.num_decoded, self.busy_row_s = 0, 0.0
        self.num_recomputed = 0  # tokens of requests that were halted to move, and stayed

    @classmethod
    def check_options(cls, *, python: object = None, url: object = None, **_: object) -> None:
        """Raises ConfigError for options with which there cannot be a server."""
        check(cls.product, python, url)

    # the words of a product

    @abstractmethod
    def _put(self, folder: Path, label: str) -> str:
        """Load `folder`/model.safetensors under the name `label`; the digest of the bytes read."""

    @abstractmethod
    def _ask(self, row: Row) -> tuple[str, Body]:
        """The call, answered by a stream, that continues a row."""

    @abstractmethod
    def _read(self, row: Row, said: Any) -> Word:
        """What an event of the stream says."""

    @abstractmethod
    def _give_up(self, rows: Iterable[Row]) -> None:
        """Have the server end these answers; it may know nothing of them."""

    @abstractmethod
    def _rest(self, is_paused: bool) -> None:
        """Have the server stand still, or go on."""

    # what every engine offers

    @property
    def versions(self) -> Mapping[int, str]:
        return self._held

    @property
    def kv_share(self) -> float:
        num_tokens = sum(len(r.request.prompt_ids) + len(r.token_ids) for r in self._rows.values())
        return num_tokens / (self._max_rows * self._max_context)

    @property
    def can_step(self) -> bool:
        return not self._is_paused and bool(self._rows or self._waiting or self._done)

    def load(self, version: int, source: Tensor) -> str:
        if version in self._held or len(self._held) >= self.num_slots:
            raise EngineError(f"no place for version {version}: version {[*self._held]} is held; drop it")
        if (source.numel(), str(source.dtype)) != (self._layout.numel, f"torch.{self._dtype}"):
            raise EngineError(
                f"version {version} has {source.numel()} weights in {source.dtype}, not {self._layout.numel} "
                f"in {self._dtype}"
            )
        if not self._held:
            self._settle()
        label = f"dora-{version}-{secrets.token_hex(8)}"
        self._held[version], self._labels[version] = self._give(label, source), label
        return self._held[version]

    def _give(self, label: str, source: Tensor) -> str:
        """Have the server take these weights under a name; the digest of what it took."""
        folder = make_store_folder(source.nbytes)
        try:
            write_safetensors(folder / "model.safetensors", self._layout, source)
            return self._put(folder, label)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _drew(self, version: int) -> str:
        """What the server calls the weights that draw a version's tokens."""
        return self._labels[version]

    def drop(self, version: int) -> None:
        self._mover.let_go()
        if version not in self._held:
            raise EngineError(f"version {version} is not held; held: {[*self._held]}")
        own = [row.request for row in self._rows.values()] + [*self._waiting]
        num = sum(request.version == version for request in own) + self._mover.num_arriving_of(version)
        if num:
            raise EngineError(f"version {version} has {num} unfinished requests")
        del self._held[version], self._labels[version]

    def submit(self, requests: Sequence[Request]) -> None:
        reasons = {request.id: self._reason_to_refuse(request) for request in requests}
        self._waiting += [request for request in requests if not reasons[request.id]]
        if refused := {id: reason for id, reason in reasons.items() if reason}:
            raise EngineError(f"requests refused: {refused}", refused)

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        own = [id for id in ids if self.request(id) is not None and self._mover.reclaim(id)]
        given_up = {id: len(self._rows[id].token_ids) if id in self._rows else 0 for id in own}
        self._waiting = deque(request for request in self._waiting if request.id not in given_up)
        self._give_up([row for id in given_up if (row := self._rows.pop(id, None)) and not row.is_still])
        return given_up

    def progress(self) -> dict[RequestId, int]:
        """Those that another engine may have taken by now are left out."""
        waiting = {request.id: 0 for request in self._waiting}
        rows = {id: len(row.token_ids) for id, row in self._rows.items()}
        return {id: num for id, num in (waiting | rows).items() if not self._mover.is_offered(id)}

    def pause(self) -> None:
        self._rest(True)
        self._is_paused = True

    def resume(self) -> None:
        self._rest(False)
        self._is_paused, self._heard_s = False, time.monotonic()

    def rush(self, ids: Iterable[RequestId]) -> None:
        """Not among the capabilities, so it is never asked."""
        raise EngineError("rows do not stand still here; set orchestrator.rush = false")

    def step(self) -> list[Completion]:
        if not self.can_step:
            return []
        began_s = time.monotonic()
        self.server.check()
        self._begin()
        num_rows = sum(not row.is_still for row in self._rows.values())
        self._hear(num_rows, WAIT_S)
        self.busy_row_s += num_rows * (time.monotonic() - began_s)
        if num_rows and began_s - self._heard_s > self._silence_s:
            raise RunError(f"{self.server} has said nothing for {self._silence_s:g} s (silence_s)")
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End a server that was started here."""
        self.server.end()

    # moves

    @property
    def num_moves(self) -> int:
        """Moves under way, out and in."""
        return len(self._mover)

    def receive(self, order: Receive) -> Reserved | NotReceived:
        """Keep a place for a request that another engine is decoding."""
        return self._mover.receive(order)

    def send(self, order: Send) -> Kept | None:
        """Begin to hand a request over. Kept says why that cannot be."""
        return self._mover.send(order)

    def cancel_move(self, move: int) -> None:
        """End a move, at the next poll, if its request has not been taken by then."""
        self._mover.cancel(move)

    def poll_moves(self) -> list[Answer]:
        """Take all moves a step further; what is to be answered."""
        self._hear(len(self._streams), 0.0)
        return self._mover.poll()

    def form(self, version: int) -> KVFormat:
        """See `Holder`."""
        return KVFormat(FORMAT, self._config.digest(), self._held[version], self._dtype, ())

    def request(self, request_id: RequestId) -> Request | None:
        """See `Holder`."""
        if request_id in self._rows:
            return self._rows[request_id].request
        return next((request for request in self._waiting if request.id == request_id), None)

    def reason_not_to_take(self, request: Request) -> str:
        """See `Holder`."""
        num_users = len(self._rows) + len(self._waiting) + self._mover.num_arriving
        if reason := self._reason_to_refuse(request):
            return reason
        return "no row is free" if num_users >= self._max_rows else ""

    def take_up(self, request: Request, draft: Draft) -> None:
        """See `Holder`."""
        logprobs = draft.logprobs.astype(float)
        told = draft.token_ids.tolist(), logprobs[:, 1].tolist(), logprobs[:, 2].tolist()
        self._listen_to(Row(request, "", *told))

    def halted(self, request_id: RequestId) -> Draft | None:
        """See `Holder`. A request that has no row yet, or of which the server has said nothing, goes on."""
        if (row := self._rows.get(request_id)) is None:
            return None
        if not row.is_halting and len(row.token_ids) > row.num_before:
            row.is_halting = True
            self._give_up([row])
        if not row.is_still:
            return None
        version, num_tokens = row.request.version, len(row.token_ids)
        logprobs = np.array([row.logprobs, row.logprobs, row.raw], np.float32).T
        chunks = (Chunk(version, self._held[version], num_tokens),)
        return Draft(np.array(row.token_ids, np.int64), logprobs, chunks)

    def go_on(self, request_id: RequestId) -> None:
        """See `Holder`. What was halted is computed again."""
        row = self._rows.get(request_id)
        if row is not None and row.is_halting:
            self.num_recomputed += len(row.request.prompt_ids) + len(row.token_ids)
            self._listen_to(row)

    def forget(self, request_id: RequestId) -> None:
        """See `Holder`."""
        self._rows.pop(request_id, None)
        self._waiting = deque(request for request in self._waiting if request.id != request_id)

    # answers

    def _begin(self) -> None:
        """Send requests that wait, as far as there are rows."""
        if not self._rows:
            self._heard_s = time.monotonic()
        while self._waiting and len(self._rows) + self._mover.num_arriving < self._max_rows:
            self._listen_to(Row(self._waiting.popleft(), ""))

    def _listen_to(self, row: Row) -> None:
        """Have the server continue what a row has; a thread listens to the answer."""
        told = row.request, secrets.token_hex(8), row.token_ids, row.logprobs, row.raw, len(row.token_ids)
        row = self._rows[row.request.id] = Row(*told)  # another one: late words are of no row any more
        if not self._streams:
            self._heard_s = time.monotonic()
        self._streams.add(row)
        threading.Thread(target=self._listen, args=(row, *self._ask(row)), daemon=True).start()

    def _listen(self, row: Row, path: str, body: Body) -> None:
        """In a thread: pass on what the server says of a request; None is the last word."""
        try:
            for event in self.server.stream(path, body):
                self._said.put((row, event))
        except (EngineError, RunError) as error:
            self._said.put((row, error))
        finally:
            self._said.put((row, None))

    def _hear(self, at_most: int, wait_s: float) -> None:
        """Take what was said, after a short wait for a first word; about a word for each row."""
        for number in range(at_most):
            try:
                row, said = self._said.get(wait_s > 0.0 and not number, wait_s)
            except queue.Empty:
                return
            self._heard_s = time.monotonic()
            if said is None:
                self._streams.discard(row)
            if self._rows.get(row.request.id) is row and not row.is_still:  # else it has ended or is given up
                self._take(row, said)

    def _take(self, row: Row, said: Any) -> None:
        """A word about a request. Raises RunError for one that no answer has."""
        if isinstance(said, Exception):
            raise RunError(f"request {row.request.id}: {said}") from said
        try:
            word = self._read(row, said)
        except (KeyError, TypeError, ValueError):
            raise RunError(f"request {row.request.id}: {self.server} gave no answer, but {said}") from None
        is_raw = row.request.sampling.temperature in (0.0, 1.0)  # a server tells one kind only
        row.token_ids += word.token_ids
        row.logprobs += word.logprobs
        row.raw += word.logprobs if is_raw else [math.nan] * len(word.logprobs)
        self.num_decoded += len(word.token_ids)
        if word.finish_reason is not None:
            self._end(row, word)

    def _end(self, row: Row, word: Word) -> None:
        """Raises RunError for an answer that is not of the version it began with, and no other (C1)."""
        num_tokens, version, reason = len(row.token_ids), row.request.version, word.finish_reason
        is_ended = reason in ("stop", "length") or (reason == "abort" and row.is_halting)
        if not is_ended or not len(row.logprobs) == len(row.raw) == num_tokens:
            raise RunError(f"request {row.request.id} ended as no answer does: {word}")
        label = self._drew(version)
        if word.spans != [{"version": label, "start": 0, "end": num_tokens - row.num_before}]:
            raise RunError(
                f"request {row.request.id} is of version {version}, {label} at {self.server}, which "
                f"says that the weights were {word.spans}; does somebody else use it?"
            )
        if reason == "abort":
            row.is_still = True
            return
        del self._rows[row.request.id]
        self._mover.finished(row.request.id)
        self._done.append(self._completion(row, str(reason)))

    def _completion(self, row: Row, reason: str) -> Completion:
        version = row.request.version
        return Completion(
            id=row.request.id,
            version=version,
            prompt_ids=row.request.prompt_ids,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            unfiltered_logprobs=row.logprobs,
            raw_logprobs=row.raw,
            chunks=(Chunk(version, self._held[version], len(row.token_ids)),),
            finish_reason=reason,
        )

    def _settle(self) -> None:
        """Return once the server works on nothing: weights are never changed under a request."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while self._streams:
            self._hear(len(self._streams), WAIT_S)
            self._give_up(self._streams)  # again: it may have come to the server after it was given up
            if time.monotonic() > deadline_s:
                raise RunError(f"{self.server} goes on with {len(self._streams)} requests given up")

    def _reason_to_refuse(self, request: Request) -> str:
        if request.version not in self._held:
            return f"version {request.version} is not held; held: {[*self._held]}"
        if not all(0 <= token < self._config.vocab_size for token in request.prompt_ids):
            return "its prompt has token ids that the model does not have"
        if request.max_length > self._max_context:
            return f"it may have {request.max_length} tokens, over max_context = {self._max_context}"
        return ""
