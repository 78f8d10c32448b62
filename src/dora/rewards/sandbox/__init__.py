"""Run untrusted programs in sandboxes: processes that can compute and print, and nothing else.

`runner` is the interface, `fork_server` the process that forks one sandbox per run and restricts it,
`assertions` the source of the two programs that evaluate an assertion inside sandboxes.
"""
