"""Compile Triton's kernels for GPUs that this machine does not have, as the engine launches them.

`python -m tests.engine.compile_kernels` compiles all of them, for minutes; with arguments such as
`90:float32:64:4` (architecture, dtype, dimensions of a head, query heads per kv head) only these. It prints a
line for each kernel that exceeds a limit, and then the number of compiled ones. It is a program of its own
because the interpreter, which tests use, compiles nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton
from tests.fake_cuda import QWEN3_8B, fake_cuda
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dora.engine.kernels import triton_kernels
from dora.engine.kernels.workspace import ForwardBatch, Workspace
from dora.model.config import ModelConfig

MAX_SHARED_BYTES = 99 * 1024  # what a program may use on a card for desktops; on others it may use more
ARCHITECTURES, DIMS, GROUPS = (80, 89, 90, 100, 120), (64, 128), range(1, 9)
KERNELS = ("_add_norm", "_swiglu", "_rope_store_kv", "_attend", "_combine")
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments, its constants, and its options; hashable."""

    kernel: Any
    types: tuple[str, ...]
    constants: tuple[tuple[int, Any], ...]
    aligned: tuple[int, ...]  # arguments that are multiples of 16
    options: tuple[tuple[str, int], ...]


def launches(config: ModelConfig, dtype: str) -> list[Launch]:
    """What the engine launches in a decode step of 8 and of 64 rows of one version."""
    found: dict[Launch, None] = {}

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: found.update({launch(self._kernel, args, options): None})

    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
        for name in KERNELS:
            patch.setattr(triton_kernels, name, Recorder(getattr(triton_kernels, name)))
        workspace = Workspace(
            config, 64, config.max_position_embeddings, 2, 4096, device="cuda", dtype=dtype, is_padded=True
        )
        kernels = triton_kernels.TritonKernels(workspace)
        for num_rows in (8, 64):
            batch = ForwardBatch(np.arange(num_rows), np.zeros(num_rows, np.int64))
            kernels.add_norm(batch, workspace.layout.offsets["model.norm.weight"])
            kernels.attend(batch, np.zeros(num_rows, np.int64), 0)
            kernels.swiglu(batch)
    return list(found)


def launch(kernel: Any, args: tuple[Any, ...], options: dict[str, int]) -> Launch:
    """As Triton specialises a kernel for its arguments."""
    types, constants, aligned = [], [], []
    for i, (value, parameter) in enumerate(zip(args, kernel.params, strict=True)):
        if parameter.is_constexpr or (_is_specialised(parameter, value) and value == 1):
            types.append("constexpr")
            constants.append((i, value))
        elif isinstance(value, torch.Tensor):
            assert value.is_cuda, f"{kernel}: {parameter.name} is on {value.device}"
            types.append(TYPES[value.dtype])
            aligned.append(i)
        else:
            types.append("fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64")
            if _is_specialised(parameter, value) and value % 16 == 0:
                aligned.append(i)
    return Launch(kernel, tuple(types), tuple(constants), tuple(aligned), tuple(options.items()))


def _is_specialised(parameter: Any, value: object) -> bool:
    return isinstance(value, int) and not parameter.do_not_specialize


def problems(found: Launch, architecture: int) -> str:
    """Compile a launch; returns which limits it exceeds, or an empty string."""
    names = found.kernel.arg_names
    source = ASTSource(
        fn=found.kernel,
        signature=dict(zip(names, found.types, strict=True)),
        constexprs={(i,): value for i, value in found.constants},
        attrs={(i,): [["tt.divisibility", 16]] for i in found.aligned},
    )
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=dict(found.options))
    stack = _stack_bytes(compiled.asm["cubin"])
    return check(f"{found.kernel.__name__} on sm{architecture}", compiled.metadata.shared, stack)


def check(name: str, shared: int, stack: int) -> str:
    """Which limits so many bytes of shared memory and of spilled registers exceed."""
    if shared > MAX_SHARED_BYTES:
        return f"{name} uses {shared} bytes of shared memory, over {MAX_SHARED_BYTES}"
    return f"{name} spills {stack} bytes of registers" if stack else ""


def _stack_bytes(cubin: bytes) -> int:
    """Local memory of a thread, where spilled registers are."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in usage.splitlines() if "STACK:" in line)
    sizes = dict(part.split(":") for part in line.split() if ":" in part)
    return int(sizes["STACK"]) + int(sizes["LOCAL"])


def model(dim: int, group: int) -> ModelConfig:
    """As Qwen3-8B, with other heads."""
    return replace(QWEN3_8B, num_attention_heads=8 * group, head_dim=dim, tie_word_embeddings=True)


def cases(arguments: list[str]) -> Iterator[tuple[int, str, int, int, dict[str, int]]]:
    """Architecture, dtype, dimensions of a head, query heads per kv head, and other options of `_attend`."""
    for argument in arguments:
        architecture, dtype, dim, group, *options = argument.split(":")
        changed = {name: int(value) for name, value in (option.split("=") for option in options)}
        yield int(architecture), dtype, int(dim), int(group), changed
    if not arguments:
        yield from product(ARCHITECTURES, ("bfloat16", "float32"), DIMS, GROUPS, [{}])


def main() -> None:
    tried: set[tuple[int, Launch]] = set()
    for architecture, dtype, dim, group, changed in cases(sys.argv[1:]):
        for launched in launches(model(dim, group), dtype):
            if changed and launched.kernel is not triton_kernels._attend:
                continue
            found = replace(launched, options=tuple((dict(launched.options) | changed).items()))
            if (architecture, found) not in tried:
                tried.add((architecture, found))
                if problem := problems(found, architecture):
                    print(f"{problem}, with {dtype}, {dim} dimensions and {group} query heads per kv head")
    print(len(tried))


if __name__ == "__main__":
    main()
