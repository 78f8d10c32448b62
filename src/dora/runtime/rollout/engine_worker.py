"""The process of an inference engine: a loop over the driver's messages, weight loads and decode steps.

Heavy imports are inside functions, because the driver imports this module too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from dora.core.types import RequestId
from dora.engine.interface import InferenceEngine, LoadsFiles, RecomputesKV, SupportsWarmUp
from dora.engine.messages import (
    ContinuesOutputs,
    MigratesBetweenMachines,
    OutputPart,
    SharesKV,
    SupportsEpisodes,
    SupportsMigration,
)
from dora.engine.request import EngineError, Request
from dora.errors import ModelError
from dora.metrics.rollout import EngineUsage
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import HEARTBEAT_S, WorkerInbox, WorkerOutbox
from dora.weights.store import Prefetcher, VersionSource, WeightStore

if TYPE_CHECKING:
    from dora.engine.engine import Engine

LOAD_ERRORS = (EngineError, ModelError, OSError, RuntimeError)  # a file is missing or damaged
Heartbeats = Callable[[], AbstractContextManager[None]]
IDLE_WAIT_S = 0.25  # for a message, without any work
MIN_POLL_WAIT_S = 0.0001  # for a message, while only migrations or a weight load are in progress
MAX_POLL_WAIT_S = 0.001  # each wait is twice as long as the last one, until there is a message or a reply


def run_engine(outbox: WorkerOutbox, inbox: WorkerInbox, spec: m.EngineSpec) -> None:
    """Run an engine until `Shutdown`: handle messages, advance loads and migrations, step."""
    import torch

    torch.set_num_threads(1)
    with outbox.heartbeats():
        engine = build_engine(spec)
        if isinstance(engine, SupportsWarmUp):
            engine.warm_up()
    loader = _make_weight_loader(engine, spec, outbox.heartbeats)
    migrating = engine if isinstance(engine, SupportsMigration) else None
    multi_turn = engine if isinstance(engine, SupportsEpisodes) else None
    continues_outputs = isinstance(engine, ContinuesOutputs)
    outbox.send(replace(_ready_message(engine, spec), continues_outputs=continues_outputs))
    at_start = _usage(engine)
    reports = _reports(engine, at_start)
    outputs = None
    if isinstance(engine, ContinuesOutputs) and spec.output_interval_s:
        outputs = OutputReporter(engine, spec.output_interval_s)
    poll_wait_s = MIN_POLL_WAIT_S
    while True:
        is_polling = loader.is_busy or (migrating is not None and migrating.num_migrations > 0)
        wait_s = 0.0 if engine.can_step else poll_wait_s if is_polling else IDLE_WAIT_S
        poll_wait_s = min(2 * poll_wait_s, MAX_POLL_WAIT_S)
        replies: list[object] = []
        for message in inbox.receive(wait_s):
            if isinstance(message, m.Shutdown):
                return
            poll_wait_s = MIN_POLL_WAIT_S
            if outputs:
                outputs.on_message(message)
            if (reply := _handle(engine, loader, message)) is not None:
                replies.append(reply)
        replies += loader.poll()
        if migrating and migrating.num_migrations:
            replies += migrating.poll_migrations()
        if replies:
            poll_wait_s = MIN_POLL_WAIT_S
            outbox.send(*replies)
        if engine.can_step and (completions := engine.step()):
            stored = [completion.without_filtered_logprobs() for completion in completions]
            outbox.send(m.RequestsCompleted(stored, _usage(engine).since(at_start)))
        if multi_turn and (turns := multi_turn.pop_finished_turns()):
            # In one message: a turn is durable before its environment acts on it.
            parts = outputs.new_parts({turn.request_id for turn in turns}) if outputs else []
            outbox.send(m.OutputsReported(parts), m.TurnsCompleted(turns))
        if (report := next(reports)) is not None:
            outbox.send(report)
        if outputs and (parts := outputs.due_parts()):
            outbox.send(m.OutputsReported(parts))


def build_engine(spec: m.EngineSpec) -> InferenceEngine:
    """The engine of a spec."""
    if spec.backend is not None:
        from dora.runtime.process import backends

        return backends.make_engine(spec)
    from dora.data.tokenizer import Tokenizer
    from dora.engine.engine import Engine
    from dora.model.pretrained import load_config
    from dora.runtime.process.remote_kv import RemoteKVTransport, shared_clock
    from dora.runtime.process.resources import use_device

    device = use_device(spec.device)
    return Engine(
        load_config(spec.model),
        max_rows=spec.max_rows,
        max_context=spec.max_context,
        version_slots=spec.version_slots,
        num_blocks=spec.num_kv_blocks,
        prefill_budget=spec.prefill_budget,
        kernels=spec.kernels,
        pace_s=spec.pace_s,
        detokenize=Tokenizer(spec.model).decode if spec.reads_text else None,
        returns_routes=spec.returns_routes,
        exact=spec.exact,
        device=device,
        dtype=spec.dtype,
        inflight_update=spec.inflight_update,
        pool=spec.pool,
        kv_transfer=spec.kv_transfer,
        transport=None if spec.host is None else RemoteKVTransport(spec.broker),
        clock=time.monotonic if spec.host is None else shared_clock,
    )


def _make_weight_loader(engine: InferenceEngine, spec: m.EngineSpec, heartbeats: Heartbeats) -> WeightLoader:
    store = spec.remote_weights or WeightStore(spec.weights, spec.dtype)
    prefetches = spec.prefetches_weights and not isinstance(engine, LoadsFiles)
    prefetcher = Prefetcher(store, spec.device != "cpu") if prefetches else None
    return WeightLoader(engine, store, prefetcher, heartbeats)


def _ready_message(engine: InferenceEngine, spec: m.EngineSpec) -> m.WorkerReady:
    """Make the ready message; also starts to serve the engine's KV if the run has other machines."""
    from dora.engine.engine import Engine
    from dora.runtime.process.remote_kv import serve_kv

    if not isinstance(engine, Engine):
        return m.WorkerReady(
            engine.kernels,
            engine.kv_pool if isinstance(engine, SharesKV) else None,
            engine.kv_address if isinstance(engine, MigratesBetweenMachines) else None,
        )
    if engine.shared_kv is None:
        return m.WorkerReady(engine.kernels)
    blocks = engine.shared_kv.blocks
    address = None if spec.host is None or blocks is None else serve_kv(spec.host, blocks).address
    return m.WorkerReady(engine.kernels, spec.pool, address)


