"""Compile every Triton kernel to machine code for an H100 or H200, without a GPU.

This is a separate program because the interpreter, which tests use, compiles nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dora.engine.kernels import triton_kernels as kernels

COUNTS = {"slots", "rows", "positions", "tables", "owners", "ends"}
FP32 = {"cos", "sin", "partial", "masses"}
SCALARS = {
    "slot_stride": "i64",
    "offset": "i64",
    "q_norm": "i64",
    "k_norm": "i64",
    "eps": "fp32",
    "scale": "fp32",
}
INTS = {"layer", "block_stride", "table_stride", "num_rows", "partition"}
MODEL = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "BLOCK": 16}  # Qwen3-8B


def compiled(kernel: Any, dtype: str, constants: dict[str, object], num_warps: int) -> int:
    """Compile a kernel; returns the number of bytes of machine code."""
    names = kernel.arg_names
    types = {name: f"*{dtype}" for name in names}
    types |= (
        dict.fromkeys(COUNTS, "*i64") | dict.fromkeys(FP32, "*fp32") | SCALARS | dict.fromkeys(INTS, "i32")
    )
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if types[name].startswith("*") or name.endswith("_stride")]
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled_kernel = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}
    )
    return len(compiled_kernel.asm["cubin"])


def main() -> None:
    split = {"GROUP": 16, "DIM_PADDED": 128}
    print(
        compiled(kernels._add_norm, "bf16", {"WIDTH": 2560, "PADDED": 4096}, 8),
        compiled(kernels._swiglu, "bf16", {"WIDTH": 9728, "COLUMNS": 1024}, 4),
        compiled(kernels._rope_store_kv, "bf16", {**MODEL, "HALF": 64, "HAS_NORM": True}, 1),
        compiled(kernels._attend, "bf16", {**MODEL, **split, "TILE": 64, "DOT": tl.bfloat16}, 4),
        compiled(kernels._attend, "fp32", {**MODEL, **split, "TILE": 32, "DOT": tl.float32}, 4),
        compiled(kernels._combine, "bf16", {"HEADS": 32, "DIM": 128, "DIM_PADDED": 128, "CHUNK": 8}, 1),
    )


if __name__ == "__main__":
    main()
