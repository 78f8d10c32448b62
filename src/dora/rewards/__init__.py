"""How answers are judged.

`base` loads and calls a reward function, `gcd` judges the built-in task.
"""
