"""The rollout engine: several versions of the policy decode side by side in one batch.

`sequence`, `blocks` and `scheduler` decide (no torch); `rows` keeps what the active rows
need at each step; `runner`, `sampler` and `kernels` compute; `engine` is the door.
"""
