"""The hands of a real run: processes, files, and the main loop in `drive`."""
