"""The command line `dora`."""
