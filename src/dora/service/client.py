"""A synchronous and an asynchronous client of a run's service; they need httpx and no other part of DORA-RL.

Lost requests, and requests refused with 429 or 503, are retried with exponential backoff.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import httpx

from dora.errors import InputError, ServiceError

Json = dict[str, Any]
R = TypeVar("R")

TIMEOUT_S = 30.0  # of a request that the service answers at once
WEIGHTS_TIMEOUT_S = 900.0  # of weights, which are read, checked and published
TURN_TIMEOUT_S = 330.0  # of a turn; longer than the service's own timeout
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0  # before a retry; doubles each time
RETRY_STATUSES = (429, 503)
UNREACHABLE = "unreachable"  # kind of the error if no process listens at the address any more
SUMMARY = "summary.json"  # in the folder of a run that has ended


@dataclass(frozen=True)
class ApiCall:
    """One HTTP request. Unless it `is_idempotent`, it is retried only if it never reached the service."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    content: bytes | None = None
    params: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    timeout_s: float = TIMEOUT_S
    is_idempotent: bool = True
    has_retries: bool = True


class BaseClient(Generic[R]):
    """The requests to a run; docs/service.md describes the responses. All methods raise ServiceError."""

    def _do(self, call: ApiCall) -> R:
        raise NotImplementedError

    def status(self) -> R:
        """Progress of the run."""
        return self._do(ApiCall("GET", "/v1/status"))

    def versions(self, newer_than: int = -1, wait_s: float = 0.0) -> R:
        """The stored versions; waits up to `wait_s` (at most 60) for one after `newer_than`."""
        params = {"newer_than": newer_than, "wait_s": wait_s}
        return self._do(ApiCall("GET", "/v1/versions", params=params, timeout_s=TIMEOUT_S + wait_s))

    def engines(self) -> R:
        """All engines, those that have ended included."""
        return self._do(ApiCall("GET", "/v1/engines"))

    def add_engines(self, count: int = 1) -> R:
        """Start engines, which join once they are ready."""
        return self._do(ApiCall("POST", "/v1/engines", {"count": count}, is_idempotent=False))

    def drain_engine(self, engine: int) -> R:
        """Remove an engine once its requests have migrated or finished."""
        return self._do(ApiCall("POST", f"/v1/engines/{engine}/drain"))

    def pause(self) -> R:
        """Pause the whole run."""
        return self._do(ApiCall("POST", "/v1/pause"))

    def resume(self) -> R:
        """End a pause."""
        return self._do(ApiCall("POST", "/v1/resume"))

    def count_prompts(self) -> R:
        """How many prompts were sent, and how many of them the run has fetched."""
        return self._do(ApiCall("GET", "/v1/prompts"))

    def put_prompts(self, first: int, rows: Sequence[Mapping[str, Any]]) -> R:
        """Append prompts to a run with data.path = "service"; `first` is the index of the first row."""
        return self._do(ApiCall("POST", "/v1/prompts", {"first": first, "rows": [*rows]}))

    def get_experience(self, task: str = "reward", wait_s: float = 30.0) -> R:
        """Lease a group to score: "leased_group" in the response, None if none arrives within `wait_s`."""
        path, params = f"/v1/experience/{task}", {"wait_s": wait_s}
        return self._do(ApiCall("GET", path, params=params, timeout_s=TIMEOUT_S + wait_s))

    def put_experience(self, lease: int, rewards: Sequence[float], task: str = "reward") -> R:
        """Submit the rewards of a leased group, one for each sibling."""
        body = {"lease": lease, "fields": {"reward": [*rewards]}}
        return self._do(ApiCall("POST", f"/v1/experience/{task}", body))

    def training(self) -> R:
        """The next step and the settings of training, for an external trainer."""
        return self._do(ApiCall("GET", "/v1/training", timeout_s=2 * WEIGHTS_TIMEOUT_S))

    def put_weights(self, version: int, tensors: bytes, metrics: Mapping[str, float] | None = None) -> R:
        """End the current step: `tensors` is a safetensors file with all tensors of the next version."""
        params = {"sha256": hashlib.sha256(tensors).hexdigest(), "metrics": json.dumps(metrics or {})}
        path = f"/v1/weights/{version}"
        return self._do(ApiCall("PUT", path, content=tensors, params=params, timeout_s=WEIGHTS_TIMEOUT_S))

    def announce_weights(
        self, version: int, file: str, sha256: str, metrics: Mapping[str, float] | None = None
    ) -> R:
        """As `put_weights`, with a file in the folder `incoming` of the run."""
        body = {"version": version, "file": file, "sha256": sha256, "metrics": metrics or {}}
        return self._do(ApiCall("POST", "/v1/weight_sync", body, timeout_s=WEIGHTS_TIMEOUT_S))

    def open_session(self, name: str | None = None, wait_s: float = 30.0) -> R:
        """Open an episode; its name is "session" in the response. Waits up to `wait_s` (at most 60)."""
        path = f"/v1/sessions/{name or uuid.uuid4().hex}"
        return self._do(ApiCall("PUT", path, params={"wait_s": wait_s}, timeout_s=TIMEOUT_S + wait_s))

    def get_session(self, session: str) -> R:
        """The state of a session; renews its lease."""
        return self._do(ApiCall("GET", f"/v1/sessions/{session}"))

    def abandon_session(self, session: str) -> R:
        """End a session without a reward; its group fails if it has a turn."""
        return self._do(ApiCall("DELETE", f"/v1/sessions/{session}"))

    def complete(
        self, session: str, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None
    ) -> R:
        """The model's next turn in a conversation, as an OpenAI chat completion."""
        body: Json = {"messages": [*messages]} | ({} if max_tokens is None else {"max_tokens": max_tokens})
        headers = {"Dora-Session": session}
        return self._do(
            ApiCall("POST", "/v1/chat/completions", body, headers=headers, timeout_s=TURN_TIMEOUT_S)
        )

    def post_reward(self, session: str, reward: float | None, turn_rewards: Sequence[float] = ()) -> R:
        """End an episode with its reward; None: the run's reward tasks score it. `turn_rewards` are its parts
        by turn.
        """
        body = {"reward": reward} | ({"turn_rewards": [*turn_rewards]} if turn_rewards else {})
        return self._do(ApiCall("POST", f"/v1/sessions/{session}/reward", body))


