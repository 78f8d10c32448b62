"""A stand-in for the Hugging Face hub: one repository of files, over HTTP on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@contextmanager
def serve_hub(name: str, kind: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve the repository, whose branches are COMMITS; yields the address for HF_ENDPOINT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(name, kind, files))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(name: str, kind: str, files: Mapping[str, bytes]) -> type[BaseHTTPRequestHandler]:
    api = f"/api/{kind}s/{name}"
    resolve = f"/{name}/resolve" if kind == "model" else f"/{kind}s/{name}/resolve"
    tree = [
        {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for path, content in files.items()
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *args: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            for branch, commit in COMMITS.items():
                if path in (f"{api}/revision/{branch}", f"{api}/revision/{commit}"):
                    siblings = [{"rfilename": file} for file in files]
                    info = {"id": name, "sha": commit, "siblings": siblings}
                    return self._send(json.dumps(info).encode(), commit, with_body=with_body)
                if path.startswith(f"{api}/tree/{commit}"):
                    return self._send(json.dumps(tree).encode(), commit, with_body=with_body)
                file = path.removeprefix(f"{resolve}/{commit}/")
                if file in files:
                    return self._send(files[file], commit, with_body=with_body)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, body: bytes, commit: str, *, with_body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    return Handler
