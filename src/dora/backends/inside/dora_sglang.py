"""SGLang's server, started so that it can serve DORA: it tells the digest of weights, and needs a token.

    python -m dora_sglang --model-path ...

It runs in SGLang's own processes: each that the server starts imports this first, as multiprocessing does
with what was started.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

TOKEN_KEY = "DORA_SGLANG_TOKEN"
TOLD = "DORA's digest: "  # before 32 hex digits
FILE = "model.safetensors"

Update = Callable[..., tuple[bool, str]]


def telling(update: Update, digest_of: Callable[[str], str]) -> Update:
    """SGLang's load of the weights in a folder, which says of which bytes, too."""

    @functools.wraps(update)
    def update_and_tell(self: object, model_path: str, *args: object, **more: object) -> tuple[bool, str]:
        is_done, message = update(self, model_path, *args, **more)
        return is_done, f"{message} {TOLD}{digest_of(str(Path(model_path) / FILE))}." if is_done else message

    return update_and_tell


def with_token(arguments: list[str]) -> list[str]:
    """The server's arguments, with the token of the environment: others can read a command line."""
    if not os.environ.get(TOKEN_KEY):
        raise RuntimeError(f"{TOKEN_KEY} is not set: give the server and `dora train` the same token")
    return [*arguments, "--api-key", os.environ[TOKEN_KEY]]


def serve() -> None:
    """Does not return before the server ends."""
    sys.argv = with_token(sys.argv)
    runpy.run_module("sglang.launch_server", run_name="__main__")


def tell() -> None:
    """In a process that the server has started."""
    from dora_digest import digest_of  # type: ignore[import-not-found]
    from sglang.srt.model_executor.model_runner_components import (  # type: ignore[import-not-found]
        weight_updater,
    )

    updater = weight_updater.WeightUpdater
    updater.update_weights_from_disk = telling(updater.update_weights_from_disk, digest_of)


if __name__ == "__main__":
    serve()
elif __name__ == "__mp_main__":
    tell()