def _handle(engine: InferenceEngine, loader: WeightLoader, message: Any) -> object | None:
    """Handle a message of the driver; returns the reply, if there is one at once."""
    match message:
        case m.PrefetchWeights(version):
            loader.prefetch(version)
        case m.LoadWeights(version):
            loader.load(version)
        case m.DropWeights(version):
            loader.drop(version)
        case m.SubmitRequests(requests, outputs):
            loader.wait_for({request.version for request in requests})
            try:
                if outputs and isinstance(engine, ContinuesOutputs):
                    engine.submit(requests, outputs)
                else:
                    engine.submit(requests)
            except EngineError as error:
                return m.RequestsRejected(error.rejected)
        case m.AbortRequests(requests):
            return m.AbortsCompleted(engine.abort(requests))
        case m.ReserveMigration() | m.StartExport() | m.CancelMigration():
            return _handle_migration(engine, message)
        case m.ContinueEpisode() | m.EndEpisode() | m.FailRequest():
            return _handle_episode(engine, message)
        case m.SetDecodeOnly(ids):
            engine.decode_only(ids)
        case m.PauseDecoding():
            engine.pause()
            return m.DecodingPaused()
        case m.ResumeDecoding():
            engine.resume()
    return None


def _handle_migration(
    engine: InferenceEngine, message: m.ReserveMigration | m.StartExport | m.CancelMigration
) -> object | None:
    migrating = cast(SupportsMigration, engine)  # the driver knows; `isinstance` takes longer than the call
    match message:
        case m.ReserveMigration():
            return migrating.reserve_migration(message)
        case m.StartExport():
            return migrating.start_export(message)
        case m.CancelMigration(migration_id):
            migrating.cancel_migration(migration_id)
    return None


