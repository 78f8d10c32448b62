"""The web server of a run, in a thread of the driver.

It binds its address before the run starts, so that an address in use is found early. It serves requests from
the start of the workers until the end of the run.
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
from dora.runtime.control.requests import RequestQueue
from dora.service import agents, control, prometheus, rewards, training, weights
from dora.service.auth import AuthMiddleware
from dora.service.connections import BACKLOG, LimitedConnection
from dora.service.context import RunContext, RunHandle
from dora.service.models import ERROR_RESPONSES, AsciiJSONResponse, add_error_handlers

ADDRESS_FILE = "service.json"  # in the run's folder: URL and auth token
START_TIMEOUT_S, STOP_TIMEOUT_S = 10, 5
KEEP_ALIVE_S = 75  # an idle connection stays open this long after a response

ROUTERS = (
    control.router,
    prometheus.router,
    agents.router,
    training.router,
    weights.router,
    rewards.router,
)
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
