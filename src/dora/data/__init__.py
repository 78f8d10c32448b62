"""Prompts and tokenizers.

`dataset` reads, checks and orders rows, `chat` applies a model's chat template, `tokenizer` converts text to
ids and makes new tokenizers, `gcd` is the built-in task.
"""
