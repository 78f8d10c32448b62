"""The web server of a run, in a thread of the driver.

It binds its address before the run starts, so that an address in use is found early. It serves requests from
the start of the workers until the end of the run, and then answers for a while how the run has ended.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from dora.auth_token import new_auth_token, read_auth_token, write_private_file
from dora.config.schema import ServiceSection
from dora.errors import ConfigError, RunError
from dora.runtime.control.requests import RequestQueue, RunEnd, ServiceAddress
from dora.runtime.run_dir import SERVICE_ADDRESS
from dora.service import (
    agents,
    anthropic_messages,
    api_page,
    chat_completions,
    completions,
    control,
    prometheus,
    responses,
    rewards,
    training,
    weights,
)
from dora.service.auth import AuthMiddleware
from dora.service.connections import BACKLOG, LimitedConnection
from dora.service.context import RunContext, RunHandle
from dora.service.models import ERROR_RESPONSES, AsciiJSONResponse, add_error_handlers

START_TIMEOUT_S, STOP_TIMEOUT_S = 10, 5
KEEP_ALIVE_S = 75  # an idle connection stays open this long after a response
POLL_S = 0.02

ROUTERS = (
    control.router,
    prometheus.router,
    agents.router,
    agents.session_router,
    chat_completions.router,
    chat_completions.session_router,
    completions.router,
    completions.session_router,
    anthropic_messages.router,
    responses.router,
    training.router,
    weights.router,
    rewards.router,
)
SIZE_LIMITS = {"/v1/weights": 2**63}  # bytes; the handler limits weights by the size of the model


class WebGateway:
    """The HTTP gateway of a run; implements `runtime.control.requests.Gateway`."""

    def __init__(self, settings: ServiceSection, run: Path) -> None:
        """Bind the address. Raises ConfigError if that fails, or if the auth token cannot be read."""
        self._settings, self._file = settings, run / SERVICE_ADDRESS
        file = settings.token_file
        self._auth_token = new_auth_token() if file is None else read_auth_token(file, "service.token_file")
        self._socket = _bind(settings.host, settings.port)
        self._app: AuthMiddleware | None = None
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._serve, name="service", daemon=True)
        self._notice: Callable[[str], None] = lambda line: None
        self._ended_s = 0.0

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def num_requests(self) -> int:
        """Requests in progress, without those that were refused."""
        return 0 if self._app is None else self._app.num_accepted

    def open(self, requests: RequestQueue[RunContext], notice: Callable[[str], None]) -> ServiceAddress:
        """Start the server and write service.json. Raises RunError if the server does not start."""
        self._app = make_app(requests, self._auth_token, self._settings.max_body_bytes)
        self._notice = notice
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                lifespan="off",
                http=LimitedConnection,
                ws="none",
                backlog=BACKLOG,
                log_level="error",  # anyone can cause warnings, without a token
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_TIMEOUT_S,
            )
        )
        self._thread.start()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline_s:
                raise RunError(f"the service at {self.url} did not start within {START_TIMEOUT_S} s")
            time.sleep(POLL_S)
        return self._announce()

    def end(self, end: RunEnd) -> None:
        """Remove service.json, refuse all requests with `end`, and finish those in progress."""
        if self._app is not None:
            self._file.unlink(missing_ok=True)
            self._app.run_end, self._ended_s = end, time.monotonic()
            while self.num_requests and time.monotonic() < self._ended_s + STOP_TIMEOUT_S:
                time.sleep(POLL_S)

    def close(self, is_urgent: Callable[[], bool]) -> None:
        """Close the socket `service.linger_s` after the end of the run, or once `is_urgent`."""
        if self._server is not None:
            if self._server.started:
                self._linger(is_urgent)
            self._server.should_exit = True
            self._thread.join(timeout=2 * STOP_TIMEOUT_S)
        self._socket.close()

    def _linger(self, is_urgent: Callable[[], bool]) -> None:
        left_s = self._ended_s + self._settings.linger_s - time.monotonic()
        if left_s <= 0 or is_urgent():
            return
        self._notice(
            f"the service answers all requests with status 410 for {left_s:.0f} s (service.linger_s = "
            f"{self._settings.linger_s:g}), so that its clients end; Ctrl-C closes it now"
        )
        deadline_s = time.monotonic() + left_s
        while time.monotonic() < deadline_s and not is_urgent():
            time.sleep(POLL_S)

    def _serve(self) -> None:
        assert self._server is not None
        self._server.run(sockets=[self._socket])

    def _announce(self) -> ServiceAddress:
        """Write service.json, readable by its owner only, and log what clients need."""
        address = ServiceAddress(self.url, self._file.absolute())
        write_private_file(self._file, json.dumps({"url": self.url, "token": self._auth_token}))
        self._notice(f"service listens on {self.url}, requests: {self.url}/docs, auth token: {self._file}")
        host = self._socket.getsockname()[0].partition("%")[0]
        if not ipaddress.ip_address(host).is_loopback:
            self._notice("service is reachable from other machines, without encryption; use a TLS proxy")
        if self._settings.agents:
            self._notice(f"agents: {address.for_agents}")
        return address


def make_app(requests: RequestQueue[RunContext], auth_token: str, max_body_bytes: int) -> AuthMiddleware:
    """The whole application: all routes, behind the middleware."""
    app = FastAPI(
        title="DORA-RL",
        version="1",
        description="HTTP API of a DORA-RL run: inspect and control it, run agents on its policy, supply "
        "prompts and rewards, or attach an external trainer. See docs/service.md, docs/external-trainer.md.",
        docs_url=None,
        redoc_url=None,
        default_response_class=AsciiJSONResponse,
        responses=ERROR_RESPONSES,
    )
    metrics = prometheus.HttpMetrics()
    app.state.run, app.state.http_metrics = RunHandle(requests), metrics
    app.state.upload_lock = asyncio.Lock()
    add_error_handlers(app)
    for router in ROUTERS:  # the scheme only describes the auth token; the middleware checks it
        app.include_router(router, dependencies=[Security(HTTPBearer(auto_error=False))])
    app.state.routes = [route for router in ROUTERS for route in router.routes]
    app.get("/health", tags=["run"])(control.health)
    app.get("/docs", include_in_schema=False)(api_page.get_page)
    return AuthMiddleware(app, auth_token, max_body_bytes, SIZE_LIMITS, metrics.on_response)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except PermissionError as error:
        raise ConfigError(
            f"service.host = {host!r}, service.port = {port}: cannot listen there: ports below 1024 need the "
            "rights of root; choose a port from 1024 on, or remove service.port to use a free port"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"service.host = {host!r}, service.port = {port}: cannot listen there: {error}; change one of "
            "them, or remove service.port to use a free port"
        ) from error
