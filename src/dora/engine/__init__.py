"""The rollout engine: paged KV, continuous batching, several versions of the policy in one batch.

`engine` is the entry point. `request`, `scheduler` and `block_manager` decide what runs, without torch;
`decode_batch` has the state of the rows; `runner` and `kernels` compute. `interface` has the protocols of
other engines.
"""
