"""Load a checkpoint in vLLM, without DORA-RL: `python load_checkpoint_vllm.py BASE CHECKPOINT`.

Prints the log-probs of a greedy response of the checkpoint, and its token ids. The base model with the
adapter has the same response.
"""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

PROMPT, NUM_TOKENS = "12,30:", 8


def respond(model: str, adapter: str | None = None) -> tuple[list[int], list[float]]:
    """The tokens of the response, and their log-probs."""
    llm = LLM(
        model=model, dtype="float32", enforce_eager=True, max_model_len=32, max_num_seqs=2,
        gpu_memory_utilization=0.1, enable_lora=adapter is not None, max_lora_rank=8,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True)
    request = None if adapter is None else LoRARequest("adapter", 1, adapter)
    (found,) = llm.generate([PROMPT], sampling, lora_request=request)
    output = found.outputs[0]
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return [*output.token_ids], [logprobs[token].logprob for token, logprobs in pairs]


def main(base: str, checkpoint: str) -> None:
    (tokens, merged), (adapted_tokens, adapted) = respond(checkpoint), respond(base, f"{checkpoint}/adapter")
    assert tokens == adapted_tokens
    assert max(abs(x - y) for x, y in zip(merged, adapted, strict=True)) < 1e-4
    print(*merged)
    print(*tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
