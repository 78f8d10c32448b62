"""Implement `dora generate`, `dora init-model` and `dora doctor`; each function returns the text to print."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.distributed as dist

import dora
from dora.core.types import GroupId, RequestId
from dora.data.chat import ChatTemplate, PromptEncoder
from dora.data.dataset import read_rows
from dora.data.tokenizer import MIN_VOCAB_SIZE, Tokenizer, save_bpe_tokenizer
from dora.data.tool_calls import json_object
from dora.engine.engine import Engine
from dora.engine.request import Completion, EngineError, Request, SamplingParams
from dora.errors import InputError, ModelError, RewardError
from dora.model.config import ModelConfig
from dora.model.pretrained import load_config, load_pretrained, save_pretrained
from dora.model.weights import initial_weights
from dora.rewards.sandbox.runner import Sandbox
from dora.text import plural
from dora.trainer.checkpoint_folders import check_model_folder

MAX_ROWS = 32  # responses that `dora generate` decodes at once
FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe")
MOE_KEYS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size"}
TOKENIZER_JSON = "tokenizer.json"
# One of these files must name the end token. The new model's config.json replaces the copied one.
FILES_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
PACKAGES = ("torch", "numpy", "numba", "triton", "tokenizers", "safetensors", "transformers")


@dataclass(frozen=True)
class GeneratedResponse:
    """A response with the log-probs of its tokens; see `Completion`."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: str

    def __str__(self) -> str:
        """The text, and a line with its length and log-probs."""
        return (
            f"{self.text}\n  [{self.finish_reason} after {plural(len(self.token_ids), 'token')}, "
            f"log-prob {sum(self.logprobs):.3f} as sampled, {sum(self.raw_logprobs):.3f} by the model]"
        )


def generate(
    folder: Path,
    prompt: str,
    sampling: Mapping[str, Any],
    engine_options: Mapping[str, str],
    *,
    seed: int,
    num_responses: int,
    is_chat: bool,
    chat_template_kwargs: str,
    as_json: bool,
) -> str:
    """Responses to one prompt, as text or as lines of JSON; the k-th is sampled with `seed` + k.

    `sampling` has fields of `SamplingParams`, `engine_options` arguments of `Engine`. With `is_chat` the
    prompt is a user message for the model's chat template; its variables are a JSON object. Raises
    InputError.
    """
    check_model_folder("MODEL", folder)
    context, tokenizer = load_config(folder).max_position_embeddings, Tokenizer(folder)
    template = template_of(folder, is_chat, chat_template_kwargs)
    prompt_ids = tuple(PromptEncoder(tokenizer, template).encode(prompt))
    if not prompt_ids:
        raise InputError("the prompt is empty; give at least one token")
    try:
        params = SamplingParams(**sampling)
        if len(prompt_ids) + params.max_tokens > context:
            raise InputError(
                f"the prompt has {len(prompt_ids)} tokens and --max-tokens is {params.max_tokens}: together "
                f"they exceed the model's context of {context}; shorten the prompt or lower --max-tokens"
            )
        params = replace(params, stop_ids=(*params.stop_ids, *tokenizer.stop_ids))
        group = GroupId(0, 0)
        requests = [
            Request(RequestId(*group, k), group, prompt_ids, 0, seed + k, params)
            for k in range(num_responses)
        ]
        completions = _complete(folder, tokenizer, requests, engine_options)
    except EngineError as error:
        raise InputError(str(error)) from error
    responses = [_response(completions[request.id], tokenizer) for request in requests]
    return "\n".join(json.dumps(asdict(response)) if as_json else str(response) for response in responses)


def template_of(folder: Path, is_chat: bool, variables: str) -> ChatTemplate | None:
    """The chat template, whose variables are a JSON object; None without --chat. Raises InputError."""
    found = json_object(variables)
    if found is None or (found and not is_chat):
        raise InputError(
            f"--chat-template-kwargs {variables}: give a JSON object together with --chat, such as "
            """--chat --chat-template-kwargs '{"enable_thinking": false}'"""
        )
    return ChatTemplate(folder, variables=found) if is_chat else None


def _complete(
    folder: Path, tokenizer: Tokenizer, requests: list[Request], engine_options: Mapping[str, Any]
) -> dict[RequestId, Completion]:
    """Run an engine with one version until all requests are finished."""
    config, weights = load_pretrained(folder)
    engine = Engine(
        config,
        max_rows=min(len(requests), MAX_ROWS),
        max_context=requests[0].max_length,
        version_slots=1,
        detokenize=tokenizer.decode,
        **engine_options,
    )
    engine.load(0, weights)
    engine.submit(requests)
    completions: dict[RequestId, Completion] = {}
    while not engine.is_idle:
        completions |= {completion.id: completion for completion in engine.step()}
    return completions


def _response(completion: Completion, tokenizer: Tokenizer) -> GeneratedResponse:
    return GeneratedResponse(
        text=tokenizer.decode(completion.token_ids),
        token_ids=completion.token_ids.tolist(),
        logprobs=completion.logprobs.tolist(),
        raw_logprobs=completion.raw_logprobs.tolist(),
        finish_reason=completion.finish_reason,
    )


def copy_examples(folder: Path) -> str:
    """Copy the examples of the package; returns what to do with them. Raises InputError."""
    if folder.exists():
        raise InputError(f"{folder} exists; name a new folder for the examples")
    source = Path(dora.__file__).parent / "examples"
    try:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}; name another folder") from error
    configs = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.toml"))
    lines = [f"{plural(len(configs), 'configuration')} in {folder}: {', '.join(configs)}"]
    return "\n".join([*lines, f"start with: dora train {folder / 'gcd.toml'}"])


