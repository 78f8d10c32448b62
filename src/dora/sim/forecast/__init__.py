"""What a run will take on hardware that is not there yet: the production orchestrator, in virtual time.

`swarm` searches for bugs with random worlds; `forecast` answers questions with costs of real accelerators.
"""
