"""Properties of a GPU on which the engine's design depends: eight probes, P1 to P8.

P1 decode attention against memory bandwidth; P2 whether rows of a product or of attention depend on other
rows; P3 whether varlen_attn shares kv heads; P4 whether graphs use weights that were overwritten in place; P5
grouped products against one per version; P6 a patch of 1 % of the weights by XOR; P7 copies to the host, and
KV exported from two layouts; P8 continuous batching of transformers. A probe that a machine cannot run
reports the reason.

    python benchmarks/gpu_probes.py [--quick] [--device cpu] [--only P1 P4] [--json FILE]
"""

import inspect
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from gpu_timing import QWEN3_06B, QWEN3_8B, TINY, Bench, parse_bench
from torch import Tensor
from torch.nn import functional as F

from dora.engine.block_manager import num_blocks_for
from dora.engine.kernels.triton_kernels import TritonKernels
from dora.engine.kernels.workspace import ForwardBatch, Workspace
from dora.model.config import ModelConfig
from report import Row, publish

Figure = tuple[str, float, str]  # what, how much, unit
BASELINE_LIMIT_S = 100.0


class Unsupported(Exception):
    """This machine cannot run the probe."""


@triton.jit
def _xor(target: tl.tensor, places: tl.tensor, patch: tl.tensor, num: tl.tensor, width: tl.constexpr) -> None:
    at = tl.program_id(0) * width + tl.arange(0, width)
    place = tl.load(places + at, at < num, 0)
    value = tl.load(target + place, at < num, 0) ^ tl.load(patch + at, at < num, 0)
    tl.store(target + place, value, at < num)


def attention(bench: Bench) -> Iterator[Figure]:
    """P1: one layer of decode attention, whose KV is read once."""
    limit = bench.bandwidth()
    yield "copy bandwidth", limit / 1e9, "GB/s"
    models = {"0.6B": QWEN3_06B, "8B": QWEN3_8B}
    cells = [(1, 1024), (64, 1024), (256, 1024), (64, 8192), (1, 32_768), (8, 32_768)]
    if bench.is_tiny:
        models, cells = {"tiny": TINY}, [(1, 20), (3, 40)]
    for name, model in models.items():
        for batch, context in cells:
            config = replace(model, num_hidden_layers=1, vocab_size=16, hidden_size=64, intermediate_size=64)
            seconds = attention_s(bench, config, batch, context)
            per_token = 2 * config.num_key_value_heads * config.head_dim * bench.dtype.itemsize
            rate = batch * context * per_token / seconds
            yield f"{name} batch {batch} context {context}: share of bandwidth", rate / limit, ""
            yield f"{name} batch {batch} context {context}: time", seconds * 1e6, "us"


def attention_s(bench: Bench, config: ModelConfig, batch: int, context: int) -> float:
    """Time of `attend` for rows of equal contexts in scattered blocks."""
    per_row = num_blocks_for(context)
    dtype = "bfloat16" if bench.dtype == torch.bfloat16 else "float32"
    work = Workspace(config, batch, context, 1, batch * per_row, None, bench.device, dtype)
    work.kv.normal_()
    work.qkv.normal_()
    work.block_tables.copy_(torch.randperm(batch * per_row).view(batch, per_row))
    work.positions.fill_(context - 1)
    work.rows.copy_(torch.arange(batch))
    rows, positions = np.arange(batch), np.full(batch, context - 1)
    kernels, one_slot = TritonKernels(work), ForwardBatch(rows, np.zeros(batch, np.int64))
    return bench.seconds(lambda: kernels.attend(one_slot, positions, 0))


def row_invariance(bench: Bench) -> Iterator[Figure]:
    """P2: whether the bits of a row depend on the other rows of a batch of the same size."""
    sides = (32, 48) if bench.is_tiny else (896, 1024, 2560, 4096, 9728, 12_288)
    shapes = [(k, n) for k in sides for n in sides if k != n]
    for num_rows in (64, 128, 256):
        num_varying = sum(_depends_on_neighbours(bench, num_rows, k, n) for k, n in shapes)
        yield f"products of {num_rows} rows: shapes of {len(shapes)} that vary", num_varying, ""
    if bench.device == "cpu":
        raise Unsupported("varlen_attn needs a GPU")
    q, k, v = (torch.randn(300, 8, 64, dtype=bench.dtype, device=bench.device) for _ in range(3))
    alone = _varlen(q[:100], k[:100], v[:100], [100])
    beside = _varlen(q, k, v, [100, 200])[:100]
    yield "varlen_attn: elements that vary with a neighbour", int((alone != beside).sum()), ""


