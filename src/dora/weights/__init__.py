"""Versions of the policy on their way from the trainer to the engines."""
