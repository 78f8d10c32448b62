"""Episodes on an engine: after each turn of the model a request waits for what the other side says.

Its KV stays where it is meanwhile, or goes to host memory if others need the place. What it is told is
read like a prompt, behind all that it has, and then it writes on.
"""