@dataclass(frozen=True)
class Address:
    """URL and auth token of a service, and how long requests are retried (s)."""

    url: str
    token: str
    retry_timeout_s: float = 60.0
    run: Path | None = None  # the run's folder, if the client can read it

    @classmethod
    def of_run(cls, run: Path) -> Address:
        """From service.json in the folder of a run. Raises InputError if there is none."""
        path = run / "service.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")), run=run)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{run} is not the folder of a served run: {error}; start it with dora serve"
            ) from error

    @property
    def is_served(self) -> bool:
        """Whether the run's folder has the address, or no summary; True where it cannot be read.

        A run that is resumed after a crash has neither of them until its service listens.
        """
        return self.run is None or (self.run / "service.json").exists() or not (self.run / SUMMARY).exists()

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of both clients of httpx."""
        return {"base_url": self.url, "headers": {"Authorization": f"Bearer {self.token}"}}


class _RetryLoop:
    """The retries of one call."""

    def __init__(self, call: ApiCall, timeout_s: float) -> None:
        self._call, self._timeout_s = call, timeout_s if call.has_retries else 0.0
        self._deadline_s, self._backoff_s = time.monotonic() + self._timeout_s, MIN_BACKOFF_S
        self._began_s = 0.0  # the last attempt

    @property
    def request(self) -> dict[str, Any]:
        """Arguments for httpx, for an attempt that begins now."""
        call, self._began_s = self._call, time.monotonic()
        return {
            "method": call.method,
            "url": call.path,
            "json": call.body,
            "content": call.content,
            "params": call.params,
            "headers": call.headers,
            "timeout": call.timeout_s,
        }

    def check_response(self, response: httpx.Response) -> httpx.Response | None:
        """The response; None: retry. Raises ServiceError for an error status.

        A response resets the timeout, because the service is running.
        """
        self._deadline_s += time.monotonic() - self._began_s
        if response.status_code in RETRY_STATUSES and self._has_time:
            return None
        if response.is_success:
            return response
        try:
            error = response.json()["error"]
            message, kind = error["message"], error["type"]
        except (ValueError, KeyError, TypeError):
            message, kind = f"{self._call.method} {self._call.path}: {response.reason_phrase}", ""
        raise ServiceError(response.status_code, message, kind)

    def check_loss(self, error: httpx.TransportError) -> None:
        """Raises ServiceError if a request without a response must not be retried, or timed out."""
        is_unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        if not self._has_time or not (self._call.is_idempotent or is_unsent):
            what = f"{self._call.method} {self._call.path} had no response ({error!r})"
            what += f" within {self._timeout_s:g} s; is the run over?"
            is_unreachable = isinstance(error, httpx.ConnectError)  # a timeout: the machine may be busy
            raise ServiceError(503, what, UNREACHABLE if is_unreachable else "") from error

    def next_backoff_s(self) -> float:
        """How long to wait before the next attempt; random, so that many clients do not retry at once."""
        self._backoff_s, backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S), self._backoff_s
        return backoff_s * random.uniform(0.5, 1.0)

    @property
    def _has_time(self) -> bool:
        return time.monotonic() < self._deadline_s


def _batch(step: int, fields: Sequence[str], after: int, wait_s: float) -> ApiCall:
    params = {"after": after, "wait_s": wait_s} | ({"fields": ",".join(fields)} if fields else {})
    return ApiCall("GET", f"/v1/batches/{step}", params=params, timeout_s=TIMEOUT_S + wait_s)


def _groups(response: httpx.Response) -> tuple[list[Json], bool]:
    """Groups of a batch, and whether the batch is complete. Raises ServiceError if it cannot be completed."""
    *groups, last = map(json.loads, response.text.splitlines())
    if "error" in last:
        raise ServiceError(409, last["error"])
    return groups, last["is_complete"]


class _Progress:
    """The last known status of a run. The service ends with the run, so the end is read from its folder."""

    call = ApiCall("GET", "/v1/status", has_retries=False)

    def __init__(self, address: Address) -> None:
        self._address, self._updated_s = address, time.monotonic()
        self._status: Json = {}

    def update(self, status: Json) -> Json:
        self._status, self._updated_s = status, time.monotonic()
        return status

    def on_error(self, error: ServiceError) -> Json | None:
        """The last status of a finished run; None: retry. Raises ServiceError if the run is lost."""
        is_finished = error.kind == "run_finished"
        if error.status not in RETRY_STATUSES and not (is_finished and self._status):
            raise error
        if is_finished or (self._status and self._num_steps_in_summary() >= self._status["num_steps"]):
            return self.update({**self._status, "num_steps_trained": self._status["num_steps"]})
        if time.monotonic() - self._updated_s > self._address.retry_timeout_s:
            what = f"the run has not responded for {self._address.retry_timeout_s:g} s"
            raise ServiceError(503, f"{what}, and its folder has no summary of all steps") from error
        return None

    @property
    def is_over(self) -> bool:
        return bool(self._status) and self._status["num_steps_trained"] >= self._status["num_steps"]

    def _num_steps_in_summary(self) -> int:
        """Trained steps; 0 without a summary."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            if self._address.run is not None:
                return int(json.loads((self._address.run / SUMMARY).read_text(encoding="utf-8"))["steps"])
        return 0


