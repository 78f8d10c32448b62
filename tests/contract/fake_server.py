"""What the fake servers of vLLM and SGLang have in common, and the engines that tests attach to them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from dora.data.tokenizer import save_character_tokenizer
from dora.engine.backends.http_engine import HttpEngine
from dora.engine.request import Completion
from dora.model.pretrained import save_pretrained
from dora.testing import CONFIG, version_weights
from dora.testing.engine_contract import CHARACTERS, MAX_CONTEXT, MAX_ROWS

AUTH_TOKEN = "of this server"
MAX_STEPS = 1000


class FakeServer(ThreadingHTTPServer):
    """Serves in a thread. `faults` are those of the test."""

    daemon_threads = True

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], version_slots: int, faults: dict[str, Any]
    ) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.version_slots, self.faults = version_slots, faults
        self.loaded_files: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


EngineT = TypeVar("EngineT", bound=HttpEngine)
ServerT = TypeVar("ServerT", bound=FakeServer)


def read_recorded(name: str) -> Any:
    """The recorded answers of a real server."""
    return json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text(encoding="utf-8"))


def recorded_events(recorded: Any, name: str) -> list[Any]:
    """The events of a real server's answer."""
    lines = recorded["streams"][name]
    assert lines[-1] == "data: [DONE]\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def attached_engines(
    engine: Callable[..., EngineT], server: Callable[..., ServerT], folder: Path
) -> Iterator[Callable[..., tuple[EngineT, ServerT]]]:
    """A function that makes an engine which holds the first `num_versions`, and its server with faults."""
    save_pretrained(folder / "model", CONFIG, version_weights(0))
    save_character_tokenizer(folder / "model", CHARACTERS)
    with ExitStack() as servers:

        def make(
            num_versions: int = 0,
            num_slots: int = 1,
            max_context: int = MAX_CONTEXT,
            pool: Path | None = None,
            silence_s: float = 60.0,
            inflight_update: str | None = None,
            options: Mapping[str, Any] | None = None,
            **faults: Any,
        ) -> tuple[EngineT, ServerT]:
            own = servers.enter_context(closing(server(**{"version_slots": num_slots} | faults)))
            attached = engine_at(
                engine,
                own.url,
                folder / "model",
                version_slots=num_slots,
                max_context=max_context,
                pool=pool,
                silence_s=silence_s,
                inflight_update=inflight_update,
                **(options or {}),
            )
            for version in range(num_versions):
                attached.load(version, version_weights(version))
            return attached, own

        yield make


def engine_at(kind: Callable[..., EngineT], url: str | None, model: Path, **options: Any) -> EngineT:
    given = {"max_rows": MAX_ROWS, "max_context": MAX_CONTEXT, "version_slots": 1, "device": "cpu"} | options
    return kind(model=str(model), dtype="float32", url=url, **given)


def run(engine: HttpEngine) -> list[Completion]:
    """Step until the first answers."""
    for _ in range(MAX_STEPS):
        if answers := engine.step():
            return answers
    return []
