"""SGLang's server with changes: it reports the digest of loaded weights and the weights of each response,
requires an auth token, ends a response only at the stop ids of its request, and has the scheduler of
`dora_sglang_scheduler`.

    python -m dora_sglang --model-path ...

DORA_SGLANG_VERSION_SLOTS in its environment is how many versions it can hold. It runs in SGLang's processes.
multiprocessing imports the main module in every process that the server starts, so each of them is patched.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

TOKEN_VARIABLE = "DORA_SGLANG_TOKEN"
SLOTS_VARIABLE = "DORA_SGLANG_VERSION_SLOTS"
KV_CONNECTOR_VARIABLE = "DORA_SGLANG_KV_CONNECTOR"  # "nixl"; else KV goes into files
ROUTES_FLAG = "--enable-return-routed-experts"
SLOTS_FLAGS = ("--disable-overlap-schedule", "--disable-cuda-graph")  # a graph is of one model
# In the manifest of a load.
LOADED_KEY = "dora_loaded"  # labels of the versions that stay
PART_KEY = "dora_part"  # number of a part of the file, and the bytes of a part at most
DECODE_ONLY, CONTINUE_WITH = "dora_decode_only", "dora_continue_with"  # calls of `/set_internal_state`
KEEP = "#keep"  # at the end of a request's `extra_key`: it keeps its version
PROTOCOL = 5  # of the calls, and of the events of responses
DIGEST_PREFIX = "DORA's digest: "  # before 32 hex digits in the message of a load's last part


def with_auth_token(arguments: list[str]) -> list[str]:
    """The server's arguments with the token of the environment: a command line is not secret.

    In one argument, because a token may begin with a dash.
    """
    if not os.environ.get(TOKEN_VARIABLE):
        raise RuntimeError(f"{TOKEN_VARIABLE} is not set: give the server and `dora train` the same token")
    return [*arguments, f"--api-key={os.environ[TOKEN_VARIABLE]}"]


def serve() -> None:
    """Run the server. Returns when it ends."""
    sys.argv = with_auth_token(sys.argv)
    send_aborts_again()
    if os.environ.get(SLOTS_VARIABLE, "1") != "1":
        sys.argv += SLOTS_FLAGS
        load_during_generation()
    runpy.run_module("sglang.launch_server", run_name="__main__")


def send_aborts_again() -> None:
    """In the process of the HTTP server: SGLang aborts a request once, and the abort may overtake it."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager  # type: ignore[import-not-found]

    abort = TokenizerManager.abort_request

    def abort_request(self: Any, rid: str = "", abort_all: bool = False) -> None:
        if (state := self.rid_to_state.get(rid)) is not None:
            state.abort_sent = False
        abort(self, rid, abort_all)

    TokenizerManager.abort_request = abort_request


def load_during_generation() -> None:
    """In the process of the HTTP server: SGLang would first wait for all responses."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    async def update_weights_from_disk(self: Any, obj: Any, request: Any = None) -> Any:
        self.auto_create_handle_loop()
        obj.load_format = obj.load_format or self.config_value("load_format")
        return await self._wait_for_model_update_from_disk(obj)

    TokenizerManager.update_weights_from_disk = update_weights_from_disk


def patch_scheduler() -> None:
    """In a process that the server has started."""
    import dora_sglang_scheduler as own  # type: ignore[import-not-found]
    from sglang.srt.configs.model_config import ModelConfig  # type: ignore[import-not-found]
    from sglang.srt.managers import scheduler  # type: ignore[import-not-found]
    from sglang.srt.managers.scheduler_components import (  # type: ignore[import-not-found]
        output_streamer,
        weight_updater,
    )
    from sglang.srt.model_executor.model_runner import ModelRunner  # type: ignore[import-not-found]

    weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk = own.load_part
    ModelRunner.load_model = own.load_slots(ModelRunner.load_model)
    events = output_streamer._GenerationStreamAccumulator
    events.accept = own.list_versions(events.accept)
    scheduler.Scheduler = own.VersionScheduler
    ModelConfig._get_hf_eos_token_id = lambda self: set()  # of generation_config.json, too
    decode_single_tokens()
    if "--enable-lora" in sys.argv or ROUTES_FLAG in sys.argv:
        pin_no_memory_without_accelerator()


def decode_single_tokens() -> None:
    """SGLang's attention on a CPU would compute that of a whole cached prefix again for one new token."""
    from sglang.srt.layers.attention.torch_native_backend import (  # type: ignore[import-not-found]
        TorchNativeAttnBackend,
    )

    extend = TorchNativeAttnBackend._run_sdpa_forward_extend

    def extend_or_decode(self: Any, *args: Any, **options: Any) -> Any:
        *tensors, _, extend_lens, encoder_lens = args
        if not bool((extend_lens == 1).all()):
            return extend(self, *args, **options)
        return self._run_sdpa_forward_decode(*tensors, encoder_lens, **options | {"causal": False})

    TorchNativeAttnBackend._run_sdpa_forward_extend = extend_or_decode


def pin_no_memory_without_accelerator() -> None:
    """SGLang's adapters and routes of experts always pin host memory, which torch refuses on a machine that
    has a CPU only.
    """
    import torch
    from sglang.srt.mem_cache.pool_host import common  # type: ignore[import-not-found]

    def without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    if not torch.accelerator.is_available():
        common.ALLOC_MEMORY_FUNCS["cpu"] = lambda size, *, dtype, **_: torch.empty(size, dtype=dtype)
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
        for name in ("empty", "ones", "tensor", "zeros"):
            setattr(torch, name, without_pinning(getattr(torch, name)))


if __name__ == "__main__":
    serve()
elif __name__ == "__mp_main__":
    patch_scheduler()
