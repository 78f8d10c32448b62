"""Read a run's TOML file and its overrides into a `Config`; say what every key means.

Whatever is wrong becomes one ConfigError that names the key, the value, the rule and the
remedy; a misspelt key is answered with the nearest one and the list of valid ones.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dora.config import Config, assignment
from dora.errors import ConfigError
from dora.sections import Section

BUILT_IN_DATA = ("gcd",)


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file after overrides `section.key=value`.

    A value is read as TOML, and as a plain string where it is none. Paths are made absolute: those
    of the file are relative to it, those of overrides to the working directory. Raises ConfigError.
    """
    tables = _parse(path)
    changes = [_split(override) for override in overrides]
    _forget_what_the_old_policy_brought(tables, changes)
    for section, key, value in changes:
        table = tables.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
    try:
        config = Config.model_validate(tables)
    except ValidationError as error:
        problems = [_explain(details) for details in error.errors()]
        raise ConfigError("\n".join([f"{path} with its overrides:", *problems])) from error
    folder, typed = path.resolve().parent, {f"{section}.{key}" for section, key, _ in changes}
    return _with_absolute_paths(config, lambda name: Path.cwd() if name in typed else folder)


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(
            f"config file {path} does not exist; `dora config --defaults` prints a start"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from error


def _split(override: str) -> tuple[str, str, Any]:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"override {override!r} must read section.key=value, for example trainer.lr=1e-4")
    try:
        return section, key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return section, key, text.strip()


def _forget_what_the_old_policy_brought(
    tables: dict[str, Any], changes: Sequence[tuple[str, str, Any]]
) -> None:
    """A file's max_staleness was meant for the file's policy: another policy brings its own default."""
    table = tables.get("orchestrator")
    if isinstance(table, dict):
        for section, key, value in changes:
            if (section, key) == ("orchestrator", "update_policy") and value != table.get(key, "dora"):
                for brought in ("max_staleness", "batches_per_version"):
                    table.pop(brought, None)


def _explain(details: ErrorDetails) -> str:
    """One line for one finding of pydantic: key, value, rule, remedy."""
    where = [str(part) for part in details["loc"]]
    name, kind = ".".join(where[:2]), details["type"]  # the third part is a place in a list
    if kind == "extra_forbidden":
        return f"  {name}: unknown {'section' if len(where) == 1 else 'key'}; {_suggest(where)}"
    meaning = {f"{section}.{key}": field.description for section, key, field in keys()}.get(name)
    if kind == "missing" and meaning is None:
        return f"  [{name}]: section missing; it needs {', '.join(_required(name))}"
    if kind == "missing":
        return (
            f"  {name}: not set, and it has no default; add `{where[-1]} = ...` to [{where[0]}], or "
            f"--set {name}=... ({meaning})"
        )
    rule = details["msg"][:1].lower() + details["msg"][1:]
    if meaning is None:
        return f"  {name} = {details['input']!r}: {rule}; write a table [{name}]"
    return (
        f"  {name} = {details['input']!r}: {rule}; change it in the file or with --set {name}=... ({meaning})"
    )


def _suggest(where: Sequence[str]) -> str:
    """What an unknown section or key may have meant."""
    if len(where) == 1:
        valid = [section for section, _ in sections()]
        near = difflib.get_close_matches(where[0], valid, n=1)
    else:
        valid = [key for section, key, _ in keys() if section == where[0]]
        near = difflib.get_close_matches(where[-1], valid, n=1)
        near = near or [f"{section}.{key}" for section, key, _ in keys() if key == where[-1]]
    return (f"did you mean {near[0]}? " if near else "") + f"valid: {', '.join(valid)}"


def _required(name: str) -> list[str]:
    return [key for section, key, field in keys() if section == name and field.is_required()]


def _with_absolute_paths(config: Config, folder_of: Callable[[str], Path]) -> Config:
    """Make paths independent of where the run's copy of the configuration lies. They must exist.

    `folder_of` tells what the path of a key is relative to.
    """
    changes: dict[str, dict[str, str]] = {"reward": {"function": _function(config, folder_of)}}
    for section in ("model", "data", "critic", "eval"):
        value, name = getattr(config, section).path, f"{section}.path"
        built_in = BUILT_IN_DATA if section in ("data", "eval") else ()
        if value not in (None, *built_in):
            changes[section] = {"path": _existing(folder_of(name), value, name, built_in)}
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=new) for section, new in changes.items()}
    )


def _function(config: Config, folder_of: Callable[[str], Path]) -> str:
    name = "reward.function"
    file, colon, function = config.reward.function.rpartition(":")
    if not (file and colon and function):
        raise ConfigError(
            f"{name} = {config.reward.function!r}: must read file.py:function or module:function"
        )
    return (
        f"{_existing(folder_of(name), file, name)}:{function}"
        if file.endswith(".py")
        else f"{file}:{function}"
    )


def _existing(folder: Path, value: str, name: str, built_in: Sequence[str] = ()) -> str:
    path = (folder / Path(value).expanduser()).resolve()
    if not path.exists():
        or_built_in = f", or use the built-in {', '.join(built_in)}" if built_in else ""
        raise ConfigError(
            f"{name} = {value!r}: {path} does not exist (this path is relative to {folder}){or_built_in}"
        )
    return str(path)


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Name and class of every section, in order."""
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        yield name, field.annotation


def keys() -> Iterator[tuple[str, str, FieldInfo]]:
    """(section, key, field) of every setting, in order."""
    for section, kind in sections():
        for key, field in kind.model_fields.items():
            yield section, key, field


def defaults_toml() -> str:
    """Every key with meaning, unit and default, as TOML; keys without a default are commented out."""
    lines = []
    for section, kind in sections():
        lines += [f"# {kind.__doc__}", f"[{section}]"]
        for key, field in kind.model_fields.items():
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            lines.append(f"# {field.description}" + (f"; one of: {', '.join(choices)}" if choices else ""))
            if field.is_required():
                lines.append(f"# {key} =    (required)")
            else:
                lines.append(
                    f"# {key} =    (unset)" if field.default is None else assignment(key, field.default)
                )
        lines.append("")
    return "\n".join(lines)