def init_model(
    folder: Path,
    family: str,
    tokenizer: Path | None,
    tokenizer_from: Path | None,
    vocab_size: int,
    seed: int,
    **shape: int,
) -> str:
    """Write a folder with a random model and a tokenizer that `dora train` and transformers can load.

    `shape` are fields of `ModelConfig`; those of `MOE_KEYS` apply to qwen3_moe only. Raises InputError.
    """
    if family not in FAMILIES:
        raise InputError(f"--family {family}: must be one of {', '.join(FAMILIES)}")
    if tokenizer is not None and tokenizer_from is not None:
        raise InputError("give --tokenizer to copy a tokenizer, or --tokenizer-from to train one, not both")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty; name a new folder or remove it")
    used: dict[str, Any] = {k: v for k, v in shape.items() if family == "qwen3_moe" or k not in MOE_KEYS}
    config = ModelConfig(vocab_size=vocab_size, model_type=family, **used)
    with _removed_on_failure(folder):
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, folder)
        else:
            _train_tokenizer(tokenizer_from, folder, vocab_size)
        # The model has exactly the tokenizer's tokens, so every id that it samples can be decoded.
        config = replace(config, vocab_size=Tokenizer(folder).vocab_size)
        weights = initial_weights(config, seed)
        save_pretrained(folder, config, weights)
    return f"{folder}: random {family} with {weights.numel():,} parameters and {config.vocab_size} tokens"


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove what a failed block wrote into a new or empty folder."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        for path in folder.glob("*"):
            path.unlink()
        if not existed and folder.exists():
            folder.rmdir()
        raise


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer of any file name, or that of a folder, with the files beside it. Raises InputError."""
    beside = source.parent if source.is_file() else source
    file = source if source.is_file() else source / TOKENIZER_JSON
    if not file.is_file():
        raise InputError(f"--tokenizer {source} has no {TOKENIZER_JSON}; name a model folder or that file")
    try:
        tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise InputError(
            f"--tokenizer {file} is not a tokenizer: {error}; name a {TOKENIZER_JSON}, as fast tokenizers of "
            "transformers save it"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, folder / TOKENIZER_JSON)
    for name in FILES_BESIDE:
        if (beside / name).is_file():
            shutil.copyfile(beside / name, folder / name)
    try:
        end_ids = Tokenizer(folder).stop_ids
    except ModelError as error:
        raise InputError(
            f"--tokenizer {file}: names no eos token; write it into a tokenizer_config.json beside the file, "
            'as {"eos_token": "..."}'
        ) from error
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": end_ids}) + "\n", encoding="utf-8"
    )


def _train_tokenizer(data: Path | None, folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE on all texts of a dataset; without one, every byte is a token."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise InputError(
            f"--vocab-size {vocab_size}: a byte-level tokenizer has at least {MIN_VOCAB_SIZE} tokens, "
            "256 bytes and 3 special ones; raise it"
        )
    rows = [] if data is None else read_rows(data)
    save_bpe_tokenizer(folder, (text for row in rows for text in _texts(row)), vocab_size)


def _texts(value: object) -> Iterator[str]:
    """All texts in a row, also those in conversations."""
    if isinstance(value, str):
        yield value.encode("utf-8", "replace").decode()  # a lone surrogate is no character
    elif isinstance(value, Mapping):
        yield from _texts([*value.values()])
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def doctor() -> str:
    """A table of versions and of what this machine can run; it imports every kernel."""
    findings = {
        "dora": dora.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{package: _package_version(package) for package in PACKAGES},
        "engines (cpu)": _cpu_kernels(),
        "engines (cuda)": _gpu_kernels(),
        "trainer": _trainer_devices(),
        "code rewards": _sandbox_support(),
        "torch threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}; each worker of a run uses one",
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    return "\n".join(f"{name:<16}{finding}" for name, finding in findings.items())


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_kernels() -> str:
    """Kernels of engines with `device = "cpu"` and `kernels = "auto"`, by dtype."""
    try:
        import_module("dora.engine.kernels.numba_kernels")
    except (ImportError, RuntimeError) as error:
        return (
            f"eager kernels in float32 and bfloat16, because numba does not work: {error}; run "
            '"pip install numba" to repair it'
        )
    return "numba kernels in float32, eager kernels in bfloat16"


def _gpu_kernels() -> str:
    """Kernels of engines with `device = "cuda"`."""
    if not (gpus := _gpus()):
        reason = "finds no GPU" if torch.version.cuda else "is built for CPUs only"
        return f"none: torch {torch.__version__} {reason}"
    try:
        import_module("dora.engine.kernels.triton_kernels")
    except ImportError as error:
        return f'none: Triton cannot be imported ({error}); run "pip install triton" for {", ".join(gpus)}'
    return f"Triton kernels and CUDA graphs in float32 and bfloat16, on {', '.join(gpus)}"


def _trainer_devices() -> str:
    is_available = dist.is_available()
    backends = {
        "gloo": is_available and dist.is_gloo_available(),
        "NCCL": is_available and dist.is_nccl_available(),
    }
    found = " and ".join(name for name, is_found in backends.items() if is_found) or "nothing"
    return f"torch in float32 and bfloat16, on {', '.join(['cpu', *_gpus()])}; several ranks with {found}"


def _sandbox_support() -> str:
    try:
        Sandbox()
    except RewardError as error:
        return str(error)
    return "programs run in a sandbox of Landlock and seccomp"


def _gpus() -> list[str]:
    """Torch's name, model and memory of each GPU."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        size_gb = torch.cuda.get_device_properties(index).total_memory / 1e9
        gpus.append(f"cuda:{index} ({torch.cuda.get_device_name(index)}, {size_gb:.0f} GB)")
    return gpus
