"""The HTTP service of a run (`dora serve`) and its client."""
