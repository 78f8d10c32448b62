"""The record of a run: its journal of events and actions, written, read and replayed."""
