"""Talks to the service of a run, from any process or machine; needs httpx and nothing else of DORA.

`Client` waits for answers, `AsyncClient` returns what can be awaited; both have the verbs of `Verbs`.
What is lost on the way, or refused for being too much at once, is sent again for a while.
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

TIMEOUT_S = 30.0  # of a call that has nothing to wait for
LONG_S = 900.0  # of weights, which are read, checked and published
ANSWER_S = 330.0  # of a turn, after which the service itself says that it is not written yet
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # before a call is repeated: twice as long each time
AGAIN = (429, 503)  # statuses of calls that may work later
SUMMARY = "summary.json"  # what a run that ended leaves in its folder


@dataclass(frozen=True)
class ApiCall:
    """One call. One that is not `is_repeatable` is only repeated if it never arrived."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    content: bytes | None = None
    params: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    timeout_s: float = TIMEOUT_S
    is_repeatable: bool = True
    is_patient: bool = True  # repeated at all


class BaseClient(Generic[R]):
    """What can be asked of a run; docs/service.md has what is answered. All raise ServiceError."""

    def _do(self, call: ApiCall) -> R:
        raise NotImplementedError

    def status(self) -> R:
        """Where the run stands."""
        return self._do(ApiCall("GET", "/v1/status"))

    def versions(self, newer_than: int = -1, wait_s: float = 0.0) -> R:
        """The kept versions; waits up to `wait_s` (at most 60) for one after `newer_than`."""
        params = {"newer_than": newer_than, "wait_s": wait_s}
        return self._do(ApiCall("GET", "/v1/versions", params=params, timeout_s=TIMEOUT_S + wait_s))

    def engines(self) -> R:
        """The engines, those that ended included."""
        return self._do(ApiCall("GET", "/v1/engines"))

    def add_engines(self, count: int = 1) -> R:
        """Start engines, which join once they are ready."""
        return self._do(ApiCall("POST", "/v1/engines", {"count": count}, is_repeatable=False))

    def drain_engine(self, engine: int) -> R:
        """Have an engine leave once it is empty."""
        return self._do(ApiCall("POST", f"/v1/engines/{engine}/drain"))

    def pause(self) -> R:
        """Have the whole run stand still."""
        return self._do(ApiCall("POST", "/v1/pause"))

    def resume(self) -> R:
        """Have it go on."""
        return self._do(ApiCall("POST", "/v1/resume"))

    def count_prompts(self) -> R:
        """How many prompts were put and taken."""
        return self._do(ApiCall("GET", "/v1/prompts"))

    def put_prompts(self, first: int, rows: Sequence[Mapping[str, Any]]) -> R:
        """Add rows to a run with data.path = "service"; `first` is how many there were before."""
        return self._do(ApiCall("POST", "/v1/prompts", {"first": first, "rows": [*rows]}))

    def get_experience(self, task: str = "reward", wait_s: float = 30.0) -> R:
        """A group to judge, on loan: under "loan" in the answer, None after `wait_s` without one."""
        path, params = f"/v1/experience/{task}", {"wait_s": wait_s}
        return self._do(ApiCall("GET", path, params=params, timeout_s=TIMEOUT_S + wait_s))

    def put_experience(self, lease: int, rewards: Sequence[float], task: str = "reward") -> R:
        """What the answers of a loan are worth, sibling by sibling."""
        body = {"lease": lease, "fields": {"reward": [*rewards]}}
        return self._do(ApiCall("POST", f"/v1/experience/{task}", body))

    def training(self) -> R:
        """The step that comes next, for a trainer outside."""
        return self._do(ApiCall("GET", "/v1/training", timeout_s=2 * LONG_S))

    def put_weights(self, version: int, tensors: bytes, metrics: Mapping[str, float] | None = None) -> R:
        """End a step: `tensors` is the content of a safetensors file with all of the next version."""
        params = {"sha256": hashlib.sha256(tensors).hexdigest(), "metrics": json.dumps(metrics or {})}
        path = f"/v1/weights/{version}"
        return self._do(ApiCall("PUT", path, content=tensors, params=params, timeout_s=LONG_S))

    def announce_weights(
        self, version: int, file: str, sha256: str, metrics: Mapping[str, float] | None = None
    ) -> R:
        """The same with a file in the folder `incoming` of the run's."""
        body = {"version": version, "file": file, "sha256": sha256, "metrics": metrics or {}}
        return self._do(ApiCall("POST", "/v1/weight_sync", body, timeout_s=LONG_S))

    def open_session(self, name: str | None = None, wait_s: float = 30.0) -> R:
        """Take an episode; its name is under "session" in the answer. Waits up to `wait_s` (at most 60)."""
        path = f"/v1/sessions/{name or uuid.uuid4().hex}"
        return self._do(ApiCall("PUT", path, params={"wait_s": wait_s}, timeout_s=TIMEOUT_S + wait_s))

    def get_session(self, session: str) -> R:
        """The session as it is, which keeps it from expiring."""
        return self._do(ApiCall("GET", f"/v1/sessions/{session}"))

    def abandon_session(self, session: str) -> R:
        """The agent cannot go on."""
        return self._do(ApiCall("DELETE", f"/v1/sessions/{session}"))

    def complete(
        self, session: str, messages: Sequence[Mapping[str, Any]], max_tokens: int | None = None
    ) -> R:
        """The model's answer to a conversation, as OpenAI's chat completions have it."""
        body: Json = {"messages": [*messages]} | ({} if max_tokens is None else {"max_tokens": max_tokens})
        headers = {"Dora-Session": session}
        return self._do(ApiCall("POST", "/v1/chat/completions", body, headers=headers, timeout_s=ANSWER_S))

    def post_reward(self, session: str, reward: float | None) -> R:
        """The episode is over, and was worth this; None: the run's own tasks judge it."""
        return self._do(ApiCall("POST", f"/v1/sessions/{session}/reward", {"reward": reward}))


