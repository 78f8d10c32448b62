"""The hands of a real run: processes, files, and the main loop in `drive`.

`plan` checks, `local` carries out orders, `process` and `workers` are the two ends of a pipe.
"""
