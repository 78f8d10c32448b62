"""Parts that all routes share: the base of request bodies, and the form of error responses.

An error response is `{"type": "error", "error": {"message", "type", "code"}}`, as clients of OpenAI's and
Anthropic's API expect it. It never repeats the request's content, which may be long or binary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match

from dora.data.tool_calls import MAX_DEPTH, is_portable
from dora.errors import DoraError, InputError, RunError, ServiceError, StreamError

ERROR_STATUSES = {
    400: "the request cannot be fulfilled",
    401: "the auth token is missing or wrong",
    404: "no such resource",
    405: "the path does not support this method",
    408: "the body was not received in time",
    409: "not possible in the run's current state",
    410: "the resource, or the run, has ended",
    413: "the body is too large",
    415: "unsupported media type",
    422: "the parameters or the body are not valid",
    429: "nothing available yet, or too many requests; try again",
    503: "nothing available yet, or the run does not respond; try again",
}
RETRY_STATUSES = (429, 503)
RETRY_AFTER = {"Retry-After": "1"}  # seconds; header of a response with one of these statuses

MAX_FINDINGS = 5  # in the message of a body that is not valid
MAX_FIELD = 80  # characters of a field's name in it

MAX_REWARD = 1e6  # absolute value, as in dora.trainer.advantage
RewardValue = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
Wait = Annotated[float, Query(ge=0, le=60, description="how long to wait for a result (s)")]


def _check_portable(value: dict[str, Any]) -> dict[str, Any]:
    if not is_portable(value):
        raise ValueError(f"send only finite numbers, and at most {MAX_DEPTH} levels of nesting")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_check_portable)]  # with any content


class RequestBody(BaseModel):
    """Base of request bodies: no unknown keys, no type conversion, finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class MessageBody(RequestBody):
    """Base of a conversation's parts. Clients send back what they read, with fields that they added."""

    model_config = ConfigDict(extra="ignore")


class ErrorDetail(BaseModel):
    """What is wrong, and the remedy. `code` is the HTTP status."""

    message: str
    type: str  # "run_finished", "run_stopped" or "run_failed": the run has ended
    code: int


class ErrorResponse(BaseModel):
    """Body of every response with an error status. It also has the form of Anthropic's API."""

    type: Literal["error"] = "error"
    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in ERROR_STATUSES.items()
}


class AsciiJSONResponse(JSONResponse):
    """JSON in ASCII, so that lone surrogates in a text cannot break the response."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def event_stream(events: Iterable[str]) -> PlainTextResponse:
    """Server-sent events of a turn, which is finished, so that they are sent at once."""
    return PlainTextResponse("".join(events), media_type="text/event-stream")


def error_response(error: ServiceError, headers: Mapping[str, str] | None = None) -> AsciiJSONResponse:
    """The response for an error."""
    detail = {"message": str(error), "type": error.kind, "code": error.status}
    body = {"type": "error", "error": detail}
    retry = RETRY_AFTER if error.status in RETRY_STATUSES else {}
    return AsciiJSONResponse(body, error.status, retry | dict(headers or {}))


def add_error_handlers(app: FastAPI) -> None:
    """Turn the exceptions of an application's handlers into error responses."""
    for kind in (HTTPException, RequestValidationError, DoraError, Exception):
        app.exception_handler(kind)(_handle_error)


async def _handle_error(request: Request, error: Exception) -> AsciiJSONResponse:
    match error:
        case HTTPException(status_code=405):
            allowed = _allowed_methods(request)
            message = f"the method is not supported here; use {allowed}"
            return error_response(ServiceError(405, message), {"Allow": allowed})
        case HTTPException(status_code=400):  # FastAPI's, for a body that Python's json cannot decode
            return error_response(
                ServiceError(400, "the body cannot be decoded; send JSON in UTF-8, less nested")
            )
        case HTTPException():
            return error_response(ServiceError(error.status_code, str(error.detail)), error.headers)
        case ServiceError():
            return error_response(error)
        case InputError() | StreamError():
            return error_response(ServiceError(400, str(error)))
        case RunError():
            return error_response(ServiceError(503, str(error)))
        case RequestValidationError():
            return error_response(ServiceError(422, _describe_invalid(error.errors())))
        case _:  # Starlette raises it again after this response, and uvicorn logs the traceback
            return error_response(ServiceError(500, "internal error; the run's console has the traceback"))


def _allowed_methods(request: Request) -> str:
    """Methods of all routes with this path; each method has a route of its own."""
    routes = [route for route in request.app.state.routes if route.matches(request.scope)[0] != Match.NONE]
    methods = {method for route in routes for method in route.methods}
    return ", ".join(sorted(methods)) or "GET"  # /health, /docs and /openapi.json are not among these routes


def _describe_invalid(findings: Sequence[Any]) -> str:
    """The first findings of pydantic: each is a field and its rule, without the value."""
    described = []
    for finding in findings[:MAX_FINDINGS]:
        location: Sequence[object] = finding["loc"]
        names = [str(name) for name in location[1:] if "[" not in str(name)]  # pydantic's names of types
        field = ascii(".".join(names) or location[0])[1:-1]
        described.append(
            f"{field if len(field) <= MAX_FIELD else field[:MAX_FIELD] + '...'}: {finding['msg']}"
        )
    more = len(findings) - MAX_FINDINGS
    return "; ".join([*described, f"and {more} more"] if more > 0 else described)
