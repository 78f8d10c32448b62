"""Environments of episodes: they reply to the actions of the policy with observations and rewards.

`base` is the protocol that users implement, `runner` runs many environments concurrently, `gymnasium` and
`openenv` adapt environments of these libraries, `remote` connects environments on other machines, `episode`
has the messages about an episode.
"""
