"""The service of a run: a web server in a thread of the driver, behind a token.

It listens before the run starts, so that an address in use is found at once; it answers from
when the run has its processes until it is over.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvicorn

from dora.errors import ConfigError, RunError
from dora.runtime.calls import Calls
from dora.service.connections import BACKLOG, Connection
from dora.service.routes import make_app
from dora.serving import Service
from dora.tokens import new_token, read_token, write_private

ADDRESS = "service.json"  # in the run's folder: where the service is, and its token
START_S, END_S = 10, 5  # deadlines of the server
KEEP_S = 75  # that a connection may rest between two calls


class WebDoor:
    """Opens a run to the network."""

    def __init__(self, settings: Service, run: Path) -> None:
        """Begin to listen. Raises ConfigError for an address that cannot be listened at, or a bad token."""
        self._settings, self._file = settings, run / ADDRESS
        file = settings.token_file
        self._token = new_token() if file is None else read_token(file, "service.token_file")
        self._socket = _listen(settings.host, settings.port)
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._serve, name="service", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def open(self, calls: Calls, notice: Callable[[str], None]) -> None:
        """Begin to answer. Raises RunError if the server does not start."""
        self._server = uvicorn.Server(
            uvicorn.Config(
                make_app(calls, self._token, self._settings.max_body_bytes),
                lifespan="off",
                http=Connection,
                ws="none",
                backlog=BACKLOG,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_S,
                timeout_graceful_shutdown=END_S,
            )
        )
        self._thread.start()
        deadline_s = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline_s:
                raise RunError(f"the service at {self.url} did not start within {START_S} s")
            time.sleep(0.01)
        self._tell(notice)

    def close(self) -> None:
        """End what is being answered, and listen no more."""
        if self._server is not None:
            self._file.unlink(missing_ok=True)
            self._server.should_exit = True
            self._thread.join(timeout=2 * END_S)
        self._socket.close()

    def _serve(self) -> None:
        assert self._server is not None
        self._server.run(sockets=[self._socket])

    def _tell(self, notice: Callable[[str], None]) -> None:
        """Write where the service is, for nobody but who started it."""
        write_private(self._file, json.dumps({"url": self.url, "token": self._token}))
        notice(f"the service listens at {self.url}; its token is in {self._file}")
        host = self._socket.getsockname()[0].partition("%")[0]
        if not ipaddress.ip_address(host).is_loopback:
            notice("other machines can reach the service, and what passes is not encrypted")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"service.host = {host!r}, service.port = {port}: cannot listen there: {error}; change one of "
            "them, or remove service.port for a free one"
        ) from error
