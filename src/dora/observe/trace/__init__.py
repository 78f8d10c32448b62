"""`dora trace`: a run as a drawing of what ran where and when, for Perfetto or chrome://tracing.

It is made from the journal alone. Each engine, the trainer, the rewarder and the versions are processes
of the drawing; requests are slices, moves are arrows.
"""
