"""An inference engine behind an HTTP server: token ids in, token ids and log-probs out.

A subclass implements the calls of one kind of server. One thread reads each response. The weights of a server
with one version slot change only while it generates nothing. Running requests migrate: the tokens generated
so far become part of the prompt, which the server prefills unless it imports the KV. So do those of a request
whose engine was lost, and the next turn of an episode, of which the server's prefix cache has most. With
`inflight_update`, running requests continue with each newer version, as in DORA-RL's own engine.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dora.core.types import Chunk, RequestId
from dora.data.tokenizer import Tokenizer
from dora.engine.backends.kv_exchange import KVExchange, check_kv_connector
from dora.engine.backends.server import EngineServer, JsonBody, ServerKind
from dora.engine.decode_batch import (
    Detokenize,
    PartialOutput,
    can_continue,
    ends_with_stop_string,
    turn_end,
    turn_start_of,
)
from dora.engine.interface import Capabilities
from dora.engine.kv_transfer.handoff import FORMAT_VERSION, ExportedKV, KVFormat, TransferError
from dora.engine.kv_transfer.server_migrator import HaltedRequest, ServerMigrator
from dora.engine.messages import (
    ExportFailed,
    ImportFailed,
    MigrationReply,
    OpenHandoff,
    ReserveMigration,
    StartExport,
    TurnFinished,
)
from dora.engine.request import Completion, EngineError, Request, SamplingParams, check_observation
from dora.errors import RunError
from dora.model.pretrained import load_config
from dora.model.weights import WeightLayout
from dora.weights.store import WeightStore, make_store_folder
from dora.weights.version_file import read_header

STEP_WAIT_S = 0.02  # the longest that a step waits for the server
MIGRATING_WAIT_S = 0.001  # the same while requests migrate, which pause meanwhile
IMPORT_TIMEOUT_S = 30.0  # the longest that a server may take to the first token after the KV that it imports
LOAD_PART_BYTES = 2**28  # loaded between two steps of a server with several slots; a layer may be larger
LOAD_CHECK_S = 1.0  # between two checks that a server which loads still responds
# Tokens of a response that a server sends at once. Each event costs time, and after a stop string, which only
# the engine sees, the server generates until the next event in vain.
STREAM_INTERVAL, STOP_STRING_INTERVAL = 32, 8
ABORT_TIMEOUT_S = 30.0  # the longest that the server may generate for requests that were aborted


class StreamDelta(NamedTuple):
    """An event of a response: new tokens, their log-probs, and in the last event why the response ended.

    `weight_spans` are the labels of the weights that generated the response so far, as in vLLM's
    `weight_versions`. The last event has them, and the `routes` of prompt and response, see `Completion`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None = None
    weight_spans: Sequence[Mapping[str, Any]] | None = None
    routes: NDArray[np.int16] | None = None


@dataclass(eq=False)
class ServerRequest:
    """A request that waits, or at the server.

    The server generates all tokens but the first `num_prefix_tokens`, which it gets as a part of the prompt.
    """

    request: Request
    server_id: str = ""
    # Arrays, of which a copy for NumPy costs little.
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    raw_logprobs: array[float] = field(default_factory=lambda: array("d"))  # at temperature 1, NaN: unknown
    num_prefix_tokens: int = 0
    num_proven: int = 0  # tokens whose weights the server has listed, and those before this response
    num_discarded: int = 0  # tokens that the server has generated after the end of a stop string
    is_stopped: bool = False  # its text has a stop string
    is_halting: bool = False  # the server has been asked to abort it, for a migration
    halting_since_s: float = 0.0
    is_halted: bool = False  # and its response has ended
    routes: NDArray[np.int16] | None = None  # see `Completion`; once its response has ended
    # With `inflight_update`:
    chunks: list[Chunk] = field(default_factory=list)  # of the tokens before this response
    sent_version: int = 0  # its version as this response began
    is_renewing: bool = False  # it has been aborted, and continues with `request.version` in another response
    kv_folder: Path | None = None  # the KV that the server imports
    waiting_since_s: float = 0.0  # for its first token: since this response began, or the engine resumed
    # Of an episode:
    turn_start: int = 0  # number of the current turn's first token
    num_observed: int = 0  # observation tokens before this turn, if the server has read those before them
    turn_reason: str = ""  # why its last turn has ended; it then waits for an observation

    @property
    def prompt_ids(self) -> list[int]:
        """What the server continues."""
        return [*self.request.prompt_ids, *self.token_ids[: self.num_prefix_tokens]]

    @property
    def max_tokens(self) -> int:
        """How many tokens the server may generate."""
        sampling = self.request.sampling
        turn_tokens = sampling.max_turn_tokens or sampling.max_tokens
        return min(self.turn_start + turn_tokens, sampling.max_tokens) - self.num_prefix_tokens

    @property
    def num_generated(self) -> int:
        """How many tokens the server has generated."""
        return len(self.token_ids) - self.num_prefix_tokens + self.num_discarded

    @property
    def turn_ids(self) -> list[int]:
        """The tokens of the current turn so far."""
        return self.token_ids[self.turn_start :].tolist()

    @property
    def weights_version(self) -> int:
        """The version that the server may still need for it."""
        return self.sent_version if self.is_renewing else self.request.version

    @property
    def is_generating(self) -> bool:
        return not self.is_halted and not self.turn_reason


