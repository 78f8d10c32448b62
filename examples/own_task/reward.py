"""The reward of the example: how much of an answer is the wanted digit."""


def reward(prompt: str, completion: str, *, wanted: str, **row: object) -> float:
    """Share of the answer's characters that are `wanted`, a column of prompts.jsonl."""
    if not completion:
        return 0.0
    return completion.count(wanted) / len(completion)
