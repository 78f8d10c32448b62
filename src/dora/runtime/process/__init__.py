"""Processes of a run: start them on this machine or on a Ray cluster, and exchange messages with them."""
