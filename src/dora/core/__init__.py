"""The pure orchestrator: events in, actions out.

Standard library only; no clock, no randomness, no I/O. The same code schedules real runs and the simulator.
`orchestrator` runs the rules in order; each rule is a module that reads and changes the state.
"""
