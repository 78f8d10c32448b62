"""Answer prompts with the rollout engine alone: no training, no run.

python examples/generate.py FOLDER PROMPT...
"""

from __future__ import annotations

import sys
from pathlib import Path

from dora.core.types import GroupId, RequestId
from dora.data.tokenizer import Tokenizer
from dora.engine.engine import Engine
from dora.engine.request import Request, SamplingParams
from dora.model.pretrained import load_pretrained


def main(folder: Path, prompts: list[str]) -> None:
    """Print an answer to each prompt, in the order in which they end."""
    config, weights = load_pretrained(folder)
    tokenizer = Tokenizer(folder)
    sampling = SamplingParams(temperature=0.8, max_tokens=128, stop_ids=tokenizer.stop_ids, top_p=0.95)
    requests = [
        Request(RequestId(0, i, 0), GroupId(0, i), tuple(tokenizer.encode(prompt)), 0, i, sampling)
        for i, prompt in enumerate(prompts)
    ]
    context = max(request.max_length for request in requests)
    engine = Engine(config, max_rows=8, max_context=context, version_slots=1)
    engine.load(0, weights)
    engine.submit(requests)
    while not engine.is_idle:
        for answer in engine.step():
            print(prompts[answer.id.row], tokenizer.decode(answer.token_ids))
            print("  log-probs", " ".join(f"{logprob:.2f}" for logprob in answer.logprobs))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: python {sys.argv[0]} MODEL PROMPT [PROMPT ...]")
    main(Path(sys.argv[1]), sys.argv[2:])
