"""Where prompts come from.

`dataset` reads files and orders their rows, `tokenizer` turns text into ids, `gcd` is the
built-in task.
"""