@dataclass(frozen=True)
class Address:
    """Where a service is, its token, and how long calls are repeated (s)."""

    url: str
    token: str
    retry_timeout_s: float = 60.0
    run: Path | None = None  # its folder, where that can be read

    @classmethod
    def of_run(cls, run: Path) -> Address:
        """As the run in a folder tells it. Raises InputError where none is served."""
        path = run / "service.json"
        try:
            return cls(**json.loads(path.read_text()), run=run)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{run} has no run that is served: {error}; start it with dora serve") from error

    @property
    def options(self) -> dict[str, Any]:
        """Of either kind of client of httpx."""
        return {"base_url": self.url, "headers": {"Authorization": f"Bearer {self.token}"}}


class _RetryLoop:
    """How often and when one call is repeated."""

    def __init__(self, call: ApiCall, patience_s: float) -> None:
        self._call, self._patience_s = call, patience_s if call.is_patient else 0.0
        self._deadline_s, self._pause_s = time.monotonic() + self._patience_s, FIRST_PAUSE_S
        self._began_s = 0.0  # the last try

    @property
    def request(self) -> dict[str, Any]:
        """Arguments for httpx, for a try that begins now."""
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

    def answer(self, response: httpx.Response) -> httpx.Response | None:
        """The answer; None: try again. Raises ServiceError for a refusal.

        The time that a service took to answer is none of the client's patience: it is there.
        """
        self._deadline_s += time.monotonic() - self._began_s
        if response.status_code in AGAIN and self._is_early:
            return None
        if response.is_success:
            return response
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{self._call.method} {self._call.path}: {response.reason_phrase}"
        raise ServiceError(response.status_code, message)

    def check_loss(self, error: httpx.TransportError) -> None:
        """Raises ServiceError if a call without answer must not be repeated, or has been for long enough."""
        has_never_arrived = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        if not self._is_early or not (self._call.is_repeatable or has_never_arrived):
            what = f"{self._call.method} {self._call.path} had no answer ({error!r})"
            raise ServiceError(503, f"{what} within {self._patience_s:g} s; is the run over?") from error

    def next_pause_s(self) -> float:
        """How long to wait before the next try, with chance so that many clients do not come at once."""
        self._pause_s, pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S), self._pause_s
        return pause_s * random.uniform(0.5, 1.0)

    @property
    def _is_early(self) -> bool:
        return time.monotonic() < self._deadline_s


def _batch(step: int, fields: Sequence[str], after: int, wait_s: float) -> ApiCall:
    params = {"after": after, "wait_s": wait_s} | ({"fields": ",".join(fields)} if fields else {})
    return ApiCall("GET", f"/v1/batches/{step}", params=params, timeout_s=TIMEOUT_S + wait_s)


def _groups(response: httpx.Response) -> tuple[list[Json], bool]:
    """Groups of a batch, and whether that was all of it. Raises ServiceError if no more can come."""
    *groups, last = map(json.loads, response.text.splitlines())
    if "why" in last:
        raise ServiceError(409, last["why"])
    return groups, last["is_whole"]


