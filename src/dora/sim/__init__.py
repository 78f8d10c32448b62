"""The same orchestrator in virtual time, with faults.

`world` plays every station from one seed, `checker` watches the guarantees from outside the
core, `swarm` draws whole configurations, lets things go wrong, heals the world, and looks for a
seed that breaks a guarantee or does not come to its end.
"""
