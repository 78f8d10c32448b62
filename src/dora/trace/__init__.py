"""`dora trace`: a run as a trace for Perfetto."""