def _handle_episode(
    engine: InferenceEngine, message: m.ContinueEpisode | m.EndEpisode | m.FailRequest
) -> m.RequestsRejected | None:
    """A request that cannot continue is aborted, and its rejection returned."""
    assert isinstance(engine, SupportsEpisodes), f"{message} for an engine without episodes"
    try:
        match message:
            case m.ContinueEpisode(request_id, token_ids):
                engine.continue_episode(request_id, token_ids)
            case m.EndEpisode(request_id):
                engine.end_episode(request_id)
            case m.FailRequest(_, reason):
                raise EngineError(reason)
    except EngineError as error:
        engine.abort([message.request_id])
        return m.RequestsRejected({message.request_id: str(error)})
    return None


def _usage(engine: InferenceEngine) -> EngineUsage:
    """The engine's counters, by its own clock."""
    return EngineUsage(engine.busy_row_s, time.perf_counter())


def _reports(engine: InferenceEngine, at_start: EngineUsage) -> Iterator[m.EngineReport | None]:
    """Yield a report every HEARTBEAT_S, else None. Usage counts from `at_start`."""
    next_s, num_decoded, busy_row_s = 0.0, 0, 0.0
    while True:
        if time.monotonic() < next_s:
            yield None
            continue
        next_s = time.monotonic() + HEARTBEAT_S
        num_new_tokens, new_busy_row_s = engine.num_decoded - num_decoded, engine.busy_row_s - busy_row_s
        num_decoded, busy_row_s = engine.num_decoded, engine.busy_row_s
        row_tokens_per_s = num_new_tokens / new_busy_row_s if num_new_tokens else 0.0
        num_recomputed = engine.num_recomputed if isinstance(engine, RecomputesKV) else 0
        usage = _usage(engine).since(at_start)
        yield m.EngineReport(engine.progress(), usage, row_tokens_per_s, engine.kv_usage, num_recomputed)


class OutputReporter:
    """Finds the tokens of unfinished outputs that the driver does not have yet."""

    def __init__(self, engine: ContinuesOutputs, interval_s: float) -> None:
        self._engine, self._interval_s, self._next_s = engine, interval_s, 0.0
        self._num_reported: dict[RequestId, int] = {}

    def on_message(self, message: object) -> None:
        """Report the outputs of requests that come to this engine from their first token.

        A request may have been here before, and have started again since.
        """
        requests: Iterable[Request] = ()
        if isinstance(message, m.SubmitRequests):
            requests = message.requests
        elif isinstance(message, m.ReserveMigration):
            requests = [message.request]
        for request in requests:
            self._num_reported.pop(request.id, None)

    def due_parts(self) -> list[OutputPart]:
        """The new tokens of all requests once per interval, else none."""
        if time.monotonic() < self._next_s:
            return []
        self._next_s = time.monotonic() + self._interval_s
        return self.new_parts()

    def new_parts(self, ids: Collection[RequestId] | None = None) -> list[OutputPart]:
        """The new tokens of each of these requests; None: of all. All are of one version's weights."""
        parts: list[OutputPart] = []
        outputs = {i: each for i, each in self._engine.partial_outputs(ids).items() if len(each.chunks) == 1}
        for request, output in outputs.items():
            (chunk,), start = output.chunks, self._num_reported.get(request, 0)
            if start < chunk.num_tokens:
                tokens = output.token_ids[start:].astype(np.int32)
                logprobs = output.logprobs[start:]
                parts.append(OutputPart(request, chunk.version, chunk.digest, start, tokens, logprobs))
        lengths = {request: len(output.token_ids) for request, output in outputs.items()}
        self._num_reported = lengths if ids is None else self._num_reported | lengths
        return parts


