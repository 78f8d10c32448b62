"""DORA-RL: asynchronous reinforcement learning of language models.

Several policy versions generate at once; every response is finished by the version that
began it, none is dropped or trained twice, and none is older than a bound when trained.
"""

__version__ = "0.1.0"
