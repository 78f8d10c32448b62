"""The reward of the example: the fraction of a completion that is the wanted digit."""


def reward(prompt: str, completion: str, *, wanted: str, **row: object) -> float:
    """Fraction of the characters that are `wanted`, a column of prompts.jsonl."""
    if not completion:
        return 0.0
    return completion.count(wanted) / len(completion)
