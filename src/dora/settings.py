"""Read a run's TOML file and its overrides into a `Config`; say what every key means.

Whatever is wrong becomes one ConfigError that names the key, the value, the rule and the
remedy; a misspelt key is answered with the nearest one and the list of valid ones, a key of another
trainer with DORA's.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dora.config import Config, assignment
from dora.errors import ConfigError, how_to_download
from dora.fleets import Kind
from dora.phrasebook import translated
from dora.sections import Section, Task

OUTSIDE = "service"  # instead of a path or a class: it comes through the service
HUB_KINDS = {"model.path": "model", "critic.path": "model", "data.path": "dataset", "eval.path": "dataset"}
BUILT_IN = {
    "data": ("gcd", OUTSIDE),
    "eval": ("gcd",),
    "reward": (OUTSIDE,),
    "engine": ("vllm", "vllm-lora", "sglang"),
}  # no path
NAMED: dict[str, type[Section]] = {"fleet": Kind, "task": Task}  # sections of which there may be several


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file after overrides `section.key=value`, or, of one of several tables
    [[task]] or [[fleet]], `task.NAME.key=value`.

    A value is read as TOML, and as a plain string where it is none. Paths are made absolute: those
    of the file are relative to it, those of overrides to the working directory. Raises ConfigError.
    """
    tables = _parse(path)
    changes = [_split(override) for override in overrides]
    _forget_what_the_old_policy_brought(tables, changes)
    if ("runtime", "kind", "local") in changes:
        tables.pop("ray", None)  # a file's [ray] is of the cluster that an override goes without
    for section, key, value in changes:
        if section in NAMED:
            name, _, key = key.partition(".")
            table = _one_of(tables, section, name)
        else:
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


