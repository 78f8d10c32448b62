"""`dora dash`: the report of a run that goes, as a page that follows it.

A process of its own reads the run's files, while somebody looks; the run does not know of it.
"""
