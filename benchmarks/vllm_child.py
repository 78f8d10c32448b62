"""Decode with vLLM on the CPU, in its own environment, for `engine.py --vllm-python`.

    PYTHON vllm_child.py MODEL_FOLDER MAX_CONTEXT MAX_ROWS MAX_PREFILL_TOKENS

It writes {"ready": version} when it has started. For every line {"prompts": [[int]], "num_tokens": n} on its
input it writes a line with the times of `Timing` in baselines.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else it compiles C++ for a part of the sampler
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stderr, not between the replies
    os.environ.update(SETTINGS)
    vllm, torch = import_module("vllm"), import_module("torch")
    torch.set_num_threads(1)
    folder, *sizes = sys.argv[1:]
    max_context, max_rows, max_prefill_tokens = map(int, sizes)
    engine = vllm.LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max_context,
        max_num_seqs=max_rows,
        max_num_batched_tokens=max(max_prefill_tokens, max_context),
    ).llm_engine
    print(json.dumps({"ready": vllm.__version__}), file=replies, flush=True)
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=request["num_tokens"], ignore_eos=True, detokenize=False
        )
        began = time.perf_counter(), time.process_time()
        for i, prompt in enumerate(request["prompts"]):
            engine.add_request(f"{number}-{i}", {"prompt_token_ids": prompt}, sampling)
        print(json.dumps(timed(engine, len(request["prompts"]), began)), file=replies, flush=True)


def timed(engine: Any, num_rows: int, began: tuple[float, float]) -> dict[str, float]:
    """Step until all requests are finished. Decode is timed while all rows decode."""
    has_token: set[str] = set()
    num_steps, first, last = 0, None, None
    while engine.has_unfinished_requests():
        found = engine.step()
        now = time.perf_counter(), time.process_time()
        has_token |= {output.request_id for output in found}
        if first is None:
            first = now if len(has_token) == num_rows else None
        elif last is None:
            num_steps += 1
            last = now if any(output.finished for output in found) else None
    done = time.perf_counter(), time.process_time()
    assert first is not None, "the rows never decoded together"
    assert last is not None, "the rows never decoded together"
    return {
        "step_s": (last[0] - first[0]) / num_steps,
        "step_cpu_s": (last[1] - first[1]) / num_steps,
        "whole_s": done[0] - began[0],
        "whole_cpu_s": done[1] - began[1],
    }


if __name__ == "__main__":
    main()
