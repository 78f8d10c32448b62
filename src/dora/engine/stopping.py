"""Whether an answer's newest token completed a stop string, read from the end of its text alone.

Nothing is remembered from token to token, so a request that moves or waits has nothing to lose.
A stop string of n characters lies in the last n tokens, but for tokens that show nothing and
characters that only several tokens together make; so tokens are added until enough text is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from dora.engine.sampler import Int64s

Detokenize = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"  # what bytes that are no whole character show as
_MAX_BYTES = 4  # of a character in UTF-8


def ends_in_stop_string(detokenize: Detokenize, token_ids: Int64s, stop_strings: Collection[str]) -> bool:
    """Whether the text of `token_ids` contains a stop string, if it did not before the last of them."""
    longest = max(map(len, stop_strings))
    width, newest = longest + 2 * _MAX_BYTES, len(detokenize(token_ids[-1:].tolist()))
    while True:
        text = _last_text(detokenize, token_ids, width)
        if any(stop in text for stop in stop_strings):
            return True
        if width >= len(token_ids) or len(text) - newest >= longest + _MAX_BYTES:
            return False
        width *= 2


def _last_text(detokenize: Detokenize, token_ids: Int64s, width: int) -> str:
    """Text of the last `width` tokens, and of those before them that belong to its first character."""
    text = ""
    for num in range(width, width + _MAX_BYTES):
        text = detokenize(token_ids[-num:].tolist())
        if not text.startswith(_REPLACEMENT) or num >= len(token_ids):
            break
    return text