class Client(BaseClient[Json]):
    """Waits for each response; several threads may use it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._http = httpx.Client(**address.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def progress(self, interval_s: float = 1.0) -> Iterator[Json]:
        """The run's status every `interval_s`, until its last step is trained.

        Of the last status, only num_steps_trained may be new: the service ends with the run, and says for
        `service.linger_s` how. Later requests get no response: with an `Address.of_run` the last status then
        comes from the run's summary, else ServiceError is raised after `retry_timeout_s`. Raises ServiceError
        also if the run is lost or ends before its last step.
        """
        progress = _Progress(self._address)
        while not progress.is_over:
            try:
                status: Json | None = progress.update(self._do(progress.call))
            except ServiceError as error:
                status = progress.on_error(error)
            if status is not None:
                yield status
            if not progress.is_over:
                time.sleep(max(interval_s, MIN_BACKOFF_S if status is None else 0.0))

    def batch(self, step: int, fields: Sequence[str] = (), wait_s: float = 1.0) -> Iterator[Json]:
        """The groups of a step's batch, each within `wait_s` of when it was committed to the step."""
        num_groups, is_complete = 0, False
        while not is_complete:
            groups, is_complete = _groups(self._fetch(_batch(step, fields, num_groups, wait_s)))
            yield from groups
            num_groups += len(groups)

    def get_weights(self, version: int) -> bytes:
        """A stored version, as the content of a safetensors file."""
        return self._fetch(ApiCall("GET", f"/v1/weights/{version}", timeout_s=WEIGHTS_TIMEOUT_S)).content

    def _do(self, call: ApiCall) -> Json:
        found: Json = self._fetch(call).json()
        return found

    def _fetch(self, call: ApiCall) -> httpx.Response:
        retries = _RetryLoop(call, self._address.retry_timeout_s)
        while True:
            try:
                response = retries.check_response(self._http.request(**retries.request))
            except httpx.TransportError as error:
                retries.check_loss(error)
                response = None
            if response is not None:
                return response
            time.sleep(retries.next_backoff_s())


