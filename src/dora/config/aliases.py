"""Names that the configuration rejects with a suggestion: renamed keys, and keys of other trainers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class KeyAlias(NamedTuple):
    """A key of another trainer, and DORA-RL's key for the same setting."""

    theirs: str
    ours: str  # section.key
    note: str = ""


@cache
def trainer_aliases() -> dict[str, tuple[KeyAlias, ...]]:
    """Trainer -> its keys."""
    return {
        trainer: tuple(_key_alias(theirs, entry) for theirs, entry in keys.items())
        for trainer, keys in _data()["trainers"].items()
    }


def find_trainer_alias(typed: str) -> KeyAlias | None:
    """The alias for a key as typed, with all or only some of the sections that the other trainer has."""
    typed = typed.lstrip("-").replace("-", "_")
    found = [alias for keys in trainer_aliases().values() for alias in keys if _matches(typed, alias.theirs)]
    return max(found, key=lambda alias: len(alias.theirs), default=None)


def renamed_tables() -> Mapping[str, str]:
    """Old -> new name of lists of tables."""
    tables: dict[str, str] = _data()["renamed_tables"]
    return tables


def renamed_keys() -> Mapping[str, str]:
    """Old -> new "section.key"; keys of a list of tables are without the table's name."""
    keys: dict[str, str] = _data()["renamed"]
    return keys


def removed_keys() -> list[str]:
    """Keys, as "section.key", that have no successor."""
    keys: list[str] = _data()["removed"]
    return keys


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("aliases.toml").read_text(encoding="utf-8"))


def _key_alias(theirs: str, entry: str | dict[str, str]) -> KeyAlias:
    if isinstance(entry, str):
        return KeyAlias(theirs, entry)
    return KeyAlias(theirs, entry["key"], entry["note"])


def _matches(typed: str, theirs: str) -> bool:
    """A last part alone, such as `lr`, matches no key with sections."""
    is_part = "." in typed and theirs.endswith("." + typed)
    return typed == theirs or typed.endswith("." + theirs) or is_part
