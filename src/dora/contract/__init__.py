"""Tests that anybody can run against an adapter.

Subclass one in a test file of your own, and run pytest on it: see docs/adapters.md.
"""
