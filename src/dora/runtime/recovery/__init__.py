"""Resuming a stopped run: checks of its files, and its state rebuilt from the journal."""
