"""What is answered, and how what went wrong is told.

An error is `{"error": {"message", "type", "code"}}`, as clients of OpenAI's interface expect it. It
never repeats what was sent: that may be long, or no text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException as AnyHttp
from starlette.routing import Match

from dora.errors import DoraError, InputError, RunError, ServiceError, StreamError

REFUSALS = {
    400: "what was asked for cannot be",
    401: "no token, or a wrong one",
    404: "what was named is not there",
    405: "not with this method",
    408: "the body stopped coming",
    409: "not now",
    410: "it was there, and has ended",
    413: "the body is too long",
    415: "the body is of another kind",
    422: "the body is not what it must be",
    429: "too much at once; ask again",
}


class Given(BaseModel):
    """What a body must be: no unknown keys, no silent conversion, no nan."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Error(BaseModel):
    """What went wrong, and what to do about it."""

    message: str
    type: str
    code: int


class Problem(BaseModel):
    """The body of every refusal."""

    error: Error


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": meaning} for status, meaning in REFUSALS.items()
}


class Json(JSONResponse):
    """Plain ASCII, whatever is in it."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def refusal(error: AnyHttp) -> Json:
    """The answer that says what went wrong."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = {"error": {"message": str(error.detail), "type": kind, "code": error.status_code}}
    return Json(body, error.status_code, dict(error.headers or {}))


def tell_errors(app: FastAPI) -> None:
    """Have an application answer errors so; one that nobody expected is logged as well."""
    for kind in (AnyHttp, RequestValidationError, DoraError, Exception):
        app.exception_handler(kind)(_tell)


async def _tell(request: Request, error: Exception) -> Json:
    match error:
        case AnyHttp(status_code=405):
            return refusal(AnyHttp(405, "not with this method", {"Allow": _allowed(request)}))
        case AnyHttp():
            return refusal(error)
        case ServiceError(status=status):
            return refusal(AnyHttp(status, str(error), {"Retry-After": "1"} if status == 429 else None))
        case InputError() | StreamError():
            return refusal(AnyHttp(400, str(error)))
        case RunError():
            return refusal(AnyHttp(503, str(error)))
        case RequestValidationError():
            return refusal(AnyHttp(422, "; ".join(map(_explain, error.errors()))))
        case _:
            return refusal(AnyHttp(500, "a mistake of DORA's own, which the console tells in full"))


def _allowed(request: Request) -> str:
    """The methods that a path has, each with a route of its own."""
    routes = [route for route in request.app.state.routes if route.matches(request.scope)[0] != Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods}))


def _explain(found: dict[str, Any]) -> str:
    """One finding of pydantic: where, and the rule."""
    where: Sequence[object] = found["loc"]
    return f"{ascii('.'.join(map(str, where[1:])) or where[0])[1:-1]}: {found['msg']}"
