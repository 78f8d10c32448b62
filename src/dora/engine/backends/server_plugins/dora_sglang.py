"""SGLang's server with three changes: it reports the digest of loaded weights, requires an auth token, and
ends a response only at the stop ids of its request.

    python -m dora_sglang --model-path ...

It runs in SGLang's processes. multiprocessing imports the main module in every process that the server
starts, so each of them is patched.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

TOKEN_VARIABLE = "DORA_SGLANG_TOKEN"
DIGEST_PREFIX = "DORA's digest: "  # before 32 hex digits in the message of an update
WEIGHTS_FILE = "model.safetensors"

UpdateFromDisk = Callable[..., tuple[bool, str]]


def with_digest(update: UpdateFromDisk, digest_of: Callable[[str], str]) -> UpdateFromDisk:
    """SGLang's update of the weights from a folder, with the digest of the file in its message."""

    @functools.wraps(update)
    def update_with_digest(
        self: object, model_path: str, *args: object, **kwargs: object
    ) -> tuple[bool, str]:
        is_done, message = update(self, model_path, *args, **kwargs)
        if is_done:
            message = f"{message} {DIGEST_PREFIX}{digest_of(str(Path(model_path) / WEIGHTS_FILE))}."
        return is_done, message

    return update_with_digest


def with_auth_token(arguments: list[str]) -> list[str]:
    """The server's arguments with the token of the environment: a command line is not secret."""
    if not os.environ.get(TOKEN_VARIABLE):
        raise RuntimeError(f"{TOKEN_VARIABLE} is not set: give the server and `dora train` the same token")
    return [*arguments, "--api-key", os.environ[TOKEN_VARIABLE]]


def serve() -> None:
    """Run the server. Returns when it ends."""
    sys.argv = with_auth_token(sys.argv)
    runpy.run_module("sglang.launch_server", run_name="__main__")


def patch_scheduler() -> None:
    """In a process that the server has started: report digests, and know no end of a sequence."""
    import dora_digest  # type: ignore[import-not-found]
    from sglang.srt.configs.model_config import ModelConfig  # type: ignore[import-not-found]
    from sglang.srt.model_executor.model_runner_components import (  # type: ignore[import-not-found]
        weight_updater,
    )

    updater = weight_updater.WeightUpdater
    update = updater.update_weights_from_disk
    updater.update_weights_from_disk = with_digest(update, dora_digest.safetensors_digest)
    ModelConfig._get_hf_eos_token_id = lambda self: set()  # of generation_config.json, too


if __name__ == "__main__":
    serve()
elif __name__ == "__mp_main__":
    patch_scheduler()
