"""What every call passes before anything of it is read: token, size, time, number.

The token is compared in constant time and before the body arrives; a body is counted while it
arrives, so that one that is too long is never in memory.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dora.service.answers import refusal

OPEN_PATHS = ("/health",)
BODY_S = 30.0  # that the next part of a body may take
MAX_CALLS = 1024  # at once
MAX_DIGITS = 18  # of a length that is read as a number
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # names of others are endless

Note = Callable[[str, str, int, float], None]  # method, route, status, seconds


class Gate:
    """An ASGI application around another."""

    def __init__(
        self, app: ASGIApp, token: str, max_bytes: int, roomy: Mapping[str, int], note: Note
    ) -> None:
        """Bodies have up to `max_bytes`; `roomy` are beginnings of paths with another limit (bytes)."""
        self._app, self._bearer = app, f"Bearer {token}".encode()
        self._max_bytes, self._roomy, self._note = max_bytes, roomy, note
        self._num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began_s, status = time.perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self._num_calls += 1
        try:
            if (error := self._why_not(scope)) is not None:
                await refusal(error)(scope, receive, noting)
            else:
                await self._app(scope, self._measured(scope, receive), noting)
        finally:
            self._num_calls -= 1
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._note(method, route, status, time.perf_counter() - began_s)

    def _why_not(self, scope: Scope) -> HTTPException | None:
        headers = {name: value for name, value in scope["headers"]}
        given = headers.get(b"authorization", b"")
        if scope["path"] not in OPEN_PATHS and not secrets.compare_digest(given, self._bearer):
            return HTTPException(
                401,
                "the header `Authorization: Bearer TOKEN` is missing or wrong; the token is in service.json "
                "in the run's folder, or in service.token_file",
                {"WWW-Authenticate": "Bearer"},
            )
        if self._num_calls > MAX_CALLS:
            return HTTPException(429, f"{MAX_CALLS} calls are under way; ask again", {"Retry-After": "1"})
        length, most = headers.get(b"content-length", b"0"), self._most(scope)
        if length.isdigit() and (len(length) > MAX_DIGITS or int(length) > most):
            return _too_long(most)
        return None

    def _most(self, scope: Scope) -> int:
        return next(
            (n for start, n in self._roomy.items() if scope["path"].startswith(start)), self._max_bytes
        )

    def _measured(self, scope: Scope, receive: Receive) -> Receive:
        """Raises HTTPException where a body is too long, or stops coming."""
        most, num_bytes, is_coming = self._most(scope), 0, True

        async def counted() -> Message:
            nonlocal num_bytes, is_coming
            if not is_coming:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), BODY_S)
            except TimeoutError as error:
                raise HTTPException(408, f"nothing of the body came for {BODY_S:g} s; send again") from error
            num_bytes += len(message.get("body", b""))
            is_coming = message.get("more_body", False)
            if num_bytes > most:
                raise _too_long(most)
            return message

        return counted


def _too_long(most: int) -> HTTPException:
    return HTTPException(413, f"the body may have {most} bytes; send less, or raise service.max_body_bytes")
