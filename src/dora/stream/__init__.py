"""The sample stream: rows are samples, columns are fields, and each consumer has its own consumption status.

`schema` defines fields and batches, `metadata` decides which groups a consumer may lease, `storage` holds the
columns in shared memory, `server` and `client` connect processes by the messages of `transport`. `sample_db`
is the durable record of a run's samples (`samples.sqlite`), `run_stream` the stream of a run.
"""
