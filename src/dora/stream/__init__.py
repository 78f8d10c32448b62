"""Samples between the stations: written once by who makes a column, read by who needs it."""
