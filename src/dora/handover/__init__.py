"""Requests that change hands: an engine whose running requests can move to others, with their KV.

`engine` is that engine, `mover` its part in all moves, `transfer` the two ends of one. `files` says how a
request changes its owner, `pool` where the KV lies, `moves` what the engines are asked and answer.
"""
