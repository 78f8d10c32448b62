"""Deterministic simulation testing of the orchestrator: random worlds in virtual time, with faults.

`random_config` draws a world from a seed, `world` simulates every worker of it, and `swarm` runs many of
them. `checker` checks the guarantees and shares no code with `dora.core`; `coverage` counts the situations
that were reached.
"""
