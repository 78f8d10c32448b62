"""Write a configuration, or the default of every key, as TOML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from dora.config.schema import LIST_SECTIONS, Config, iter_keys, iter_sections
from dora.config.validate import keys_without_effect


def to_toml(config: Config) -> str:
    """The complete configuration as TOML, without keys that are unset or have no effect."""
    exclude: dict[str, Any] = {section: {*keys} for section, keys in keys_without_effect(config).items()}
    if not config.has_held_out:
        exclude["eval"] = True
    tables = []
    for section, given in config.model_dump(exclude_none=True, exclude=exclude, by_alias=True).items():
        head = f"[[{section}]]" if isinstance(given, list) else f"[{section}]"
        for values in filter(None, given if isinstance(given, list) else [given]):
            tables.append("\n".join([head, *(_assignment(key, value) for key, value in values.items())]))
    return "\n\n".join(tables) + "\n"


def config_digest(config: Config) -> str:
    """Digest (32 hex digits) of `to_toml(config)`; equal runs have equal digests."""
    return hashlib.blake2b(to_toml(config).encode(), digest_size=16).hexdigest()


def defaults_toml() -> str:
    """Every key with its help and default, as TOML; keys without a default are comments."""
    lines: list[str] = []
    for name, section in iter_sections():
        lines.append(f"# {section.__doc__}")
        lines.append(f"# [[{name}]]" if name in LIST_SECTIONS else f"[{name}]")
        for key, field in ((key, field) for own, key, field in iter_keys() if own == name):
            lines += _default_lines(key, field, is_comment=name in LIST_SECTIONS)
        lines.append("")
    return "\n".join(lines)


def _default_lines(key: str, field: FieldInfo, *, is_comment: bool) -> Iterator[str]:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    yield f"# {field.description}" + (f" One of: {', '.join(choices)}." if choices else "")
    if field.is_required():
        yield f"# {key} =    (required)"
    elif field.default is None:
        yield f"# {key} =    (unset)"
    else:
        yield ("# " if is_comment else "") + _assignment(key, field.default)


def _assignment(key: str, value: Any) -> str:
    return f"{key} = {to_literal(value)}"


def to_literal(value: Any) -> str:
    """A value in TOML, on one line. Raises TypeError. JSON and TOML write everything but tables alike."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key, ensure_ascii=False)} = {to_literal(own)}" for key, own in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
