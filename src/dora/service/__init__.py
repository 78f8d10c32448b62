"""The HTTP side of a run: `dora serve`.

A handler never touches the run: it hands the driver a function and waits for what comes of it.
"""
