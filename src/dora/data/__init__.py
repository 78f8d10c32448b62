"""Where prompts come from.

`files` reads rows, `dataset` checks and orders them, `chat` puts prompts into a model's template,
`tokenizer` turns text into ids, `bpe` makes a new tokenizer, `gcd` is the built-in task.
"""