@dataclass(kw_only=True, eq=False, repr=False)
class HttpEngine(ABC):
    """An `InferenceEngine` whose work is done by a server; its fields are the arguments of the engine.

    It starts a server with the interpreter `python` and additional `arguments`, or uses the one at `url`. A
    started server divides the model among `num_gpus` GPUs, of which `device` is the first.

    Requests migrate with their KV through the folder `pool`, in memory; None: without. A started server reads
    the KV of others from files there or, with kv_connector = "nixl", from their memory; those of other
    machines reach it at `host`, if that is given.

    The engine is lost if the server sends nothing for `silence_s` while it has requests or loads.
    `inflight_update`: see `InferenceFactory`.
    """

    model: str
    max_rows: int
    max_context: int
    version_slots: int
    device: str
    dtype: str
    python: str | None = None
    url: str | None = None
    arguments: Sequence[str] = ()
    silence_s: float = 60.0
    num_gpus: int = 1
    kv_connector: str = "files"
    host: str | None = None
    pool: Path | None = None
    inflight_update: str | None = None

    server_kind: ClassVar[ServerKind]
    capabilities = Capabilities(
        max_versions=None,
        decode_only=2,
        episodes=True,
        inflight_update=True,
        eval_filters=True,
        stop_strings=True,
        pauses=True,
        migrates_without_kv=True,
        kv_transfer=True,
        tensor_parallel=True,
        dtypes=("float32", "bfloat16"),
        devices=("cpu", "cuda"),
    )
    returns_routes = False  # whether completions have the experts of each token

    def __post_init__(self) -> None:
        self.server_kind.check_options(self.python, self.url)
        self.server = self._start(self.python) if self.python is not None else self._attach(str(self.url))
        self._chunks: dict[str, Chunk] = {}  # by label: version and digest of all versions so far, no tokens
        self._config = load_config(Path(self.model))
        self._layout = WeightLayout(self._config)
        self._digests: dict[int, str] = {}  # of the versions that the server holds
        self._labels: dict[int, str] = {}  # and their names there, also of one that is being loaded
        self._load_thread, self._watch_thread = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._waiting: dict[RequestId, ServerRequest] = {}  # for a row, in order
        self._running: dict[RequestId, ServerRequest] = {}
        self._open_streams: set[ServerRequest] = set()  # for which the server may still generate
        self._prioritized: frozenset[RequestId] = frozenset()
        self._is_decode_only_due = False  # the server does not know all ids of prioritized requests yet
        self._events: queue.SimpleQueue[tuple[ServerRequest, Any]] = queue.SimpleQueue()
        self._completions: list[Completion] = []
        self._finished_turns: list[TurnFinished] = []
        self._migrator = ServerMigrator(self)
        self._kv: KVExchange | None = None  # if the server exports KV
        self._last_event_s = 0.0
        self._is_paused = False
        self.num_decoded, self.busy_row_s = 0, 0.0
        self.num_recomputed = 0  # tokens prefilled again though their KV existed here, or was to be imported
        self.kernels = self._use_server()
        if self.url is not None:
            self._reset_server()

    @classmethod
    def check_options(
        cls, *, python: object = None, url: object = None, kv_connector: object = "files", **_: object
    ) -> None:
        """Raises ConfigError for options of `engine.options` with which no server can be used."""
        check_kv_connector(kv_connector, python)
        cls.server_kind.check_options(python, url)
        if isinstance(python, str):
            cls.server_kind.check_installed(python)

    def _use_plugins(self, info: Mapping[str, Any]) -> None:
        """Use the server as DORA-RL's plugins in it describe it. Raises EngineError if it does not fit."""
        self.server.check_plugins(info, self.dtype, self._num_server_slots)
        self.num_slots = self.version_slots
        self._is_multi_version = info["version_slots"] > 1  # however many slots this engine may use
        if self.pool is not None and info.get("kv_layout"):
            address = self.host if self.kv_connector == "nixl" else None
            self._kv = KVExchange(self.pool, tuple(info["kv_layout"]), info["kv_workers"], address)

    @property
    def _num_server_slots(self) -> int:
        """Slots for full weights that the server needs."""
        return self.version_slots

    # the calls of one kind of server

    @abstractmethod
    def _start(self, python: str) -> EngineServer:
        """Start a server. Raises EngineError or ConfigError if it cannot compute the model, RunError."""

    @abstractmethod
    def _attach(self, url: str) -> EngineServer:
        """Use a server that is already running."""

    @abstractmethod
    def _use_server(self) -> str:
        """Check the server, and call `_use_plugins`. Returns the server's name and device, for the log."""

    @abstractmethod
    def _reset_server(self) -> None:
        """End what another engine or client has set at the server."""

    @abstractmethod
    def _send_file(self, label: str, path: Path) -> str:
        """Load a version's file into the server under the name `label`. Returns the digest of what it has
        read.
        """

    @property
    def _max_part_bytes(self) -> int:
        """How many bytes to load at once. With several slots, the server generates between two parts."""
        return LOAD_PART_BYTES if self._is_multi_version else 2**62

    def _send_weights(self, label: str, source: Tensor) -> str:
        """As `_send_file`, of weights that are in no file."""
        store = WeightStore(make_store_folder(source.nbytes), self.dtype, self._layout.shapes)
        try:
            store.publish(0, source)
            return self._send_file(label, store.path(0))
        finally:
            store.close()

    @abstractmethod
    def _generate_call(self, running: ServerRequest) -> tuple[str, JsonBody]:
        """Path and body of the streaming call that generates for a request."""

    @abstractmethod
    def _parse_event(self, running: ServerRequest, event: Any) -> StreamDelta:
        """Raises KeyError, TypeError or ValueError for an event of another form."""

    def _kv_folders(self, running: ServerRequest) -> dict[str, str]:
        """DORA-RL's parameters of a request: where its KV goes once an export is ordered, and comes from."""
        folders = {}
        if self._kv is not None:
            folders["dora_export"] = str(self._kv.folder_of(running.server_id))
        if running.kv_folder is not None:
            folders["dora_import"] = str(running.kv_folder)
        return folders

    def _num_prefilled(self, event: Any) -> int | None:
        """Tokens of the prompt that the server has prefilled, if an event says that instead of tokens."""
        return None

    @abstractmethod
    def _abort_streams(self, streams: Iterable[ServerRequest]) -> None:
        """Abort these requests at the server, which may not have received them yet."""

    @abstractmethod
    def _send_decode_only(self, server_ids: Sequence[str]) -> None:
        """Let a server with several versions decode only these requests until none is left; none: all."""

    @abstractmethod
    def _keep_kv(self, version: int) -> None:
        """Let a server with several versions continue all requests but held-out ones with this one."""

    @abstractmethod
    def _unload(self, label: str) -> None:
        """No request needs the version of this name any more; the server may still generate for some."""

    @abstractmethod
    def _set_paused(self, is_paused: bool) -> None:
        """Pause or resume generation at the server."""

    # InferenceEngine

    @property
    def versions(self) -> Mapping[int, str]:
        return self._digests

    @property
    def kv_usage(self) -> float:
        num_tokens = sum(len(r.request.prompt_ids) + len(r.token_ids) for r in self._running.values())
        return num_tokens / (self.max_rows * self.max_context)

    @property
    def can_step(self) -> bool:
        is_active = any(not running.turn_reason for running in self._running.values())
        return not self._is_paused and bool(is_active or self._waiting or self._completions)

    def load(self, version: int, source: Tensor) -> str:
        dtype = str(source.dtype).removeprefix("torch.")
        if (source.numel(), dtype) != (self._layout.numel, self.dtype):
            raise EngineError(
                f"version {version} has {source.numel()} weights in {dtype}; the model has "
                f"{self._layout.numel} in {self.dtype}"
            )
        loading = self._start_load(version, lambda label: self._send_weights(label, source))
        return self.activate(version, loading.result())

    def start_load(self, version: int, path: Path) -> Future[str]:
        """See `LoadsFiles`. Raises EngineError for a file of another model, and as `read_header` does."""
        header = read_header(path)
        if (header.shapes, header.dtype) != (self._layout.shapes, self.dtype):
            raise EngineError(
                f"{path} has {header.numel} weights of {len(header.shapes)} tensors in {header.dtype}, which "
                f"are not those of the model: {self._layout.numel} of {len(self._layout.shapes)} in "
                f"{self.dtype}"
            )
        return self._start_load(version, lambda label: self._send_file(label, path))

    def activate(self, version: int, digest: str) -> str:
        """See `LoadsFiles`."""
        self._digests[version] = digest
        self._chunks[self._weights_label(version)] = Chunk(version, digest, 0)
        if self.inflight_update is not None:
            self._continue_with_newest()
        return digest

    def _continue_with_newest(self) -> None:
        """Continue all requests but held-out ones with the newest version."""
        newest = max(self._digests)
        for waiting in self._waiting.values():
            waiting.request = _with_version(waiting.request, newest)
        self._completions = [
            each if each.id.is_held_out else replace(each, version=newest) for each in self._completions
        ]
        older = [each for each in self._running.values() if each.request.version < newest]
        older = [each for each in older if not each.request.id.is_held_out]
        for running in older:
            running.request = _with_version(running.request, newest)
            running.is_renewing = self.inflight_update == "partial"
        if self.inflight_update == "partial":
            self._abort_streams(older)
        elif self._is_multi_version:
            self._keep_kv(newest)

    def _keeps_version(self, running: ServerRequest) -> bool:
        """Whether the server must not continue a request with other weights, which `_keep_kv` lets it do."""
        return self.inflight_update == "inflight" and running.request.id.is_held_out

    def _start_load(self, version: int, send: Callable[[str], str]) -> Future[str]:
        """Load a version by `send`, which gets its name at the server and returns its digest.

        A server with one version has no work meanwhile, and would not answer other calls: then return at the
        end of the load.
        """
        if version in self._digests or len(self._digests) >= self.num_slots:
            raise EngineError(
                f"no free slot for version {version}: {[*self._digests]} are loaded and num_slots = "
                f"{self.num_slots}; drop one"
            )
        self._wait_for_dropped_versions()
        self._labels[version] = f"dora-{version}-{secrets.token_hex(8)}"
        sending = self._load_thread.submit(send, self._labels[version])
        loading = self._watch_thread.submit(self._watch_load, sending)
        if self.num_slots == 1:
            loading.result()
        return loading

    def _watch_load(self, sending: Future[str]) -> str:
        """In a thread: wait for the end of a load. Raises RunError if the server stops responding meanwhile.

        A load may take minutes, and other calls need not succeed before its end.
        """
        try:
            while True:
                try:
                    return sending.result(LOAD_CHECK_S)
                except TimeoutError:
                    self.server.check_responds(self.silence_s)
        finally:
            self._last_event_s = time.monotonic()

    def _weights_label(self, version: int) -> str:
        """The server's name for the weights in the spans of this version's responses."""
        return self._labels[version]

    def drop(self, version: int) -> None:
        self._migrator.release_imported()
        if version not in self._digests:
            raise EngineError(f"version {version} is not loaded; loaded: {[*self._digests]}")
        num_unfinished = sum(each.request.version == version for each in self._unfinished.values())
        if num_unfinished := num_unfinished + self._migrator.num_reserved_of(version):
            raise EngineError(f"version {version} has {num_unfinished} unfinished requests")
        del self._digests[version]
        label = self._labels.pop(version)
        if self.inflight_update == "inflight" and version > max(self._digests, default=version):
            self._keep_kv(max(self._digests))
        self._unload(label)

    def submit(
        self, requests: Collection[Request], outputs: Mapping[RequestId, PartialOutput] | None = None
    ) -> None:
        """See `ContinuesOutputs`. With `inflight_update`, requests of an older version start with the newest
        one, and no output is continued.
        """
        if self.inflight_update is not None and self._digests:
            newest = max(self._digests)
            requests = [r if r.version > newest else _with_version(r, newest) for r in requests]
        reasons = {request.id: self._reason_to_reject(request) for request in requests}
        for request in requests:
            if not reasons[request.id]:
                self._add(request, (outputs or {}).get(request.id))
        if rejected := {id: reason for id, reason in reasons.items() if reason}:
            raise EngineError(f"requests rejected: {rejected}", rejected)

    def _add(self, request: Request, output: PartialOutput | None) -> None:
        """Let a request wait for a row or, after a whole turn, for its observation."""
        digest, is_fixed = self._digests[request.version], self.inflight_update is None
        may_continue = is_fixed and not self.returns_routes  # else it starts again
        if output is None or not may_continue or not can_continue(request, output, digest):
            self._waiting[request.id] = ServerRequest(request)
            return
        continued = _continued(request, output)
        detokenize = self._detokenize if request.sampling.stop_strings else None
        continued.turn_reason = turn_end(request, output, detokenize)
        (self._running if continued.turn_reason else self._waiting)[request.id] = continued

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        own = [id for id in ids if self.find_request(id) is not None and self._migrator.reclaim(id)]
        unfinished = self._unfinished
        aborted = {id: len(unfinished[id].token_ids) for id in own}
        popped = [running for id in aborted if (running := self._running.pop(id, None))]
        self._waiting = {id: waiting for id, waiting in self._waiting.items() if id not in aborted}
        self._abort_streams([running for running in popped if running.is_generating])
        for running in popped:
            self._withdraw_export(running)
        return aborted

    def progress(self) -> dict[RequestId, int]:
        """Requests that another engine may have imported are omitted."""
        owned = {id: r for id, r in self._unfinished.items() if not self._migrator.is_exported(id)}
        return {id: len(unfinished.token_ids) for id, unfinished in owned.items()}

    @property
    def _unfinished(self) -> dict[RequestId, ServerRequest]:
        """The requests that have not been completed; they may be exported."""
        return self._waiting | self._running

    # ContinuesOutputs

    def partial_outputs(self, ids: Collection[RequestId] | None = None) -> dict[RequestId, PartialOutput]:
        """The tokens whose weights the server has listed. None with in-flight updates, or if the experts of
        their tokens are needed, too.
        """
        if self.inflight_update is not None or self.returns_routes:
            return {}
        chosen = {id: r for id, r in self._unfinished.items() if ids is None or id in ids}
        return {
            id: self._output_of(unfinished)
            for id, unfinished in chosen.items()
            # An output that ends with a stop string is finished, though the server's response is not.
            if unfinished.num_proven and (unfinished.turn_reason or not unfinished.is_stopped)
            if not self._migrator.is_exported(id)
        }

    def _output_of(self, unfinished: ServerRequest) -> PartialOutput:
        """A copy of the tokens whose weights are known."""
        num_tokens, version = unfinished.num_proven, unfinished.request.version
        columns = [unfinished.logprobs, unfinished.logprobs, unfinished.raw_logprobs]
        return PartialOutput(
            np.array(unfinished.token_ids[:num_tokens], np.int64),
            np.array([column[:num_tokens] for column in columns], np.float32).T,
            (Chunk(version, self._digests[version], num_tokens),),
        )

    def pause(self) -> None:
        self._set_paused(True)
        self._is_paused = True

    def resume(self) -> None:
        self._set_paused(False)
        self._is_paused, self._last_event_s = False, time.monotonic()
        for running in self._running.values():
            running.waiting_since_s = self._last_event_s

    def decode_only(self, ids: Iterable[RequestId]) -> None:
        """Raises EngineError for any ids if the server has one version slot."""
        prioritized = frozenset(ids)
        if prioritized and not self._is_multi_version:
            raise EngineError(
                "a server with one version slot cannot decode some requests only; set "
                "orchestrator.prioritize_stragglers = false"
            )
        self._prioritized, self._is_decode_only_due = prioritized, self._is_multi_version

    def step(self) -> list[Completion]:
        if not self.can_step:
            return []
        began_s = time.monotonic()
        self.server.check_alive()
        self._start_waiting()
        self._restart_stuck_imports(began_s)
        if self._is_decode_only_due:
            prioritized = [one for id, one in self._running.items() if id in self._prioritized]
            self._send_decode_only([one.server_id for one in prioritized])
            self._is_decode_only_due = False
        num_streams = sum(running.is_generating for running in self._running.values())
        self._handle_events(num_streams, MIGRATING_WAIT_S if self.num_migrations else STEP_WAIT_S)
        self.busy_row_s += num_streams * (time.monotonic() - began_s)
        if num_streams and began_s - self._last_event_s > self.silence_s:
            raise RunError(
                f"{self.server} has {num_streams} requests and has sent nothing for silence_s = "
                f"{self.silence_s:g} s"
            )
        completions, self._completions = self._completions, []
        return completions

    def close(self) -> None:
        """Stop a server that was started here."""
        self.server.stop()
        self._load_thread.shutdown()
        self._watch_thread.shutdown()

    # SupportsEpisodes

    def pop_finished_turns(self) -> list[TurnFinished]:
        finished, self._finished_turns = self._finished_turns, []
        return finished

    def continue_episode(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Raises EngineError as `dora.engine.engine.Engine.continue_episode`."""
        running = self._between_turns(request_id)
        num_left = running.request.sampling.max_tokens - len(running.token_ids)
        check_observation(request_id, token_ids, num_left, self._config.vocab_size)
        unknown = array("d", [math.nan]) * len(token_ids)
        running.token_ids.extend(token_ids)
        running.logprobs += unknown
        running.raw_logprobs += unknown
        running.turn_start = len(running.token_ids)
        self._start_stream(running, num_observed=len(token_ids))

    def end_episode(self, request_id: RequestId) -> None:
        """Raises EngineError if the request does not wait for an observation here."""
        running = self._between_turns(request_id)
        del self._running[request_id]
        self._completions.append(self._completion(running, running.turn_reason))
        self._migrator.fail_export(request_id, "the request finished before it was exported")

    def _between_turns(self, request_id: RequestId) -> ServerRequest:
        running = self._running.get(request_id)
        if running is None or not running.turn_reason:
            raise EngineError(f"request {request_id} does not wait for an observation; nothing was appended")
        return running

    # SupportsMigration

    @property
    def num_migrations(self) -> int:
        return len(self._migrator)

    def reserve_migration(self, command: ReserveMigration) -> ImportFailed | None:
        return self._migrator.reserve(command)

    def start_export(self, command: StartExport) -> ExportFailed | None:
        return self._migrator.start_export(command)

    def cancel_migration(self, migration_id: int) -> None:
        self._migrator.cancel(migration_id)

    def poll_migrations(self) -> list[MigrationReply]:
        self._handle_events(len(self._open_streams), 0.0)
        return self._migrator.poll()

    # SharesKV

    @property
    def kv_pool(self) -> Path | None:
        return None if self._kv is None else self._kv.folder

    # MigratesBetweenMachines

    @property
    def kv_address(self) -> str | None:
        return None if self._kv is None else self._kv.address

    def connect(self, open_handoff: OpenHandoff, clock: Callable[[], float]) -> None:
        self._migrator = ServerMigrator(self, open_handoff, clock)

    # ServerHost

    def kv_format(self, version: int) -> KVFormat:
        layout = () if self._kv is None else self._kv.layout
        return KVFormat(FORMAT_VERSION, self._config.digest(), self._digests[version], self.dtype, layout)

    def find_request(self, request_id: RequestId) -> Request | None:
        unfinished = self._running.get(request_id) or self._waiting.get(request_id)
        return None if unfinished is None else unfinished.request

    def reason_to_reject_import(self, request: Request) -> str:
        num_users = self._num_rows + len(self._waiting) + self._migrator.num_reserved
        if reason := self._reason_to_reject(request):
            return reason
        return f"all {self.max_rows} rows are in use" if num_users >= self.max_rows else ""

    def check_exported_kv(self, request: Request, output: PartialOutput, kv: ExportedKV) -> ExportedKV:
        if self._kv is None:
            raise TransferError("this engine's server cannot import KV")
        num_computed = len(request.prompt_ids) + len(output.token_ids) - 1
        return self._kv.check(kv, self._digests[request.version], num_computed)

    def resume_imported(self, request: Request, output: PartialOutput, kv: ExportedKV | None) -> None:
        kv_folder = None if kv is None or self._kv is None else self._kv.claim(kv)
        self._start_stream(_continued(request, output), kv_folder)

    def halt(self, request_id: RequestId, carries_kv: bool) -> HaltedRequest | None:
        """A request for which the server has not generated a token yet is not halted."""
        if (running := self._running.get(request_id)) is None or running.turn_reason:
            return None
        has_token = len(running.token_ids) > running.num_prefix_tokens
        exchange = self._kv if carries_kv else None
        if has_token and not running.is_halting and not running.is_stopped:
            running.is_halting, running.halting_since_s = True, self._migrator.clock()
            if exchange is None or not exchange.order_export(running.server_id):
                self._abort_streams([running])
        if not running.is_halted or (exchange is not None and exchange.is_awaited(running.server_id)):
            return None
        kv = self._exported_kv(running) if carries_kv else None
        return HaltedRequest(self._output_of(running), kv, running.halting_since_s)

    def _exported_kv(self, running: ServerRequest) -> ExportedKV | None:
        """The KV of a halted request that its server has exported; None if it has not."""
        if self._kv is None:
            return None
        try:
            exported = self._kv.exported(running.server_id)
            return self.check_exported_kv(running.request, self._output_of(running), exported)
        except TransferError:
            return None

    def _withdraw_export(self, running: ServerRequest) -> None:
        if running.is_halting and self._kv is not None:
            self._kv.remove(self._kv.folder_of(running.server_id))

    def continue_halted(self, request_id: RequestId) -> None:
        running = self._running.get(request_id)
        if running is None or not running.is_halting or running.is_stopped:  # stopped: it is about to finish
            return
        kv = self._exported_kv(running) if running.is_halted else None
        if not running.is_halted:
            self._abort_streams([running])
            self._withdraw_export(running)
        if kv is None:
            self.num_recomputed += len(running.request.prompt_ids) + len(running.token_ids)
        self._start_stream(running, None if kv is None else kv.folder)

    def release(self, request_id: RequestId) -> None:
        released = self._running.pop(request_id, None)
        if released is not None and self._kv is not None and self._kv.has_tickets:
            self._kv.remove(self._kv.folder_of(released.server_id))  # files go with the request
        self._waiting.pop(request_id, None)

    # responses

    def _start_waiting(self) -> None:
        """Send waiting requests to the server while rows are free."""
        if not self._running:
            self._last_event_s = time.monotonic()
        while self._waiting and self._num_rows + self._migrator.num_reserved < self.max_rows:
            self._start_stream(self._waiting.pop(next(iter(self._waiting))))

    def _restart_stuck_imports(self, now_s: float) -> None:
        """Let the server prefill requests whose KV does not arrive from another server."""
        if self._kv is None or not self._kv.has_tickets:
            return
        for running in [*self._running.values()]:
            is_late = running.kv_folder is not None and now_s - running.waiting_since_s > IMPORT_TIMEOUT_S
            if is_late and running.is_generating and not running.num_generated:
                assert running.kv_folder is not None
                self._kv.remove(running.kv_folder)
                running.kv_folder = None
                self._abort_streams([running])
                self.num_recomputed += len(running.prompt_ids)
                self._start_stream(running)

    @property
    def _num_rows(self) -> int:
        """Requests at the server. An episode between two turns is not there."""
        return sum(not running.turn_reason for running in self._running.values())

    def _start_stream(
        self, previous: ServerRequest, kv_folder: Path | None = None, num_observed: int = 0
    ) -> None:
        """Send the prompt and the tokens so far to the server, and read the response in a thread.

        The server imports their KV from `kv_folder`. It has not read the last `num_observed` tokens.
        """
        running = ServerRequest(  # a new object, so that late events of the previous response are ignored
            previous.request,
            secrets.token_hex(8),
            previous.token_ids,
            previous.logprobs,
            previous.raw_logprobs,
            num_prefix_tokens=len(previous.token_ids),
            num_proven=len(previous.token_ids),
            kv_folder=kv_folder,
            turn_start=previous.turn_start,
            num_observed=num_observed,
            chunks=previous.chunks,
            sent_version=previous.request.version,
            waiting_since_s=time.monotonic(),
        )
        self._running[running.request.id] = running
        if not self._open_streams:
            self._last_event_s = time.monotonic()
        self._open_streams.add(running)
        call = self._generate_call(running)
        threading.Thread(target=self._read_stream, args=(running, *call), daemon=True).start()
        self._is_decode_only_due |= running.request.id in self._prioritized

    def _read_stream(self, running: ServerRequest, path: str, body: JsonBody) -> None:
        """In a thread: put the events of a response into the queue. None is the last one."""
        try:
            for event in self.server.stream(path, body):
                self._events.put((running, event))
        except (EngineError, RunError) as error:
            self._events.put((running, error))
        finally:
            self._events.put((running, None))

    def _handle_events(self, max_events: int, wait_s: float) -> None:
        """Handle up to `max_events` events from the queue. Wait `wait_s` for the first one only."""
        for number in range(max_events):
            try:
                running, event = self._events.get(wait_s > 0.0 and not number, wait_s)
            except queue.Empty:
                return
            self._last_event_s = time.monotonic()
            if event is None:
                self._open_streams.discard(running)
            elif (num_prefilled := self._num_prefilled(event)) is not None:
                self._on_prefilled(running, num_prefilled)
                continue
            if self._running.get(running.request.id) is running and running.is_generating:
                self._handle_event(running, event)

    def _on_prefilled(self, running: ServerRequest, num_tokens: int) -> None:
        """With KV from before, the server computes only one token, and an observation."""
        if running.kv_folder is not None:
            assert self._kv is not None
            self._kv.remove(running.kv_folder)
        if running.kv_folder is not None or running.num_observed:
            self.num_recomputed += max(0, num_tokens - 1 - running.num_observed)

    def _handle_event(self, running: ServerRequest, event: Any) -> None:
        """Raises RunError if the response has failed or has another form."""
        if isinstance(event, Exception):
            raise RunError(f"request {running.request.id}: {event}") from event
        if event is None:
            raise RunError(f"request {running.request.id}: {self.server} ended the response early")
        was_stopped = running.is_stopped
        try:
            delta = self._parse_event(running, event)
            token_ids, logprobs = array("q", delta.token_ids), array("d", delta.logprobs)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise RunError(
                f"request {running.request.id}: {self.server} sent an unknown event: {event}"
                f"{self.server.first_logged_error()}"
            ) from None
        if len(token_ids) != len(logprobs):
            raise RunError(
                f"request {running.request.id}: {self.server} sent tokens without log-probs: {event}"
            )
        self._add_tokens(running, token_ids, logprobs)
        if delta.finish_reason is not None:
            self._finish(running, delta)
            return
        if delta.weight_spans is not None:
            self._check_weights(running, delta)
        # Once for a stop string, and again for an update, whose abort may have come before the request.
        if (running.is_stopped and not was_stopped) or running.is_renewing:
            self._abort_streams([running])

    def _add_tokens(self, running: ServerRequest, token_ids: array[int], logprobs: array[float]) -> None:
        """Add the tokens up to the end of the first stop string, and count the others."""
        num_kept = 0 if running.is_stopped else len(token_ids)
        if (stops := running.request.sampling.stop_strings) and not running.is_stopped:
            num_before = len(running.turn_ids)
            text_ids = np.array([*running.turn_ids, *token_ids], np.int64)
            for end in range(num_before + 1, len(text_ids) + 1):
                if ends_with_stop_string(self._detokenize, text_ids[:end], stops):
                    running.is_stopped, num_kept = True, end - num_before
                    break
        kept = logprobs[:num_kept]  # the server sends one log-prob for each token
        sampling = running.request.sampling
        is_unfiltered = self.capabilities.filters or not sampling.filters
        is_raw = sampling.temperature in (0.0, 1.0) and is_unfiltered
        running.token_ids += token_ids[:num_kept]
        running.logprobs += kept
        running.raw_logprobs += kept if is_raw else array("d", [math.nan]) * num_kept
        running.num_discarded += len(token_ids) - num_kept
        self.num_decoded += num_kept

    def _finish(self, running: ServerRequest, last: StreamDelta) -> None:
        """Raises RunError if other weights than those of its version generated the response (C1)."""
        request, reason = running.request, last.finish_reason
        is_expected = running.is_halting or running.is_stopped or running.is_renewing
        is_aborted = reason == "abort" and is_expected
        if reason not in ("stop", "length") and not is_aborted:
            raise RunError(f"request {request.id}: {self.server} ended its response with {last}")
        running.chunks = [*running.chunks, *self._check_weights(running, last)]
        if is_aborted and running.is_renewing and not running.is_stopped:
            self.num_recomputed += len(request.prompt_ids) + len(running.token_ids)
            self._start_stream(running)
            return
        is_early = reason == "length" and running.num_generated < running.max_tokens
        if (is_aborted or (is_early and running.is_halting)) and not running.is_stopped:
            running.is_halted = True
            return
        self._withdraw_export(running)
        if self.returns_routes:
            running.routes = self._routes_of(running, last)
        reason = "stop" if running.is_stopped else str(reason)
        if request.sampling.max_turn_tokens:
            self._finish_turn(running, reason)
        else:
            del self._running[request.id]
            self._completions.append(self._completion(running, reason))
        self._migrator.fail_export(request.id, "the request finished before it was exported")

    def _check_weights(self, running: ServerRequest, delta: StreamDelta) -> list[Chunk]:
        """The chunks of a response so far. Raises RunError if other weights may have generated it (C1)."""
        request, num_generated = running.request, running.num_generated
        # SGLang lists weights of its own for no tokens if a request is aborted before its first one.
        spans = [span for span in delta.weight_spans or () if span.get("start") != span.get("end")]
        ends: list[Any] = [0, *(span.get("end") for span in spans)]
        chunks = [self._chunk_of(request, str(span.get("version"))) for span in spans]
        is_whole = ends[-1] == num_generated and [span.get("start") for span in spans] == ends[:-1]
        if None in chunks or not is_whole:
            raise RunError(
                f"request {request.id} is of version {request.version} "
                f"({self._weights_label(request.version)} at {self.server}), but its response was generated "
                f"by {delta.weight_spans}; let no other client change the server's weights"
            )
        running.num_proven, num_kept = len(running.token_ids), num_generated - running.num_discarded
        sizes = [min(end, num_kept) - start for start, end in pairwise(ends)]
        return [c._replace(num_tokens=size) for c, size in zip(chunks, sizes, strict=True) if c and size > 0]

    def _routes_of(self, running: ServerRequest, last: StreamDelta) -> NDArray[np.int16]:
        """Without those of tokens after a stop string. Raises RunError if the server has not sent all."""
        num_computed = len(running.request.prompt_ids) + len(running.token_ids) - 1
        num_sent = 0 if last.routes is None else len(last.routes)
        if last.routes is None or num_sent < num_computed:
            raise RunError(
                f"request {running.request.id}: {self.server} sent the experts of {num_sent} tokens, and of "
                f"{num_computed} are needed; set trainer.routing_replay = false"
            )
        return last.routes[:num_computed]

    def _chunk_of(self, request: Request, label: str) -> Chunk | None:
        """Version and digest of the weights `label`, or None if they may not generate for the request."""
        if self.inflight_update is not None and not request.id.is_held_out:
            return self._chunks.get(label)
        is_own = label == self._weights_label(request.version)
        return Chunk(request.version, self._digests[request.version], 0) if is_own else None

    def _finish_turn(self, running: ServerRequest, reason: str) -> None:
        num_left = running.request.sampling.max_tokens - len(running.token_ids)
        running.turn_reason = "turn_length" if reason == "length" and num_left else reason
        running.is_halting = False
        logprobs = running.logprobs[running.turn_start :].tolist()
        turn = TurnFinished(running.request.id, running.turn_ids, running.turn_reason, num_left, logprobs)
        self._finished_turns.append(turn)

    @cached_property
    def _detokenize(self) -> Detokenize:
        return Tokenizer(Path(self.model)).decode

    def _completion(self, running: ServerRequest, reason: str) -> Completion:
        version = running.request.version
        logprobs = np.array(running.logprobs, np.float32)
        chunks = _merged(running.chunks)
        if self.inflight_update is None:  # with the observations of an episode
            chunks = (Chunk(version, self._digests[version], len(running.token_ids)),)
        return Completion(
            id=running.request.id,
            version=version,
            prompt_ids=np.array(running.request.prompt_ids, np.int32),
            token_ids=np.array(running.token_ids, np.int32),
            logprobs=logprobs,
            unfiltered_logprobs=logprobs,
            raw_logprobs=np.array(running.raw_logprobs, np.float32),
            chunks=chunks,
            finish_reason=reason,
            routes=running.routes,
        )

    def _wait_for_dropped_versions(self) -> None:
        """Return once the server generates for loaded versions only.

        Weights never change during a response.
        """
        deadline_s = time.monotonic() + ABORT_TIMEOUT_S
        while aborted := [one for one in self._open_streams if one.weights_version not in self._digests]:
            self._handle_events(len(self._open_streams), STEP_WAIT_S)
            self._abort_streams(aborted)  # again: a request may reach the server after its abort
            if time.monotonic() > deadline_s:
                raise RunError(
                    f"{self.server} still generates for {len(aborted)} requests, {ABORT_TIMEOUT_S:g} s after "
                    "they were aborted"
                )

    def _reason_to_reject(self, request: Request) -> str:
        if request.version not in self._digests:
            return f"version {request.version} is not loaded; loaded: {[*self._digests]}"
        if not all(0 <= token < self._config.vocab_size for token in request.prompt_ids):
            return f"its prompt has token ids outside the vocabulary of {self._config.vocab_size}"
        if request.max_length > self.max_context:
            return f"it may have {request.max_length} tokens, over max_context = {self.max_context}"
        return ""


def stream_interval(sampling: SamplingParams) -> int:
    """Tokens between two events of a response, after its first one."""
    return STOP_STRING_INTERVAL if sampling.stop_strings else STREAM_INTERVAL


def _with_version(request: Request, newest: int) -> Request:
    """The request with the newest version, unless it keeps its own."""
    return request if request.id.is_held_out else replace(request, version=newest)


def _continued(request: Request, output: PartialOutput) -> ServerRequest:
    """A request with the output so far that another engine has generated."""
    unfiltered, raw = output.logprobs.astype(float)[:, 1:3].T.tolist()
    return ServerRequest(
        request,
        token_ids=array("q", output.token_ids.tolist()),
        logprobs=array("d", unfiltered),
        raw_logprobs=array("d", raw),
        num_proven=len(output.token_ids),
        turn_start=turn_start_of(output),
    )


def _merged(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Without neighbours of one version."""
    groups = [[*group] for _, group in groupby(chunks, key=lambda chunk: chunk[:2])]
    return tuple(group[0]._replace(num_tokens=sum(chunk.num_tokens for chunk in group)) for group in groups)
