"""The same orchestrator in virtual time, with faults.

`world` plays every station from one seed, `checker` watches the guarantees from outside the
core, `swarm` draws whole configurations and looks for a seed that breaks one.
"""
