"""The trainer of a run: its processes and their supervisor, aux workers, checkpoints, an external trainer."""
