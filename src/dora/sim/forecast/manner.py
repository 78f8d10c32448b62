"""How stations carry out what they are told, where systems differ.

A policy's rules say some of it, and the hardware gives the times.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora.sim.forecast.bench import Contention


@dataclass(frozen=True)
class Manner:
    """By default everybody has devices of its own, and what is told is known at once."""

    is_streamed: bool = False  # the trainer works on groups as they are committed
    least_early: int = 0  # tokens of them from which on it does
    refills: bool = False  # KV is computed again with new weights, where answers go on with them
    reuses_kv: bool = True  # of moved requests; else it is computed again
    switch_s: float = 0.0  # a device goes over from training to decoding, or back
    reward_s: float = 0.0
    telling_s: float = 0.0  # from the end of an answer until it is known
    contention: Contention | None = None  # of engines and trainer; None: each has devices of its own
    report_s: float = 10.0
    slots: int = 1  # versions that an engine may hold
    guesses: bool = False  # prompts are handed out longest first, by a ranking of their lengths
