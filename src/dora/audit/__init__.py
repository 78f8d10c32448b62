"""The guarantees C1-C3, checked from a run's files alone."""
