"""Write the tables on the pages from the code and the benchmark results that they describe.

    python -m docs.making.tables

replaces the text between `<!-- table: NAME -->` and `<!-- end -->`, and draws the curves of the gallery.
A test compares them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

from docs.making import compared, faults, forecast, gallery, learned, markdown, measured, trained
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dora.config.aliases import TRAINER_ALIASES, KeyAlias
from dora.config.schema import Section, iter_keys, iter_sections
from dora.metrics.catalog import SECTIONS, MetricDoc

DOCS = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Pages that may contain tables."""
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def written(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """The text of a page with all of its tables up to date."""
    return MARKED.sub(lambda found: f"{found[1]}\n{tables[found[2]]()}\n\n{found[3]}", text)


def tables() -> dict[str, Callable[[], str]]:
    """Table name -> function that writes it."""
    of_keys = {name: partial(section_table, name, section) for name, section in iter_sections()}
    of_metrics = {f"metrics_{section.key}": partial(metrics_table, section.metrics) for section in SECTIONS}
    of_aliases = {
        f"words_{trainer.lower().replace('-', '_')}": partial(alias_table, aliases)
        for trainer, aliases in TRAINER_ALIASES.items()
    }
    made: dict[str, Callable[[], str]] = {**of_keys, **of_metrics, **of_aliases}
    for module in (learned, compared, forecast, faults, measured, gallery, trained):
        made |= module.tables()
    return made


def section_table(name: str, section: type[Section]) -> str:
    """Every key of a section with its default and meaning."""
    fields = [(key, field) for own, key, field in iter_keys() if own == name]
    rows = [(f"`{key}`", default_of(field), meaning_of(field)) for key, field in fields]
    return f"{section.__doc__}\n\n{markdown.table(('key', 'default', 'meaning (unit)'), rows)}"


def default_of(field: FieldInfo) -> str:
    """The default as TOML."""
    if field.is_required():
        return "required"
    if field.default is None or field.default is PydanticUndefined:
        return "unset"
    return f"`{json.dumps(field.default, ensure_ascii=False)}`"


def meaning_of(field: FieldInfo) -> str:
    """The help of a key, and its choices."""
    is_choice = get_origin(field.annotation) is Literal
    choices = ", ".join(f"`{choice}`" for choice in get_args(field.annotation)) if is_choice else ""
    return f"{field.description}".replace("*", "\\*") + (f" One of {choices}." if choices else "")


def metrics_table(metrics: Iterable[MetricDoc]) -> str:
    """Name, unit and meaning of metrics, and when they exist."""
    rows = [
        (", ".join(f"`{name}`" for name in metric.names), metric.unit, metric.meaning, metric.only)
        for metric in metrics
    ]
    return markdown.table(("name", "unit", "meaning", "only"), rows)


def alias_table(aliases: Iterable[KeyAlias]) -> str:
    """Keys of another trainer and DORA's."""
    rows = [(f"`{alias.theirs}`", f"`{alias.ours}`", alias.note) for alias in aliases]
    return markdown.table(("there", "here", ""), rows)


def main() -> None:
    """Update every page."""
    known = tables()
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := written(before, known)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page}")
    for name, picture in gallery.pictures().items():
        (DOCS / "images" / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
