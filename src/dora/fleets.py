"""Engines of several kinds in one run: those of [engine], and of a table [[fleet]] for each other kind.

Engines are numbered through: first those of [engine], then those of each table in order. One that comes
later is of [engine]'s kind, and so is the one that an elastic trainer lends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field, JsonValue

from dora.sections import Count, Section

if TYPE_CHECKING:
    from dora.config import Config


class Kind(Section):
    """Engines of one kind more; each kind has a table [[fleet]] of its own."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")] = Field(
        description='what it is called in errors and overrides (name, as "vllm")'
    )
    adapter: str = Field(description="as in [engine]; where that has none, DORA's own are the others")
    options: dict[str, JsonValue] = Field(default={}, description="as in [engine] (table)")
    num_engines: Count = Field(default=1, description="rollout processes of this kind (count)")
    max_rows: Count | None = Field(
        default=None, description="requests one of them decodes at once (count); unset: as in [engine]"
    )
    version_slots: Count = Field(default=1, description="versions one of them can hold (count)")


class Engines(NamedTuple):
    """What engines of one kind are made with; `key` is where the configuration says so."""

    key: str
    adapter: str | None
    options: dict[str, JsonValue]
    num_engines: int
    max_rows: int
    version_slots: int


def kinds(config: Config) -> list[Engines]:
    """Those of [engine] first."""
    own = config.engine
    first = Engines(
        "engine", own.adapter, own.options or {}, own.num_engines, own.max_rows, config.version_slots
    )
    others = (
        Engines(
            f"fleet.{kind.name}",
            kind.adapter,
            kind.options,
            kind.num_engines,
            kind.max_rows or own.max_rows,
            kind.version_slots,
        )
        for kind in config.fleet
    )
    return [first, *others]


def num_engines(config: Config) -> int:
    """Of all kinds, without the one that an elastic trainer lends."""
    return sum(kind.num_engines for kind in kinds(config))


def kind_of(config: Config, engine: int) -> Engines:
    """What an engine is made with, by its number."""
    found = kinds(config)
    numbered = [kind for kind in found for _ in range(kind.num_engines)]
    return numbered[engine] if engine < len(numbered) else found[0]
