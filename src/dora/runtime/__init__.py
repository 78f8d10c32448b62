"""A real run: its setup, its processes and files, and the main loop.

`run` is the entry point, `run_setup` loads and checks the input, `main_loop` passes events to the
orchestrator, and `executor` executes its actions in worker processes (`process`, `rollout`, `scoring`,
`training`).
"""
