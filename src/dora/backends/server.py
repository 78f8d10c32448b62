"""A server of an inference engine as DORA speaks to it: JSON over HTTP, with a token in every request.

One is started beside an engine, and ends with it, or is there already. What it refuses is an EngineError;
where there is no answer there is no server any more, and that is a RunError.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from dora.engine.sequence import EngineError
from dora.errors import ConfigError, RunError

HERE = Path(__file__).parent
CALL_S = 30.0  # longest that a call may take
START_S = 600.0  # longest that a start may take where no run waits for it
LOOK_S = 0.2
_NUM_LAST_WORDS = 20  # lines
_MAX_TOLD = 2000  # characters of a refusal

Body = Mapping[str, object]


@dataclass(frozen=True)
class Product:
    """Whose server it is: `python -m module` starts it, `token_key` is the variable that has its token."""

    name: str
    module: str
    token_key: str
    settings: Mapping[str, str]  # variables that are not the user's to choose


class Server:
    """One server. Any thread may call it; each call has a connection of its own."""

    def __init__(
        self, product: Product, url: str, token: str, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """`process` keeps a server that belongs to us; raises ConfigError for what is no address."""
        self.product, self.url, self.token = product, url, token
        (self._host, self._port), self._process = _address(url), process

    def call(self, path: str, body: Body | None = None, timeout_s: float = CALL_S) -> Any:
        """The answer to a POST with a body, or to a GET without one. Raises EngineError, RunError."""
        text = self.tell(path, body, timeout_s)
        return json.loads(text) if text else None

    def tell(self, path: str, body: Body | None = None, timeout_s: float = CALL_S) -> bytes:
        """The same, and the answer is no JSON."""
        try:
            with closing(self._connect(timeout_s)) as connection:
                return self._ask(connection, path, body).read()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error

    def stream(self, path: str, body: Body) -> Iterator[Any]:
        """The events that answer a POST, as they come. Raises EngineError, RunError."""
        try:
            with closing(self._connect(None)) as connection:
                for line in self._ask(connection, path, body):
                    if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                        yield json.loads(line[len(b"data: ") :])
        except (OSError, http.client.HTTPException, ValueError) as error:  # a line that was cut off
            raise self._lost(error) from error

    def check(self) -> None:
        """Raises RunError if a server of ours has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise self._lost(None)

    def end(self) -> None:
        """End a server of ours, with all its processes."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    def _connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _ask(
        self, connection: http.client.HTTPConnection, path: str, body: Body | None
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, headers)
        answer = connection.getresponse()
        if answer.status >= 400:
            told = answer.read().decode(errors="replace")[:_MAX_TOLD]
            key = self.product.token_key
            remedy = f"; give it and `dora train` the same {key}" if answer.status == 401 else ""
            raise EngineError(f"{self} answers {answer.status} to {path}: {told}{remedy}")
        return answer

    def _lost(self, error: Exception | None) -> RunError:
        why = "it has ended" if error is None else f"{type(error).__name__}: {error}"
        return RunError(f"{self} at {self.url} does not answer ({why})")

    def __str__(self) -> str:
        return f"the {self.product.name} server"


def check(product: Product, python: object = None, url: object = None) -> None:
    """Raises ConfigError unless one of them is given, and is the name of a command or an address."""
    if (python is None) == (url is None):
        raise ConfigError(f"give {product.name} either python, an interpreter, or url, a server")
    if python is None:
        _address(url)
    elif not isinstance(python, str) or shutil.which(python) is None:
        raise ConfigError(
            f"python = {python!r}: no such command; name the interpreter of an environment that has "
            f"{product.name}"
        )


def start(product: Product, python: str, flags: Sequence[str], settings: Mapping[str, str]) -> Server:
    """A server of our own on a free port of this machine, once it is ready.

    `python` is an interpreter that has the product; `settings` are environment variables. Raises RunError if
    the server ends.
    """
    token = secrets.token_urlsafe(32)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server may listen, nobody else
        port = reserved.getsockname()[1]
        where = ("--host", "127.0.0.1", "--port", str(port))
        command = (shutil.which(python) or python, "-m", product.module, *flags, *where)
        process = subprocess.Popen(
            [sys.executable, str(HERE / "keeping.py"), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings, **product.settings, **_ours(product, token)},
            start_new_session=True,
            umask=0o077,  # its processes speak through sockets below the folder for temporary files
        )
        assert process.stdout is not None
        last_words: deque[str] = deque(maxlen=_NUM_LAST_WORDS)
        threading.Thread(target=_listen, args=(process.stdout, last_words), daemon=True).start()
        server = Server(product, f"http://127.0.0.1:{port}", token, process)
        _wait(server, process, last_words)
    return server


def attach(product: Product, url: str, max_context: int) -> Server:
    """A server that is there already.

    Raises ConfigError if it is not, EngineError if it takes fewer tokens than `max_context`.
    """
    server = Server(product, url, os.environ.get(product.token_key, ""))
    try:
        (model, *_) = server.call("/v1/models")["data"]
    except RunError as error:
        raise ConfigError(f"{error}; start it, see docs/{product.name.lower()}.md") from error
    if (most := model["max_model_len"]) < max_context:
        raise EngineError(f"{server} at {url} takes {most} tokens; it would be asked for {max_context}")
    return server


def _address(url: object) -> tuple[str, int]:
    """Host and port. Raises ConfigError."""
    try:
        parts = urlsplit(str(url))
        if parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    except ValueError:  # its port is no port
        pass
    raise ConfigError(f"url = {url!r}: must read http://name:port")


def _ours(product: Product, token: str) -> dict[str, str]:
    """What is ours in every server of ours."""
    return {
        product.token_key: token,
        "PYTHONPATH": str(HERE / "inside"),
        "PYTHONSAFEPATH": "1",  # what lies in the working directory is not imported
    }


def _listen(output: IO[bytes], last_words: deque[str]) -> None:
    """Keep what a server says from filling its pipe, and its last lines."""
    with output:
        for line in output:
            last_words.append(line.decode(errors="replace").rstrip())


def _wait(server: Server, process: subprocess.Popen[bytes], last_words: deque[str]) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            server.call("/health")
            return
        except (EngineError, RunError):  # somebody else may listen there
            if process.poll() is not None or time.monotonic() > deadline_s:
                time.sleep(LOOK_S)  # for its last words
                server.end()
                told = "\n".join(last_words)
                raise RunError(f"{server.product.name} did not start:\n{told}") from None
        time.sleep(LOOK_S)