class _PendingLoad(NamedTuple):
    """A version that the engine reads, or whose bytes it has and whose digest is being computed."""

    engine: Engine | LoadsFiles
    version: int
    digest: Future[str]
    stop_s: float  # how long decoding paused


class WeightLoader:
    """Loads and drops versions of one engine in the order of the driver's messages.

    With a `Prefetcher` a version is copied from host memory, so decoding pauses for one copy only. A thread
    computes the digest of the engine's bytes, and the version takes requests once that is known. An engine
    that reads files does so in a thread, too.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        store: VersionSource,
        prefetcher: Prefetcher | None = None,
        heartbeats: Heartbeats = nullcontext,
    ) -> None:
        """`heartbeats` makes a context that sends them while a load blocks the engine's process."""
        self._engine, self._store, self._prefetcher = engine, store, prefetcher
        self._heartbeats = heartbeats
        self._pending: _PendingLoad | None = None
        self._replies: list[object] = []

    @property
    def is_busy(self) -> bool:
        """Whether a load has begun and is not finished."""
        return self._pending is not None

    def prefetch(self, version: int) -> None:
        """Copy a published version to host memory, because it may have to be loaded."""
        if self._prefetcher is not None:
            self._prefetcher.prefetch(version)

    def load(self, version: int) -> None:
        """Begin to load a version; `poll` returns the reply."""
        self._finish()
        was_decoding, start_s = self._engine.can_step, time.perf_counter()
        try:
            with self._heartbeats():
                digest = self._copy(version)
        except LOAD_ERRORS as error:
            self._replies.append(m.LoadRejected(version, str(error)))
            return
        stop_s = time.perf_counter() - start_s if was_decoding else 0.0
        if isinstance(digest, str):
            self._replies.append(m.WeightsLoaded(version, digest, stop_s))
        else:
            self._pending = digest._replace(stop_s=stop_s)

    def drop(self, version: int) -> None:
        """Unload a version, if it is loaded."""
        self.wait_for({version})
        if version in self._engine.versions:
            self._engine.drop(version)

    def wait_for(self, versions: Container[int]) -> None:
        """Finish the load in progress if it is of one of these versions."""
        if self._pending is not None and self._pending.version in versions:
            self._finish()

    def poll(self) -> list[object]:
        """New replies: `WeightsLoaded` or `LoadRejected` for each load."""
        if self._pending is not None and self._pending.digest.done():
            self._finish()
        replies, self._replies = self._replies, []
        return replies

    def _copy(self, version: int) -> str | _PendingLoad:
        """The digest, if the load is finished at once."""
        from dora.engine.engine import Engine

        if isinstance(self._engine, LoadsFiles) and isinstance(self._store, WeightStore):
            reading = self._engine.start_load(version, self._store.path(version))
            return _PendingLoad(self._engine, version, reading, stop_s=0.0)
        if self._prefetcher is None:
            return self._engine.load(version, self._store.fetch(version))
        source = self._prefetcher.fetch(version)
        if not isinstance(self._engine, Engine):
            return self._engine.load(version, source)
        digest = self._prefetcher.digest(self._engine.copy_to_slot(version, source))
        return _PendingLoad(self._engine, version, digest, stop_s=0.0)

    def _finish(self) -> None:
        """Wait for the end of the load in progress, and activate its version unless the load has failed."""
        if self._pending is None:
            return
        (engine, version, digest, stop_s), self._pending = self._pending, None
        try:
            with self._heartbeats():
                computed = digest.result()
            reply: object = m.WeightsLoaded(version, engine.activate(version, computed), stop_s)
        except LOAD_ERRORS as error:
            reply = m.LoadRejected(version, str(error))
        self._replies.append(reply)