class _Progress:
    """A run's status as it was heard last. The service ends with the run, so the end is in its folder."""

    call = ApiCall("GET", "/v1/status", is_patient=False)

    def __init__(self, address: Address) -> None:
        self._address, self._heard_s = address, time.monotonic()
        self._status: Json = {}

    def hear(self, status: Json) -> Json:
        self._status, self._heard_s = status, time.monotonic()
        return status

    def end(self, error: ServiceError) -> Json | None:
        """The last status of a run that is complete; None: ask again. Raises ServiceError if it is lost."""
        if error.status not in AGAIN:
            raise error
        if self._status and self._num_steps_left_behind() >= self._status["num_steps"]:
            return self.hear({**self._status, "num_steps_trained": self._status["num_steps"]})
        if time.monotonic() - self._heard_s > self._address.retry_timeout_s:
            what = f"the run has not answered for {self._address.retry_timeout_s:g} s"
            raise ServiceError(503, f"{what}, and does not say that it is complete") from error
        return None

    @property
    def is_over(self) -> bool:
        return bool(self._status) and self._status["num_steps_trained"] >= self._status["num_steps"]

    def _num_steps_left_behind(self) -> int:
        """Trained, by the summary; 0: there is none."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            if self._address.run is not None:
                return int(json.loads((self._address.run / SUMMARY).read_text())["steps"])
        return 0


class Client(BaseClient[Json]):
    """Waits for each answer; may be used by several threads."""

    def __init__(self, address: Address) -> None:
        self._address, self._patience_s = address, address.retry_timeout_s
        self._http = httpx.Client(**address.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def progress(self, interval_s: float = 1.0) -> Iterator[Json]:
        """The run's status now and then, until its last step is trained.

        The service ends with the run. With an address `of_run` the last status is then made from the run's
        summary, and only num_steps_trained in it is new. Raises ServiceError if a run is lost or stopped
        before, and, with an address that knows no folder, also if nobody was asked between its last step and
        its end: the service has been gone for `patience_s` by then.
        """
        progress = _Progress(self._address)
        while not progress.is_over:
            try:
                status: Json | None = progress.hear(self._do(progress.call))
            except ServiceError as error:
                status = progress.end(error)
            if status is not None:
                yield status
            if not progress.is_over:
                time.sleep(max(interval_s, FIRST_PAUSE_S if status is None else 0.0))

    def batch(self, step: int, fields: Sequence[str] = (), wait_s: float = 1.0) -> Iterator[Json]:
        """The groups of a step's batch, each within `wait_s` of when it was committed to the step."""
        got, is_whole = 0, False
        while not is_whole:
            groups, is_whole = _groups(self._fetch(_batch(step, fields, got, wait_s)))
            yield from groups
            got += len(groups)

    def get_weights(self, version: int) -> bytes:
        """A stored version, as the content of a safetensors file."""
        return self._fetch(ApiCall("GET", f"/v1/weights/{version}", timeout_s=LONG_S)).content

    def _do(self, call: ApiCall) -> Json:
        found: Json = self._fetch(call).json()
        return found

    def _fetch(self, call: ApiCall) -> httpx.Response:
        tries = _RetryLoop(call, self._patience_s)
        while True:
            try:
                answer = tries.answer(self._http.request(**tries.request))
            except httpx.TransportError as error:
                tries.check_loss(error)
                answer = None
            if answer is not None:
                return answer
            time.sleep(tries.next_pause_s())


class AsyncClient(BaseClient[Awaitable[Json]]):
    """The same, to be awaited."""

    def __init__(self, address: Address) -> None:
        limits = httpx.Limits(max_connections=None)  # as many calls at once as the caller likes
        self._address, self._patience_s = address, address.retry_timeout_s
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
                status: Json | None = progress.hear(await self._do(progress.call))
            except ServiceError as error:
                status = progress.end(error)
            if status is not None:
                yield status
            if not progress.is_over:
                await asyncio.sleep(max(interval_s, FIRST_PAUSE_S if status is None else 0.0))

    async def batch(self, step: int, fields: Sequence[str] = (), wait_s: float = 1.0) -> AsyncIterator[Json]:
        """The groups of a step's batch, each within `wait_s` of when it was committed to the step."""
        got, is_whole = 0, False
        while not is_whole:
            groups, is_whole = _groups(await self._fetch(_batch(step, fields, got, wait_s)))
            for group in groups:
                yield group
            got += len(groups)

    async def get_weights(self, version: int) -> bytes:
        """A stored version, as the content of a safetensors file."""
        return (await self._fetch(ApiCall("GET", f"/v1/weights/{version}", timeout_s=LONG_S))).content

    async def _do(self, call: ApiCall) -> Json:
        found: Json = (await self._fetch(call)).json()
        return found

    async def _fetch(self, call: ApiCall) -> httpx.Response:
        tries = _RetryLoop(call, self._patience_s)
        while True:
            try:
                answer = tries.answer(await self._http.request(**tries.request))
            except httpx.TransportError as error:
                tries.check_loss(error)
                answer = None
            if answer is not None:
                return answer
            await asyncio.sleep(tries.next_pause_s())
