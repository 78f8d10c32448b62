"""`dora dash`: the report as a page that follows running runs."""
