"""Samples between the stations.

A column is written once, by who makes it, and read by whoever needs it.
"""