def _depends_on_neighbours(bench: Bench, num_rows: int, k: int, n: int) -> bool:
    x = torch.randn(num_rows, k, device=bench.device).to(bench.dtype)
    weights = torch.randn(n, k, device=bench.device).to(bench.dtype)
    order = torch.randperm(num_rows, device=bench.device)
    others = torch.cat((x[: num_rows // 2], torch.zeros_like(x[num_rows // 2 :])))
    product = x @ weights.T
    is_moved = not torch.equal((x[order] @ weights.T), product[order])
    half = slice(num_rows // 2)
    return is_moved or not torch.equal((others @ weights.T)[half], product[half])


def _varlen(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=q.device)
    is_shared, known = q.shape[1] != k.shape[1], inspect.signature(varlen_attn).parameters
    attend = partial(varlen_attn, enable_gqa=True) if is_shared and "enable_gqa" in known else varlen_attn
    out = attend(q, k, v, ends, ends, max(lengths), max(lengths), window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out


def shared_heads(bench: Bench) -> Iterator[Figure]:
    """P3: grouped query heads without copies of k and v."""
    if bench.device == "cpu":
        raise Unsupported("varlen_attn needs a GPU")
    q, k, v = (torch.randn(200, h, 64, dtype=bench.dtype, device=bench.device) for h in (8, 2, 2))
    try:
        found = _varlen(q, k, v, [200])
    except (RuntimeError, ValueError, TypeError) as error:
        raise Unsupported(f"varlen_attn refuses 8 query heads for 2 kv heads: {error}") from error
    expected = _varlen(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), [200])
    yield "varlen_attn shares kv heads; largest error", float((found - expected).abs().max()), ""


def graph_sees_new_weights(bench: Bench) -> Iterator[Figure]:
    """P4: replay a graph after its weights were overwritten."""
    if bench.device == "cpu":
        raise Unsupported("CUDA graphs need a GPU")
    x, weights, new = (torch.randn(64, 64, device=bench.device) for _ in range(3))
    out = x @ weights
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(x, weights, out=out)
    weights.copy_(new)
    graph.replay()
    yield "replay gives the product with the new weights", float(torch.equal(out, x @ new)), "1 = yes"


def grouped_products(bench: Bench) -> Iterator[Figure]:
    """P5: one grouped product of rows sorted by version against one product per version."""
    width, inner = (32, 64) if bench.is_tiny else (4096, 12_288)
    for num_versions in (2, 4):
        weights = torch.randn(num_versions, width, inner, device=bench.device).to(torch.bfloat16)
        for num_rows in (64, 128, 256):
            x = torch.randn(num_rows, width, device=bench.device).to(torch.bfloat16)
            each = num_rows // num_versions
            ends = torch.arange(each, num_rows + 1, each, dtype=torch.int32, device=bench.device)
            out = torch.empty(num_rows, inner, dtype=torch.bfloat16, device=bench.device)
            grouped = partial(F.grouped_mm, x, weights, offs=ends)

            def one_by_one(x: Tensor = x, out: Tensor = out, w: Tensor = weights, each: int = each) -> None:
                for part, own, matrix in zip(x.split(each), out.split(each), w, strict=True):
                    torch.mm(part, matrix, out=own)

            times = [bench.seconds(run) for run in (grouped, one_by_one)]
            yield f"{num_versions} versions, {num_rows} rows: grouped / one by one", times[0] / times[1], ""


def xor_patch(bench: Bench) -> Iterator[Figure]:
    """P6: 1 % of the weights of 8.2e9 parameters, by XOR in place."""
    numel = 2**12 if bench.is_tiny else 8_200_000_000
    target = torch.zeros(numel, dtype=torch.int16, device=bench.device)
    step = 100  # the indices of a patch are sorted
    places = torch.arange(0, numel, step, device=bench.device)
    places += torch.randint(step, places.shape, device=bench.device)
    places.clamp_(max=numel - 1)
    patch = torch.ones(len(places), dtype=torch.int16, device=bench.device)
    run = partial(_xor[(triton.cdiv(len(places), 1024),)], target, places, patch, len(places), 1024)
    seconds = bench.seconds(run)
    yield f"{len(places)} of {numel} entries", seconds * 1e3, "ms"
    before = target.clone()
    run()
    run()
    yield "two patches are none", float(torch.equal(before, target)), "1 = yes"


def copies(bench: Bench) -> Iterator[Figure]:
    """P7: copies between host and device, and 64 blocks of KV gathered from two layouts."""
    num_bytes, is_gpu = (2**20 if bench.is_tiny else 2**31), bench.device == "cuda"
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=bench.device)
    for kind, is_pinned in (("pinned", is_gpu), ("pageable", False)):
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        for name, target, source in (("to host", host, on_device), ("to device", on_device, host)):
            run = partial(target.copy_, source, non_blocking=True)
            rate = num_bytes / bench.seconds(run, repeats=3, is_captured=False)
            yield f"{kind} {name}", rate / 1e9, "GB/s"
    del on_device
    layers, num_blocks = (2, 8) if bench.is_tiny else (36, 1024)
    chunk = (2, 16, 8, 128)
    chosen = torch.randperm(num_blocks, device=bench.device)[:64]
    by_block = torch.zeros(num_blocks, layers, *chunk, dtype=bench.dtype, device=bench.device)
    block_s = bench.seconds(lambda: by_block.index_select(0, chosen))
    by_layer = by_block.view(layers, num_blocks, *chunk)
    layer_s = bench.seconds(lambda: by_layer.index_select(1, chosen))
    yield "export of 64 blocks, a block in one piece", block_s * 1e6, "us"
    yield "export of 64 blocks, a piece per layer", layer_s * 1e6, "us"


def continuous_batching(bench: Bench) -> Iterator[Figure]:
    """P8: in a separate process, because it may hang; that process runs with --only P8."""
    if bench.is_tiny:
        raise Unsupported("it does not run at tiny sizes")
    if "P8" not in bench.only:
        command = [sys.executable, __file__, "--only", "P8", "--device", bench.device]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=BASELINE_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Unsupported(f"transformers did not end within {BASELINE_LIMIT_S:.0f} s") from error
        found = [line for line in done.stdout.splitlines() if line.startswith("tokens_per_s ")]
        if not found:
            messages = [line.strip() for line in done.stdout.splitlines() if "not answered" in line]
            raise Unsupported(
                f"transformers failed: {[*messages, *done.stderr.splitlines(), 'no output'][0]}"
            )
        yield "transformers continuous batching, Qwen3-0.6B, 32 rows", float(found[0].split()[1]), "tokens/s"
        return
    rate = _transformers_rate(bench)
    print("tokens_per_s", rate)
    yield "transformers continuous batching, Qwen3-0.6B, 32 rows", rate, "tokens/s"


def _transformers_rate(bench: Bench) -> float:
    """Tokens per second of 32 requests with random weights, prefill included, in the second run."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    shape = {k: v for k, v in QWEN3_06B.to_dict().items() if k not in ("architectures", "dtype")}
    with torch.device(bench.device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    model.to(dtype=bench.dtype)
    model.set_attn_implementation("sdpa")
    num_tokens, prompts = 256, [[(7 * i + j) % 1000 for j in range(512)] for i in range(32)]
    config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for _ in range(2):
        started_s = time.perf_counter()
        found = model.generate_batch(prompts, generation_config=config, progress_bar=False)
        wall_s = time.perf_counter() - started_s
    if not found:
        raise Unsupported("transformers returned no output")
    return float(sum(len(answer.generated_tokens) for answer in found.values()) / wall_s)


PROBES = {
    "P1": attention,
    "P2": row_invariance,
    "P3": shared_heads,
    "P4": graph_sees_new_weights,
    "P5": grouped_products,
    "P6": xor_patch,
    "P7": copies,
    "P8": continuous_batching,
}


def rows_of(bench: Bench, name: str, probe: Callable[[Bench], Iterator[Figure]]) -> Iterator[Row]:
    """The figures of a probe, and a row with the reason if it stops."""
    try:
        for what, value, unit in probe(bench):
            yield {"probe": name, "what": what, "value": float(value), "unit": unit, "note": ""}
    except Exception as error:  # a failed probe must not stop the others
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        kind = "" if isinstance(error, Unsupported) else f"{type(error).__name__}: "
        yield {"probe": name, "what": "not answered", "value": "", "unit": "", "note": kind + reason}
    if bench.device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    bench = parse_bench(__doc__ or "")
    rows: list[Row] = []
    for name in bench.only or PROBES:
        started_s = time.perf_counter()
        rows += rows_of(bench, name, PROBES[name])
        print(f"{name} took {time.perf_counter() - started_s:.1f} s", flush=True)
    shares = {
        f"bandwidth_share_{str(row['what']).partition(':')[0].replace(' ', '_')}": float(row["value"])
        for row in rows
        if str(row["what"]).endswith("share of bandwidth")
    }
    publish(bench.options, rows, shares)


if __name__ == "__main__":
    main()
