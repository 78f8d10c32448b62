"""Versions of the policy between the trainer and the engines.

One file per version; only the trainer writes, engines map what they need.
"""
