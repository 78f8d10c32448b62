"""The web server of a run, in a thread of the driver.

It binds its address before the run starts, so that an address in use is found early. It responds from the moment
the run has its processes until the run is over.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import resource
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import h11
import uvicorn
from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from uvicorn.protocols.http.h11_impl import H11Protocol

from dora.auth_token import new_auth_token, read_auth_token, write_private_file
from dora.config.schema import ServiceSection
from dora.errors import ConfigError, RunError
from dora.runtime.control.requests import RequestQueue
from dora.service import agents, control, experience, prometheus, training
from dora.service.auth import AuthMiddleware
from dora.service.context import RunContext, RunHandle
from dora.service.models import ERROR_RESPONSES, AsciiJSONResponse, add_error_handlers

ADDRESS_FILE = "service.json"  # in the run's folder: URL and auth token
START_TIMEOUT_S, STOP_TIMEOUT_S = 10, 5
KEEP_ALIVE_S = 75  # an idle connection stays open this long after a response
HEAD_TIMEOUT_S = 10.0  # for the head of a request
MAX_CONNECTIONS = 1024
BACKLOG = 64  # connections that the kernel accepts before the server does

ROUTERS = (control.router, prometheus.router, agents.router, experience.router, training.router)
SIZE_LIMITS = {"/v1/weights": 2**63}  # bytes; the handler limits weights by the size of the model


class WebGateway:
    """The HTTP gateway of a run; implements `runtime.control.requests.Gateway`."""

    def __init__(self, settings: ServiceSection, run: Path) -> None:
        """Bind the address. Raises ConfigError if that fails, or if the auth token cannot be read."""
        self._settings, self._file = settings, run / ADDRESS_FILE
        file = settings.token_file
        self._auth_token = new_auth_token() if file is None else read_auth_token(file, "service.token_file")
        self._socket = _bind(settings.host, settings.port)
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._serve, name="service", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def open(self, requests: RequestQueue[RunContext], notice: Callable[[str], None]) -> None:
        """Start the server and write service.json. Raises RunError if the server does not start."""
        self._server = uvicorn.Server(
            uvicorn.Config(
                make_app(requests, self._auth_token, self._settings.max_body_bytes),
                lifespan="off",
                http=LimitedConnection,
                ws="none",
                backlog=BACKLOG,
                log_level="warning",
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
            time.sleep(0.01)
        self._announce(notice)

    def close(self) -> None:
        """Remove service.json, finish the requests in progress and close the socket."""
        if self._server is not None:
            self._file.unlink(missing_ok=True)
            self._server.should_exit = True
            self._thread.join(timeout=2 * STOP_TIMEOUT_S)
        self._socket.close()

    def _serve(self) -> None:
        assert self._server is not None
        self._server.run(sockets=[self._socket])

    def _announce(self, notice: Callable[[str], None]) -> None:
        """Write service.json, readable by its owner only, and log the URL."""
        write_private_file(self._file, json.dumps({"url": self.url, "token": self._auth_token}))
        notice(f"service listens on {self.url}; auth token in {self._file}")
        host = self._socket.getsockname()[0].partition("%")[0]
        if not ipaddress.ip_address(host).is_loopback:
            notice("service is reachable from other machines, without encryption; use a TLS proxy")


def make_app(requests: RequestQueue[RunContext], auth_token: str, max_body_bytes: int) -> AuthMiddleware:
    """The whole application: all routes, behind the middleware."""
    app = FastAPI(
        title="DORA-RL",
        version="1",
        description="HTTP API of a DORA-RL run: inspect and control it, run agents on its policy, and supply "
        "prompts, rewards or a trainer from outside. See docs/service.md and docs/external-trainer.md.",
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
    return AuthMiddleware(app, auth_token, max_body_bytes, SIZE_LIMITS, metrics.on_response)


class LimitedConnection(H11Protocol):
    """A connection that counts against `max_connections` and may be closed while it is idle.

    Each connection is an open file of the driver, and is made before its client has shown an auth token.
    """

    idle_since_s: float | None = None  # on the loop's clock; None: a request is in progress
    _head_timer: asyncio.TimerHandle | None = None  # closes the connection unless the head arrives

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Over the limit, close the connection that has been idle longest, possibly this one."""
        super().connection_made(transport)
        self._start_head_timer()
        self.idle_since_s = self.loop.time()
        if len(self.connections) > max_connections():
            idle = [each for each in self.connections if _idle_since_s(each) is not None]
            oldest = min(idle, key=lambda each: _idle_since_s(each) or 0.0)
            oldest.transport.abort()
            self.connections.discard(oldest)

    def data_received(self, data: bytes) -> None:
        """Start the timer of a request's head with its first bytes, and stop it after the last."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()
        self._update_idle()

    def on_response_complete(self) -> None:
        """uvicorn may start a pipelined request here; else the connection is idle."""
        super().on_response_complete()
        self._update_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self._stop_head_timer()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _update_idle(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.idle_since_s = None
        elif self.idle_since_s is None:
            self.idle_since_s = self.loop.time()


def _idle_since_s(connection: object) -> float | None:
    return connection.idle_since_s if isinstance(connection, LimitedConnection) else None


def max_connections() -> int:
    """At most half of the files that this process may open, because the run needs some too."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, limit // 2)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"service.host = {host!r}, service.port = {port}: cannot listen there: {error}; change one of "
            "them, or remove service.port to use a free port"
        ) from error
