"""Unit and meaning of every name in `metrics.jsonl` and `summary.json`, read from catalog.toml."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from typing import NamedTuple

from dora.errors import InputError


class MetricDoc(NamedTuple):
    """Names that share a meaning; `only` is the condition under which they exist, empty: always."""

    names: tuple[str, ...]
    unit: str
    meaning: str
    only: str = ""

    def matches(self, name: str) -> bool:
        """Whether a name in a file is one of these names; NAME and SOURCE match any text, S, N and K match a
        number.
        """
        return any(_pattern(own).fullmatch(name) for own in self.names)

    def has(self, word: str) -> bool:
        """Whether the word is in a name or in the meaning."""
        return word in ", ".join(self.names) or word in self.meaning or self.matches(word)


class MetricSection(NamedTuple):
    """Metrics that are read together."""

    key: str  # the table on the page of the documentation
    title: str
    metrics: tuple[MetricDoc, ...]


def _pattern(name: str) -> re.Pattern[str]:
    pattern = re.sub(r"(?<=[_@])(?:S|N|K)(?=_|$)", r"\\d+", re.escape(name))
    return re.compile(re.sub("NAME|SOURCE", "[^/]+", pattern))


def _read_sections() -> tuple[MetricSection, ...]:
    text = resources.files(__package__).joinpath("catalog.toml").read_text(encoding="utf-8")
    return tuple(
        MetricSection(
            part["key"],
            part["title"],
            tuple(
                MetricDoc(tuple(m["names"]), m.get("unit", ""), m["meaning"], m.get("only", ""))
                for m in part["metrics"]
            ),
        )
        for part in tomllib.loads(text)["part"]
    )


SECTIONS = _read_sections()


def format_listing(word: str) -> str:
    """The output of `dora metrics`: metrics with `word` in a name or in their meaning, by section.

    Raises InputError if there is none.
    """
    lines: list[str] = []
    for section in SECTIONS:
        found = [metric for metric in section.metrics if metric.has(word)]
        lines += ["", section.title, ""] if found else []
        for metric in found:
            unit = f" ({metric.unit})" if metric.unit else ""
            only = f"; only {metric.only}" if metric.only else ""
            lines += [f"  {', '.join(metric.names)}{unit}", f"      {metric.meaning}{only}"]
    if not lines:
        raise InputError(
            f"no metric has {word!r} in its name or its meaning; `dora metrics` without a word prints all"
        )
    return "\n".join(lines[1:]).replace("`", "")
