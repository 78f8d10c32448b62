"""Names that the configuration rejects with a suggestion: renamed keys, and keys of other trainers."""

from __future__ import annotations

import tomllib
from itertools import chain
from pathlib import Path
from typing import NamedTuple


class KeyAlias(NamedTuple):
    """A key of another trainer, or of an earlier DORA-RL, and the key for the same setting."""

    theirs: str
    ours: str  # section.key
    note: str = ""


def _key_alias(theirs: str, entry: str | dict[str, str]) -> KeyAlias:
    if isinstance(entry, str):
        return KeyAlias(theirs, entry)
    return KeyAlias(theirs, entry["key"], entry["note"])


_DATA = tomllib.loads(Path(__file__).with_name("aliases.toml").read_text(encoding="utf-8"))
RENAMED = tuple(KeyAlias(old, new) for old, new in _DATA["renamed"].items())  # keys, and one list of tables
TRAINER_ALIASES = {
    trainer: tuple(_key_alias(theirs, entry) for theirs, entry in keys.items())
    for trainer, keys in _DATA["trainers"].items()
}  # the keys of each trainer


def find_alias(typed: str) -> KeyAlias | None:
    """The alias for a key as typed, with all or only some of the sections that the other trainer has."""
    typed = typed.lstrip("-").replace("-", "_")
    aliases = chain(RENAMED, *TRAINER_ALIASES.values())
    found = [alias for alias in aliases if _matches(typed, alias)]
    return max(found, key=lambda alias: len(alias.theirs), default=None)


def _matches(typed: str, alias: KeyAlias) -> bool:
    """A last part alone, such as `lr`, matches no key with sections, and a table matches only itself."""
    theirs = alias.theirs
    if "." not in alias.ours:
        return typed == theirs
    is_part = "." in typed and theirs.endswith("." + typed)
    return typed == theirs or typed.endswith("." + theirs) or is_part