def _one_of(tables: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    """The table [[section]] of that name. Raises ConfigError."""
    given = tables.get(section, [])
    found = [table for table in given if isinstance(table, dict)] if isinstance(given, list) else []
    for table in found:
        if table.get("name") == name:
            return table
    names = ", ".join(str(table.get("name")) for table in found) or "none"
    raise ConfigError(f"override {section}.{name}...: no [[{section}]] has this name; there are: {names}")


def _split(override: str) -> tuple[str, str, Any]:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        typed = [name.strip()]
        meant = _told_elsewhere(typed) or _told_in_other_sections(typed)
        raise ConfigError(
            f"override {override!r} must read section.key=value, for example trainer.lr=1e-4"
            + (f"; {meant}" if meant else "")
        )
    try:
        return section, key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return section, key, text.strip()


def forgotten(path: Path, overrides: Sequence[str], config: Config) -> list[str]:
    """What `config` lacks of its file because an override chooses another update policy, in sentences."""
    changes, chosen = [_split(override) for override in overrides], config.orchestrator
    typed = {f"{section}.{key}" for section, key, _ in changes}
    return [
        f"orchestrator.{key} = {value} in {path} was meant for another update_policy: "
        f"with {chosen.update_policy} it is {getattr(chosen, key)}"
        for key, value in _forget_what_the_old_policy_brought(_parse(path), changes).items()
        if f"orchestrator.{key}" not in typed and getattr(chosen, key) != value
    ]


def _forget_what_the_old_policy_brought(
    tables: dict[str, Any], changes: Sequence[tuple[str, str, Any]]
) -> dict[str, Any]:
    """A file's max_staleness was meant for the file's policy: another policy brings its own default.

    Returns what was taken out of the section orchestrator.
    """
    table, taken = tables.get("orchestrator"), dict[str, Any]()
    if isinstance(table, dict):
        for section, key, value in changes:
            if (section, key) == ("orchestrator", "update_policy") and value != table.get(key, "dora"):
                brought = [name for name in ("max_staleness", "batches_per_version") if name in table]
                taken |= {name: table.pop(name) for name in brought}
    return taken


def _explain(details: ErrorDetails) -> str:
    """One line for one finding of pydantic: key, value, rule, remedy."""
    where = [part for part in details["loc"] if isinstance(part, str)]  # others are places in a list
    name, kind = ".".join(where[:2]), details["type"]
    table, typed = f"[{where[0]}]", name
    if where[0] in NAMED:
        table, typed = f"[[{where[0]}]]", name.replace(where[0], f"{where[0]}.NAME", 1)
    if kind == "extra_forbidden":
        what = "section" if len(where) == 1 else "key"
        return f"  {name}: unknown {what}; {_suggest(where, [*_leaves(name, details['input'])])}"
    meaning = {f"{section}.{key}": field.description for section, key, field in keys()}.get(name)
    if kind == "missing" and meaning is None:
        return f"  [{name}]: section missing; it needs {', '.join(_required(name))}"
    if kind == "missing":
        return (
            f"  {name}: not set, and it has no default; add `{where[-1]} = ...` to {table}, or "
            f"--set {typed}=... ({meaning})"
        )
    rule = details["msg"][:1].lower() + details["msg"][1:]
    if meaning is None:
        return f"  {name} = {details['input']!r}: {rule}; write a table {table}"
    wrong = f"  {name} = {details['input']!r}: {rule}"
    return f"{wrong}; change it in the file or with --set {typed}=... ({meaning})"


def _leaves(name: str, value: object) -> Iterator[str]:
    """Names of the values in what should not be there, which may be a table with tables in it."""
    if not isinstance(value, dict):
        yield name
        return
    for key, own in value.items():
        yield from _leaves(f"{name}.{key}", own)


def _suggest(where: Sequence[str], typed: Sequence[str]) -> str:
    """What an unknown section or key may have meant; `typed`: it, or all that it holds."""
    if told := _told_elsewhere(typed):
        return told
    is_section = len(where) == 1
    own = [key for section, key, _ in keys() if section == where[0]]
    valid = [name for name, _ in sections()] if is_section else own
    near = difflib.get_close_matches(where[-1], valid, n=1)
    if not (is_section and near) and (told := _told_in_other_sections(typed)):
        return told
    return (f"did you mean {near[0]}? " if near else "") + f"valid: {', '.join(valid)}"


def _told_elsewhere(typed: Sequence[str]) -> str:
    """DORA's keys for what are keys of other trainers; empty if none of them is."""
    words = [(name, word) for name in typed if (word := translated(name)) is not None]
    return "; ".join(
        f"{name} is {word.ours} here" + (f" ({word.remark})" if word.remark else "") for name, word in words
    )


def _told_in_other_sections(typed: Sequence[str]) -> str:
    """Keys that have the right name in the wrong section; empty if there are none."""
    found = {}
    for last in (name.rpartition(".")[2] for name in typed):
        found[last] = [f"{section}.{key}" for section, key, _ in keys() if key == last and section != "task"]
    return "; ".join(f"{last} is {' or '.join(own)} here" for last, own in found.items() if own)


def _required(name: str) -> list[str]:
    return [key for section, key, field in keys() if section == name and field.is_required()]


def _with_absolute_paths(config: Config, folder_of: Callable[[str], Path]) -> Config:
    """Make paths independent of where the run's copy of the configuration lies. They must exist.

    `folder_of` tells what the path of a key is relative to.
    """
    changes: dict[str, dict[str, str]] = {}
    named = {"reward": "function", "env": "environment", "engine": "adapter", "trainer": "adapter"}
    for section, key in named.items():
        if (value := getattr(getattr(config, section), key)) not in (None, *BUILT_IN.get(section, ())):
            changes[section] = {key: _attribute(f"{section}.{key}", value, folder_of)}
    for section in ("model", "data", "critic", "eval"):
        value, name = getattr(config, section).path, f"{section}.path"
        built_in = BUILT_IN.get(section, ())
        if value not in (None, *built_in):
            changes[section] = {"path": _existing(folder_of(name), value, name, built_in)}
    for section in ("service", "env"):
        value, name = getattr(config, section).token_file, f"{section}.token_file"
        if value is not None:
            changes.setdefault(section, {})["token_file"] = _existing(folder_of(name), value, name)
    update: dict[str, Any] = {
        section: getattr(config, section).model_copy(update=new) for section, new in changes.items()
    }
    if config.engine.options is not None:
        engine = update.get("engine", config.engine)
        options = _with_interpreter(config.engine.options, folder_of("engine.options"))
        update["engine"] = engine.model_copy(update={"options": options})
    update["fleet"] = [_with_paths_of_kind(kind, folder_of) for kind in config.fleet]
    update["task"] = [_with_paths_of_task(task, folder_of) for task in config.task]
    return config.model_copy(update=update)


def _with_paths_of_task(task: Task, folder_of: Callable[[str], Path]) -> Task:
    key = f"task.{task.name}"
    options, path = task.options, task.options.get("path")
    if isinstance(path, str) and (there := (folder_of(f"{key}.options") / path).resolve()).exists():
        options = {**options, "path": str(there)}
    factory = task.factory
    if factory != OUTSIDE:
        factory = _attribute(f"{key}.class", factory, folder_of)
    return task.model_copy(update={"factory": factory, "options": options})


def _with_paths_of_kind(kind: Kind, folder_of: Callable[[str], Path]) -> Kind:
    key, adapter = f"fleet.{kind.name}", kind.adapter
    if adapter not in BUILT_IN["engine"]:
        adapter = _attribute(f"{key}.adapter", adapter, folder_of)
    options = _with_interpreter(kind.options, folder_of(f"{key}.options"))
    return kind.model_copy(update={"adapter": adapter, "options": options})


def _with_interpreter(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """An interpreter called `python` is found where a path leads to it, and is no link's target: that of an
    environment is one.
    """
    python = options.get("python")
    if not isinstance(python, str) or os.sep not in python:
        return options
    return {**options, "python": os.path.abspath(folder / Path(python).expanduser())}


def _attribute(key: str, value: str, folder_of: Callable[[str], Path]) -> str:
    """What `dora.loading` loads, with an absolute path if it lies in a file."""
    file, colon, name = value.rpartition(":")
    if not (file and colon and name):
        raise ConfigError(f"{key} = {value!r}: must read file.py:name or module:name")
    return f"{_existing(folder_of(key), file, key)}:{name}" if file.endswith(".py") else value


def _existing(folder: Path, value: str, name: str, built_in: Sequence[str] = ()) -> str:
    path = (folder / Path(value).expanduser()).resolve()
    if not path.exists():
        or_built_in = f", or use the built-in {', '.join(built_in)}" if built_in else ""
        kind = HUB_KINDS.get(name)
        raise ConfigError(
            f"{name} = {value!r}: {path} does not exist (this path is relative to {folder}){or_built_in}"
            + (how_to_download(value, path, kind) if kind else "")
        )
    return str(path)


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Name and class of every section, in order."""
    for name, field in Config.model_fields.items():
        kind = NAMED.get(name, field.annotation)
        assert isinstance(kind, type)
        yield name, kind


def keys() -> Iterator[tuple[str, str, FieldInfo]]:
    """(section, key, field) of every setting, in order."""
    for section, kind in sections():
        for name, field in kind.model_fields.items():
            yield section, field.alias or name, field


def values(config: Config) -> Iterator[tuple[str, Any]]:
    """("section.key", value) of every setting; those of one of several tables are "section.NAME.key"."""
    tables = [(name, getattr(config, name)) for name in Config.model_fields if name not in NAMED]
    tables += [(f"{name}.{table.name}", table) for name in NAMED for table in getattr(config, name)]
    for name, table in tables:
        for key, field in type(table).model_fields.items():
            yield f"{name}.{field.alias or key}", getattr(table, key)


def defaults_toml() -> str:
    """Every key with meaning, unit and default, as TOML; keys without a default are commented out."""
    lines = []
    for section, kind in sections():
        is_one_of_many = section in NAMED
        lines += [f"# {kind.__doc__}", f"# [[{section}]]" if is_one_of_many else f"[{section}]"]
        for key, field in ((key, field) for name, key, field in keys() if name == section):
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            lines.append(f"# {field.description}" + (f"; one of: {', '.join(choices)}" if choices else ""))
            if field.is_required():
                lines.append(f"# {key} =    (required)")
            else:
                line = f"# {key} =    (unset)" if field.default is None else assignment(key, field.default)
                lines.append(f"# {line}" if is_one_of_many and line[0] != "#" else line)
        lines.append("")
    return "\n".join(lines)