class AsyncClient(BaseClient[Awaitable[Json]]):
    """The same methods, to be awaited."""

    def __init__(self, address: Address) -> None:
        limits = httpx.Limits(max_connections=None)  # the caller decides how many requests run at once
        self._address = address
        self._http = httpx.AsyncClient(limits=limits, **address.options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def progress(self, interval_s: float = 1.0) -> AsyncIterator[Json]:
        """As `Client.progress`."""
        progress = _Progress(self._address)
        while not progress.is_over:
            try:
                status: Json | None = progress.update(await self._do(progress.call))
            except ServiceError as error:
                status = progress.on_error(error)
            if status is not None:
                yield status
            if not progress.is_over:
                await asyncio.sleep(max(interval_s, MIN_BACKOFF_S if status is None else 0.0))

    async def batch(self, step: int, fields: Sequence[str] = (), wait_s: float = 1.0) -> AsyncIterator[Json]:
        """As `Client.batch`."""
        num_groups, is_complete = 0, False
        while not is_complete:
            groups, is_complete = _groups(await self._fetch(_batch(step, fields, num_groups, wait_s)))
            for group in groups:
                yield group
            num_groups += len(groups)

    async def get_weights(self, version: int) -> bytes:
        """A stored version, as the content of a safetensors file."""
        return (
            await self._fetch(ApiCall("GET", f"/v1/weights/{version}", timeout_s=WEIGHTS_TIMEOUT_S))
        ).content

    async def _do(self, call: ApiCall) -> Json:
        found: Json = (await self._fetch(call)).json()
        return found

    async def _fetch(self, call: ApiCall) -> httpx.Response:
        retries = _RetryLoop(call, self._address.retry_timeout_s)
        while True:
            try:
                response = retries.check_response(await self._http.request(**retries.request))
            except httpx.TransportError as error:
                retries.check_loss(error)
                response = None
            if response is not None:
                return response
            await asyncio.sleep(retries.next_backoff_s())
