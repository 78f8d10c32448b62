"""Why a request could never run on an engine, whatever else is there.

What holds only for now, such as a version that is not held, is the engine's to say.
"""

from __future__ import annotations

from dora.engine.rows import MAX_STOP_IDS
from dora.engine.sequence import Request


def reason_to_refuse(request: Request, vocab_size: int, max_context: int, *, can_read: bool) -> str:
    """A sentence with the remedy, or an empty string. Stop strings need an engine that `can_read`."""
    prompt_ids, sampling = request.prompt_ids, request.sampling
    if not prompt_ids:
        return "its prompt is empty; give at least one token"
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        return f"its prompt has token ids outside 0..{vocab_size - 1}; use the model's own tokenizer"
    if request.max_length > max_context:
        return (
            f"prompt and max_tokens are {len(prompt_ids)} + {sampling.max_tokens} tokens, over max_context = "
            f"{max_context}; shorten the prompt, lower max_tokens or raise max_context"
        )
    if len(sampling.stop_ids) > MAX_STOP_IDS:
        return f"it has {len(sampling.stop_ids)} stop_ids; at most {MAX_STOP_IDS} are possible"
    if sampling.stop_strings and not can_read:
        return "it has stop_strings, but the engine cannot read: give Engine(detokenize=...)"
    return ""
