"""The mind of a run: facts in, orders out.

Standard library only, and no clock, no random, no I/O: the same code drives real processes
and the simulator. Only `orchestrator` composes the rules; no rule calls another.
"""
