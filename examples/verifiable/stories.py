"""Word problems in English, Russian and Chinese: three languages, three scripts, one arithmetic.

    Mia has 7. Buys 5. Loses 3.  ->  7+5=12;12-3=9
    Оля взяла 7. Отдали 2.       ->  7-2=5
    小明有7。又买5。               ->  7+5=12

One to five events make a story; the policy writes down what each of them comes to.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

NUM_ROWS, NUM_HELD_OUT = 2400, 256
MOST_EVENTS, ENDS, LARGEST = 5, 0.4, 30
SLIP = 0.2  # chance that the teacher miscounts an event


@dataclass(frozen=True)
class Language:
    """How a story is told: its first sentence, and what makes more or less."""

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
    """Stories in all languages, as many of each."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < NUM_ROWS + NUM_HELD_OUT:
        name = [*LANGUAGES][len(found) % len(LANGUAGES)]
        row = _story(name, source)
        found[row["prompt"]] = row
    stories = [*found.values()]
    return stories[:NUM_ROWS], stories[NUM_ROWS:]


def _story(name: str, source: random.Random) -> dict[str, Any]:
    language, total = LANGUAGES[name], source.randint(5, 15)
    told, steps = [source.choice(language.beginnings).format(total)], ""
    for event in range(MOST_EVENTS):
        if event and source.random() < ENDS:
            break
        is_more = total < 3 or (total < LARGEST - 9 and source.random() < 0.5)
        change = source.randint(1, min(9, LARGEST if is_more else total))
        told.append(source.choice(language.more if is_more else language.less).format(change))
        steps += f"{'+' if is_more else '-'}{change}"
        total += change if is_more else -change
    return {"prompt": "".join(told), "steps": steps, "language": name}


def answer(prompt: str, steps: str, slip: float = 0.0, source: random.Random | None = None) -> str:
    """What each event comes to; with the chance `slip` one off, and on from there."""
    found = re.search(r"\d+", prompt)
    assert found
    total, written = int(found[0]), []
    for sign, change in re.findall(r"([+-])(\d)", steps):
        result = total + int(f"{sign}{change}")
        if source is not None and source.random() < slip:
            result = max(0, result + source.choice((-1, 1)))
        written.append(f"{total}{sign}{change}={result}")
        total = result
    return ";".join(written)


def lesson(row: dict[str, Any], source: random.Random) -> str | None:
    """What the teacher writes."""
    return answer(row["prompt"], row["steps"], SLIP, source)


def reward(prompt: str, completion: str, **row: object) -> float:
    """1 if every event is there, in order, and counted right."""
    return float(completion == answer(prompt, str(row["steps"])))
