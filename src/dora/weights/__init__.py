"""Versions of the policy between the trainer and the engines."""
