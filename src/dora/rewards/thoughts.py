"""The answer of a reasoning model, without its thoughts between <think> and </think>."""

from __future__ import annotations


def without_thoughts(completion: str) -> str:
    """The text after the last thoughts; "" if they were cut before their end.

    A chat template may write the opening tag itself. If such thoughts are cut, the completion has no tag, and
    is returned as it is.
    """
    return completion.rpartition("</think>")[2].partition("<think>")[0]
