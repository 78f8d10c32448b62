"""Middleware in front of all routes: it checks the auth token, limits the size and number of requests, and
refuses all of them after the end of the run.

The token is compared in constant time, before any of the body is read. A body is counted while it arrives,
so an oversized one is never held in memory.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dora.errors import ServiceError
from dora.runtime.control.requests import RunEnd
from dora.service.models import error_response

PUBLIC_PATHS = ("/health", "/docs")  # without data of the run; browsers cannot send the token
BODY_TIMEOUT_S = 30.0  # for the next part of a body
MAX_REQUESTS = 1024  # at a time
MAX_LENGTH_DIGITS = 18  # of a Content-Length header that is converted to a number
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # metrics count any other as "other"

OnResponse = Callable[[str, str, int, float], None]  # method, route, status, seconds


class AuthMiddleware:
    """Wraps an ASGI application."""

    def __init__(
        self,
        app: ASGIApp,
        auth_token: str,
        max_body_bytes: int,
        size_limits: Mapping[str, int],
        on_response: OnResponse,
    ) -> None:
        """`size_limits`: path prefix -> body limit (bytes) that replaces `max_body_bytes` there."""
        self._app, self._expected = app, f"Bearer {auth_token}".encode()
        self._max_body_bytes, self._size_limits = max_body_bytes, size_limits
        self._on_response = on_response
        self._num_requests = 0
        self.num_accepted = 0  # requests in progress that were not refused
        self.run_end: RunEnd | None = None  # all requests are refused once it is set

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started_s, status = time.perf_counter(), 500

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self._num_requests += 1
        try:
            if (error := self._reject(scope)) is not None:
                headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
                await error_response(error, headers)(scope, receive, send_and_note_status)
            else:
                await self._accept(scope, receive, send_and_note_status)
        finally:
            self._num_requests -= 1
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._on_response(method, route, status, time.perf_counter() - started_s)

    async def _accept(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_accepted += 1
        try:
            await self._app(scope, self._limited(scope, receive), send)
        finally:
            self.num_accepted -= 1

    def _reject(self, scope: Scope) -> ServiceError | None:
        """Why a request is refused from its headers alone; None: it is accepted."""
        headers = {name: value for name, value in scope["headers"]}
        api_key = headers.get(b"x-api-key", b"")  # the header of Anthropic's API
        given = headers.get(b"authorization", b"Bearer " + api_key)
        has_token = secrets.compare_digest(given, self._expected)
        if scope["path"] not in PUBLIC_PATHS and not has_token:
            return ServiceError(
                401,
                "the header `Authorization: Bearer TOKEN` is missing or wrong; the token is in service.json "
                "in the run's folder, or in the file service.token_file",
            )
        if self.run_end is not None:
            return self.run_end.to_error() if has_token else ServiceError(410, "the run has ended")
        if self._num_requests > MAX_REQUESTS:
            return ServiceError(429, f"{MAX_REQUESTS} requests are in progress, the maximum; try again")
        if b"content-length" in headers and b"transfer-encoding" in headers:  # proxies differ in which counts
            return ServiceError(
                400, "the request has both Content-Length and Transfer-Encoding; send one of them"
            )
        length, limit = headers.get(b"content-length", b"0"), self._body_limit(scope)
        if length.isdigit() and (len(length) > MAX_LENGTH_DIGITS or int(length) > limit):
            return _too_large(limit)
        return None

    def _body_limit(self, scope: Scope) -> int:
        path = scope["path"]
        limits = (limit for prefix, limit in self._size_limits.items() if path.startswith(prefix))
        return next(limits, self._max_body_bytes)

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """`receive` that raises HTTPException when the body gets too large or stops arriving.

        FastAPI answers any other exception of `receive` with 400.
        """
        limit, num_bytes, has_more = self._body_limit(scope), 0, True

        async def receive_limited() -> Message:
            nonlocal num_bytes, has_more
            if not has_more:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), BODY_TIMEOUT_S)
            except TimeoutError as error:
                raise HTTPException(
                    408, f"no part of the body arrived for {BODY_TIMEOUT_S:g} s; send the request again"
                ) from error
            num_bytes += len(message.get("body", b""))
            has_more = message.get("more_body", False)
            if num_bytes > limit:
                too_large = _too_large(limit)
                raise HTTPException(too_large.status, str(too_large))
            return message

        return receive_limited


def _too_large(limit: int) -> ServiceError:
    return ServiceError(
        413, f"the body has more than {limit} bytes; send less, or raise service.max_body_bytes"
    )
