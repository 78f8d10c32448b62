"""Rewards: worker processes, external clients, and the manager of both."""
