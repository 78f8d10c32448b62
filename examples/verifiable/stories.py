"""Word problems in English, Russian and Chinese: three languages, three scripts, one arithmetic.

    Mia has 7. Buys 5. Loses 3.  ->  7+5=12;12-3=9
    Оля взяла 7. Отдали 2.       ->  7-2=5
    小明有7。又买5。               ->  7+5=12

A story has one to five events; the answer has the result of each.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

NUM_ROWS, NUM_HELD_OUT = 2400, 256
MAX_EVENTS, STORY_ENDS, LARGEST = 5, 0.4, 30  # STORY_ENDS: probability after each event
ERROR_RATE = 0.2  # probability of a wrong result in a demonstration


@dataclass(frozen=True)
class Language:
    """Sentences of a story: its beginning, and events that add or subtract."""

    beginnings: tuple[str, ...]
    more: tuple[str, ...]
    less: tuple[str, ...]


LANGUAGES = {
    "en": Language(
        ("Mia has {}.", "Leo has {}.", "Ann has {}."),
        (" Buys {}.", " Finds {}."),
        (" Loses {}.", " Sells {}."),
    ),
    "ru": Language(
        ("Оля взяла {}.", "Петя взял {}.", "Надя взяла {}."),
        (" Купили {}.", " Нашли {}."),
        (" Отдали {}.", " Съели {}."),
    ),
    "zh": Language(
        ("小明有{}。", "小红有{}。", "老王有{}。"), ("又买{}。", "得到{}。"), ("送出{}。", "丢了{}。")
    ),
}
_TEXTS = "".join(text for one in LANGUAGES.values() for text in (*one.beginnings, *one.more, *one.less))
ALPHABET = "".join(sorted({*_TEXTS, *"0123456789+-=;"} - {*"{}"}))


def rows(source: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out stories, the same number in each language."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < NUM_ROWS + NUM_HELD_OUT:
        name = [*LANGUAGES][len(found) % len(LANGUAGES)]
        row = _story(name, source)
        found[row["prompt"]] = row
    stories = [*found.values()]
    return stories[:NUM_ROWS], stories[NUM_ROWS:]


def _story(name: str, source: random.Random) -> dict[str, Any]:
    language, total = LANGUAGES[name], source.randint(5, 15)
    sentences, steps = [source.choice(language.beginnings).format(total)], ""
    for event in range(MAX_EVENTS):
        if event and source.random() < STORY_ENDS:
            break
        is_more = total < 3 or (total < LARGEST - 9 and source.random() < 0.5)
        change = source.randint(1, min(9, LARGEST if is_more else total))
        sentences.append(source.choice(language.more if is_more else language.less).format(change))
        steps += f"{'+' if is_more else '-'}{change}"
        total += change if is_more else -change
    return {"prompt": "".join(sentences), "steps": steps, "language": name}


def answer(prompt: str, steps: str, error_rate: float = 0.0, source: random.Random | None = None) -> str:
    """The result of each event, off by one with probability `error_rate`; the next continues from it."""
    found = re.search(r"\d+", prompt)
    assert found
    total, written = int(found[0]), []
    for sign, change in re.findall(r"([+-])(\d)", steps):
        result = total + int(f"{sign}{change}")
        if source is not None and source.random() < error_rate:
            result = max(0, result + source.choice((-1, 1)))
        written.append(f"{total}{sign}{change}={result}")
        total = result
    return ";".join(written)


def demonstration(row: dict[str, Any], source: random.Random) -> str | None:
    """An answer in which results may be wrong."""
    return answer(row["prompt"], row["steps"], ERROR_RATE, source)


def reward(prompt: str, completion: str, **row: object) -> float:
    """1 if every result is correct and in order."""
    return float(completion == answer(prompt, str(row["steps"])))
