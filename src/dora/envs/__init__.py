"""Environments of episodes: they reply to the actions of the policy with observations and rewards.

`base` is the protocol that users implement, `runner` runs many environments concurrently, `gymnasium` adapts
environments of that library, `remote` connects environments on other machines.
"""
