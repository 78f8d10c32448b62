"""Reward functions.

`base` loads and calls a reward function, `gcd` scores the built-in task, `math` and `math_verify` compare
final answers of mathematical problems, `code` runs programs in a `sandbox`, and `classifier` is a reward
model.
"""
