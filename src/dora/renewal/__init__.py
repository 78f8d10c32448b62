"""Answers that go on with newer weights.

This is what DORA avoids, for the policies that it is compared with.
"""
