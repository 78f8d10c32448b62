"""The other side of an episode: environments that answer what the policy writes.

`base` says what an environment is, `host` plays many of them at once, `gymnasium` adapts those of that
library, `remote` those on other machines.
"""
