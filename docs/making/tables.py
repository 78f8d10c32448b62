"""The tables of pages, written from the code or the benchmarks' results that they are about.

    python -m docs.making.tables

writes them anew between `<!-- table: NAME -->` and `<!-- end -->`; a test holds that nothing is out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

from docs.making import compared, faults, forecast, learned, markdown
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dora.observe.metrics import PARTS, Metric
from dora.phrasebook import PHRASEBOOK, Word
from dora.sections import Section
from dora.settings import keys, sections

DOCS = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Those that may have tables."""
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def written(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """A page with each of its tables as it should be."""
    return MARKED.sub(lambda place: f"{place[1]}\n{tables[place[2]]()}\n\n{place[3]}", text)


def tables() -> dict[str, Callable[[], str]]:
    """What makes each table, by name: of a configuration, of the metrics, of other trainers, of results."""
    of_keys = {name: partial(section_table, name, section) for name, section in sections()}
    parts = {f"metrics_{part.key}": partial(metrics_table, part.metrics) for part in PARTS}
    words = {name.lower().replace("-", "_"): own for name, own in PHRASEBOOK.items()}
    of_words = {f"words_{name}": partial(words_table, own) for name, own in words.items()}
    of_results = learned.tables() | compared.tables() | forecast.tables() | faults.tables()
    return {**of_keys, **parts, **of_words, **of_results}


def section_table(name: str, section: type[Section]) -> str:
    """Every key of a section: default, and what it means."""
    found = [(key, field) for own, key, field in keys() if own == name]
    rows = [(f"`{key}`", defaultpartial(field), meaningpartial(field)) for key, field in found]
    return f"{section.__doc__}\n\n{markdown.table(('key', 'default', 'meaning (unit)'), rows)}"


def defaultpartial(field: FieldInfo) -> str:
    """As it would be written in TOML."""
    if field.is_required():
        return "required"
    if field.default is None or field.default is PydanticUndefined:
        return "unset"
    return f"`{json.dumps(field.default, ensure_ascii=False)}`"


def meaningpartial(field: FieldInfo) -> str:
    """The description, and the values that may be chosen."""
    is_choice = get_origin(field.annotation) is Literal
    choices = ", ".join(f"`{choice}`" for choice in get_args(field.annotation)) if is_choice else ""
    return f"{field.description}".replace("*", "\\*") + (f". One of {choices}" if choices else "")


def metrics_table(metrics: Iterable[Metric]) -> str:
    """Names, unit, meaning, and when they are there."""
    rows = [
        (", ".join(f"`{name}`" for name in metric.each()), metric.unit, metric.meaning, metric.only)
        for metric in metrics
    ]
    return markdown.table(("name", "unit", "meaning", "only"), rows)


def words_table(words: Iterable[Word]) -> str:
    """What another trainer calls it, and what DORA does."""
    rows = [(f"`{word.theirs}`", f"`{word.ours}`", word.remark) for word in words]
    return markdown.table(("there", "here", ""), rows)


def main() -> None:
    """Write every page that has such tables."""
    known = tables()
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := written(before, known)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page}")


if __name__ == "__main__":
    main()
