"""The HTTP server of an inference engine: start or attach, call, stop.

Requests are JSON with an auth token in each. A server started here ends with the engine's process. A request
that the server refuses raises EngineError; a server that does not reply is lost and raises RunError.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from dora.engine.request import EngineError
from dora.errors import ConfigError, RunError

CALL_TIMEOUT_S = 30.0
START_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.2
_NUM_LOG_LINES = 300  # of the server's output, in the error if it does not start
_MAX_ERROR_CHARS = 2000  # of a response with an error status
_HERE = Path(__file__).parent

JsonBody = Mapping[str, object]


@dataclass(frozen=True)
class ServerKind:
    """A kind of server: `python -m module` starts it, and it reads its auth token from `token_variable`."""

    name: str
    module: str
    token_variable: str
    environment: Mapping[str, str]  # variables that a user cannot override
    protocol: int  # of DORA-RL's plugins
    packages: tuple[str, ...]  # that have it
    tested_versions: str  # a pattern; others have other calls, flags and classes
    remedy: str  # for other versions

    def check_options(self, python: object = None, url: object = None) -> None:
        """Raises ConfigError unless exactly one of an interpreter and a URL is given, and it is usable."""
        if (python is None) == (url is None):
            raise ConfigError(
                f"{self.name}: give either python, an interpreter, or url, the address of a server"
            )
        if python is None:
            _parse_url(url)
        elif not isinstance(python, str) or shutil.which(python) is None:
            raise ConfigError(
                f"python = {python!r}: no such command; name the interpreter of an environment that has "
                f"{self.name}"
            )

    def check_installed(self, python: str) -> None:
        """Raises ConfigError if an interpreter has an untested version. It need not answer."""
        code = (
            "import sys\nfrom importlib.metadata import distributions\n"
            "print(*[d.version for d in distributions() if d.metadata['Name'] in sys.argv[1:]][:1])"
        )
        command = [shutil.which(python) or python, "-c", code, *self.packages]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=CALL_TIMEOUT_S).stdout
        except (OSError, subprocess.TimeoutExpired):
            return
        if version := answer.strip():
            self.check_version(version, f"python = {python}")

    def check_version(self, version: str, what: str) -> None:
        """Raises ConfigError unless `what` has a tested version."""
        if not fnmatchcase(version, self.tested_versions):
            tested = self.tested_versions.removesuffix(".*")
            raise ConfigError(
                f"{what} has {self.name} {version}; DORA-RL is tested with {tested}: install {self.remedy}"
            )


class EngineServer:
    """A running server. Any thread may call it: each call has its own connection."""

    def __init__(
        self,
        kind: ServerKind,
        url: str,
        auth_token: str,
        process: subprocess.Popen[bytes] | None = None,
        log_lines: Iterable[str] = (),
    ) -> None:
        """`process`: its parent, if the server was started here; `log_lines`: its last output.

        Raises ConfigError if `url` is malformed.
        """
        self.kind, self.url, self.auth_token, self._log_lines = kind, url, auth_token, log_lines
        (self._host, self._port), self._process = _parse_url(url), process

    def call(self, path: str, body: JsonBody | None = None, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """POST a body, or GET without one, and parse the JSON response. Raises EngineError, RunError."""
        text = self.call_raw(path, body, timeout_s)
        return json.loads(text) if text else None

    def call_raw(self, path: str, body: JsonBody | None = None, timeout_s: float = CALL_TIMEOUT_S) -> bytes:
        """As `call`, for a response that is not JSON."""
        with self._connection(timeout_s) as connection:
            return self._request(connection, path, body).read()

    def stream(self, path: str, body: JsonBody) -> Iterator[Any]:
        """POST a body and yield the server-sent events of the response. Raises EngineError, RunError."""
        with self._connection(None) as connection:
            for line in self._request(connection, path, body):
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    yield json.loads(line[len(b"data: ") :])

    def check_alive(self) -> None:
        """Raises RunError if a server that was started here has exited."""
        if self._process is not None and self._process.poll() is not None:
            raise self._lost("its process has exited")

    def check_responds(self, timeout_s: float) -> None:
        """Raises RunError if the server responds to no request, with whatever status, within `timeout_s`."""
        with self._connection(timeout_s) as connection:
            connection.request("GET", "/")
            connection.getresponse()

    def check_plugins(self, info: Mapping[str, Any], dtype: str, version_slots: int) -> None:
        """Raises EngineError unless DORA-RL's plugins describe a server that the engine can use."""
        if info.get("protocol") != self.kind.protocol:
            raise EngineError(
                f"{self} has the plugins of another version of DORA-RL: start it again with those in "
                f"{_HERE / 'server_plugins'}"
            )
        if info["dtype"] != dtype:
            raise EngineError(f"{self} computes in {info['dtype']}; set engine.dtype to that")
        if info["version_slots"] < version_slots:
            raise EngineError(
                f"{self} has slots for {info['version_slots']} versions; set version_slots to that, or start "
                f"it with more, see docs/{self.kind.name.lower()}.md"
            )

    def first_logged_error(self) -> str:
        """The cause of a failure: the first exception in its last output, or an empty string."""
        errors = (line for line in [*self._log_lines] if re.search(r"\b[A-Z]\w+Error\b", line))
        found = next((line for line in errors if "WARNING" not in line), "")
        return f" (its log: {found.strip()})" if found else ""

    def stop(self) -> None:
        """Stop a server that was started here, with all its processes."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    @contextmanager
    def _connection(self, timeout_s: float | None) -> Iterator[http.client.HTTPConnection]:
        """A connection for one request. Raises RunError if the server is lost meanwhile."""
        try:
            with closing(http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)) as connection:
                yield connection
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a truncated line
            raise self._lost(f"{type(error).__name__}: {error}") from error

    def _request(
        self, connection: http.client.HTTPConnection, path: str, body: JsonBody | None
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self.auth_token}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, headers)
        response = connection.getresponse()
        if response.status >= 400:
            text = response.read().decode(errors="replace")[:_MAX_ERROR_CHARS]
            variable = self.kind.token_variable
            remedy = (
                f"; give the server and `dora train` the same {variable}" if response.status == 401 else ""
            )
            raise EngineError(f"{self} answers {response.status} to {path}: {text}{remedy}")
        return response

    def _lost(self, why: str) -> RunError:
        return RunError(f"{self} at {self.url} does not answer ({why}){self.first_logged_error()}")

    def __str__(self) -> str:
        return f"the {self.kind.name} server"


def start_server(
    kind: ServerKind, python: str, flags: Sequence[str], environment: Mapping[str, str]
) -> EngineServer:
    """Start a server with the interpreter `python` on a free port, and wait until it is ready.

    Raises RunError if it exits.
    """
    auth_token = secrets.token_urlsafe(32)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        reserved.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # so that only the server can listen there
        port = reserved.getsockname()[1]
        address = ("--host", "127.0.0.1", "--port", str(port))
        command = (shutil.which(python) or python, "-m", kind.module, *flags, *address)
        process = subprocess.Popen(
            [sys.executable, str(_HERE / "run_until_eof.py"), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, **kind.environment, **plugin_environment(kind, auth_token)},
            start_new_session=True,
            umask=0o077,  # the server's processes use sockets in the folder for temporary files
        )
        assert process.stdout is not None
        log_lines: deque[str] = deque(maxlen=_NUM_LOG_LINES)
        threading.Thread(target=_drain_output, args=(process.stdout, log_lines), daemon=True).start()
        server = EngineServer(kind, f"http://127.0.0.1:{port}", auth_token, process, log_lines)
        _wait_until_ready(server, process, log_lines)
    return server


def attach_server(kind: ServerKind, url: str, max_context: int) -> EngineServer:
    """Use a server that is already running.

    Raises ConfigError if it does not answer, EngineError if its context is shorter than `max_context` tokens.
    """
    server = EngineServer(kind, url, os.environ.get(kind.token_variable, ""))
    try:
        (model, *_) = server.call("/v1/models")["data"]
    except RunError as error:
        raise ConfigError(f"{error}; start it, see docs/{kind.name.lower()}.md") from error
    if (own_context := model["max_model_len"]) < max_context:
        raise EngineError(
            f"{server} at {url} accepts {own_context} tokens; the run needs {max_context}; start it with a "
            "longer context, or lower the maximum lengths"
        )
    return server


def _parse_url(url: object) -> tuple[str, int]:
    """Host and port. Raises ConfigError."""
    try:
        parts = urlsplit(str(url))
        if parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    except ValueError:  # the port is not a number
        pass
    raise ConfigError(f"url = {url!r}: must read http://host:port")


def plugin_environment(kind: ServerKind, auth_token: str) -> dict[str, str]:
    """Variables with which Python finds `server_plugins`, and these their auth token."""
    return {
        kind.token_variable: auth_token,
        "PYTHONPATH": str(_HERE / "server_plugins"),
        "PYTHONSAFEPATH": "1",  # do not import from the working directory
    }


def _drain_output(output: IO[bytes], log_lines: deque[str]) -> None:
    """Read a server's output, so that its pipe does not fill up, and keep the last lines."""
    with output:
        for line in output:
            log_lines.append(line.decode(errors="replace").rstrip())


def _wait_until_ready(server: EngineServer, process: subprocess.Popen[bytes], log_lines: deque[str]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            server.call("/health")
            return
        except (EngineError, RunError):  # EngineError: another process may answer on that port
            if process.poll() is not None or time.monotonic() > deadline_s:
                time.sleep(_POLL_INTERVAL_S)  # for the last lines of its output
                server.stop()
                log = "\n".join(log_lines)
                raise RunError(f"{server.kind.name} did not start:\n{log}") from None
        time.sleep(_POLL_INTERVAL_S)
