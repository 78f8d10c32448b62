"""Read the TOML file of a run, with overrides, into a `Config`.

Every mistake is a ConfigError that names the key, the value, the rule and the remedy. The remedy for a
misspelt key is the nearest valid one; for a renamed key, or a key of another trainer, it is DORA-RL's name.
"""

from __future__ import annotations

import codecs
import copy
import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dora.config.aliases import find_alias
from dora.config.hub import RepoType, commit_of, fetch, missing_snapshot_hint
from dora.config.schema import (
    LIST_SECTIONS,
    Config,
    Section,
    iter_keys,
    iter_sections,
)
from dora.config.validate import check
from dora.errors import ConfigError, DamagedRunError, is_hub_name, not_utf8
from dora.trainer.recipe import AdvEstimator, PolicyLoss

# Values that are neither paths nor names of classes and functions, by section.
BACKENDS = ("vllm", "vllm-lora", "sglang", "sglang-lora", "transformers")
BUILT_IN: dict[str, tuple[str, ...]] = {
    "data": ("gcd", "service"),
    **dict.fromkeys(("source", "eval", "eval_source"), ("gcd",)),
    **dict.fromkeys(("reward", "reward_task"), ("service",)),
    **dict.fromkeys(("engine", "fleet"), BACKENDS),
    "algorithm": (*get_args(AdvEstimator), *get_args(PolicyLoss)),
}
OBJECTS = (  # values that name a class or function
    *("reward.function", "reward_task.class", "env.environment"),
    *("engine.backend", "fleet.backend", "trainer.backend"),
    *("algorithm.adv_estimator", "algorithm.policy_loss"),
)
PATHS: dict[str, RepoType | None] = {  # with the kind of repository on the hub that a value may name
    **dict.fromkeys(("model.path", "critic.path"), "model"),
    **dict.fromkeys(("data.path", "source.path", "eval.path", "eval_source.path"), "dataset"),
    **dict.fromkeys(("service.token_file", "env.token_file", "trainer.continue_from")),
}
TRAINING_SECTIONS = ("trainer", "algorithm", "correction", "critic", "distillation", "curriculum")
REMEDIES_FOR_0 = {  # appended to the error for a value of 0
    "sampling.temperature": "; training needs samples that differ, and eval.greedy = true evaluates greedily",
    "eval.temperature": "; eval.greedy = true evaluates greedily, and eval.num_samples = 0 samples nothing",
}
POLICY_KEYS = ("max_staleness", "batches_per_version", "ablations")  # they belong to one update policy


class Override(NamedTuple):
    """One `section.key=value`; in a list of tables the key is "NAME.key"."""

    section: str
    key: str
    value: Any


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply overrides, such as `trainer.lr=1e-4` or `reward_task.NAME.weight=2`.

    The value of an override is parsed as TOML, or is a plain string if it is not TOML. Paths become absolute:
    those of the file are relative to its folder, those of overrides to the working directory. With
    `run.steps = 0` the settings of the trainer are ignored. Raises ConfigError.
    """
    return _read(_read_tables(path), [_parse_override(given) for given in overrides], path, path.parent)


def make_config(tables: Mapping[str, Any]) -> Config:
    """The configuration in tables like those of a file; paths are relative to the working directory.

    Raises ConfigError.
    """
    return _read(copy.deepcopy(dict(tables)), [], "the configuration", Path())


def _read(tables: dict[str, Any], changes: Sequence[Override], name: Path | str, folder: Path) -> Config:
    _drop_policy_keys(tables, changes)
    _drop_replaced_keys(tables, changes)
    for change in changes:
        _apply_override(tables, change)
    run = tables.get("run")
    if isinstance(run, dict) and run.get("steps") == 0:
        _drop_training(tables, has_chosen_model=any(c[:2] == ("model", "path") for c in changes))
    try:
        config = parse_config(tables)
    except ValidationError as error:
        problems = [_explain(details) for details in error.errors()]
        raise ConfigError("\n".join([f"{name} with its overrides:", *problems])) from error
    base, overridden = folder.resolve(), {f"{change.section}.{change.key}" for change in changes}

    def folder_of(key: str) -> Path:
        is_overridden = key in overridden or key.rpartition(".")[0] in overridden
        return Path.cwd() if is_overridden else base

    return _resolve_paths(config, folder_of)


def parse_config(tables: Mapping[str, Any]) -> Config:
    """Validate parsed TOML. Raises ConfigError, and pydantic's ValidationError for a single wrong key."""
    config = Config.model_validate(tables)
    check(config)
    return config


def read_run_config(run: Path) -> Config:
    """The configuration in the folder of a run; paths in it need not exist any more.

    Raises DamagedRunError if the file is missing or damaged, ConfigError for keys that cannot work.
    """
    path = run / "config.toml"
    try:
        return parse_config(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DamagedRunError(
            f"{path} cannot be read: {error}; restore the file that the run wrote"
        ) from error


def dropped_settings(path: Path, overrides: Sequence[str], config: Config) -> list[str]:
    """A notice for each setting of the file that has no effect because an override changes the update
    policy.
    """
    changes, rules = [_parse_override(override) for override in overrides], config.orchestrator
    overridden = {f"{change.section}.{change.key}" for change in changes}
    return [
        f"orchestrator.{key} = {value} in {path} does not apply: an override sets update_policy = "
        f"{rules.update_policy}, for which {key} is {getattr(rules, key)}"
        for key, value in _drop_policy_keys(_read_tables(path), changes).items()
        if f"orchestrator.{key}" not in overridden and getattr(rules, key) != value
    ]


def _read_tables(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(f"config file {path} is a folder; name a .toml file in it")
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(keepends=True)
        return tomllib.loads("".join(_decode(path, number, line) for number, line in enumerate(lines, 1)))
    except FileNotFoundError as error:
        raise ConfigError(
            f"config file {path} does not exist; `dora config --defaults` prints a template"
        ) from error
    except tomllib.TOMLDecodeError as error:
        is_repeated = str(error).startswith("Cannot declare")  # a table
        remedy = "merge the two tables into one" if is_repeated else "correct that line"
        raise ConfigError(f"config file {path} is not valid TOML: {error}; {remedy}") from error


def _decode(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path}, line {number}: {not_utf8(error)}") from error


def _parse_override(override: str) -> Override:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        typed = [name.strip()]
        hint = _suggest_alias(typed) or _suggest_section(typed)
        raise ConfigError(
            f"override {override!r} must be section.key=value, for example trainer.lr=1e-4"
            + (f"; {hint}" if hint else "")
        )
    try:
        return Override(section, key, tomllib.loads(f"value = {text}")["value"])
    except tomllib.TOMLDecodeError:
        return Override(section, key, text.strip())


def _drop_policy_keys(tables: dict[str, Any], changes: Sequence[Override]) -> dict[str, Any]:
    """Remove `POLICY_KEYS` of the file if an override changes the update policy; returns what was removed."""
    table = tables.get("orchestrator")
    if not isinstance(table, dict):
        return {}
    policy = table.get("update_policy", "dora")
    changes_policy = any(
        (change.section, change.key) == ("orchestrator", "update_policy") and change.value != policy
        for change in changes
    )
    return {key: table.pop(key) for key in POLICY_KEYS if key in table} if changes_policy else {}


def _drop_replaced_keys(tables: dict[str, Any], changes: Sequence[Override]) -> None:
    """Remove keys of the file that belong to values which overrides replace: the revision of a path, the
    minimum of a decaying learning rate, the [ray] of a cluster.
    """
    values = {(change.section, change.key): change.value for change in changes}
    if values.get(("runtime", "kind")) == "local":
        tables.pop("ray", None)
    if values.get(("trainer", "lr_decay")) == "constant" and isinstance(table := tables.get("trainer"), dict):
        table.pop("min_lr_ratio", None)
    for section, key in values:
        table = tables.get(section)
        if section in LIST_SECTIONS:
            name, _, key = key.partition(".")
            table = _table_named(tables, section, name)
        if key == "path" and isinstance(table, dict):
            table.pop("revision", None)


def _drop_training(tables: dict[str, Any], *, has_chosen_model: bool) -> None:
    """Remove what only a trainer uses, so that it needs no GPU and is checked against nothing.

    Raises ConfigError if the trainer would start with a checkpoint, unless an override chooses the model.
    """
    given = tables.get("trainer")
    if isinstance(given, dict) and "continue_from" in given and not has_chosen_model:
        raise ConfigError(
            f"run.steps = 0 with trainer.continue_from = {given['continue_from']!r}: name the model to "
            "evaluate, such as this checkpoint, in model.path, and remove continue_from"
        )
    for section in TRAINING_SECTIONS:
        tables.pop(section, None)
    tables["trainer"] = {"batch_size": 1, "lr": 1.0}  # required, and of no effect
    if isinstance(rules := tables.get("orchestrator"), dict):
        rules.pop("slack", None)
        if rules.get("placement") == "colocated":
            del rules["placement"]
    if isinstance(service := tables.get("service"), dict) and service.get("trainer") == "external":
        del service["trainer"]


def _apply_override(tables: dict[str, Any], change: Override) -> None:
    section, key, value = change
    if section in LIST_SECTIONS:
        name, _, key = key.partition(".")
        table = _table_named(tables, section, name)
    else:
        table = tables.setdefault(section, {})
    key, *inner = key.split(".", 1)  # a key of a table such as engine.options
    if isinstance(table, dict):
        outer = table.get(key)
        table[key] = (outer if isinstance(outer, dict) else {}) | {inner[0]: value} if inner else value


def _table_named(tables: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    given = tables.get(section, [])
    found = [table for table in given if isinstance(table, dict)] if isinstance(given, list) else []
    for table in found:
        if table.get("name") == name:
            return table
    names = ", ".join(str(table.get("name")) for table in found) or "none"
    raise ConfigError(f"override {section}.{name}...: no [[{section}]] has this name; names: {names}")


def _explain(details: ErrorDetails) -> str:
    """The lines for one error of pydantic: key, value, rule, remedy, help."""
    where = [part for part in details["loc"] if isinstance(part, str)]  # the other parts are list indices
    name, kind = ".".join(where[:2]), details["type"]
    table, typed = f"[{where[0]}]", name
    if where[0] in LIST_SECTIONS:
        table, typed = f"[[{where[0]}]]", name.replace(where[0], f"{where[0]}.NAME", 1)
    if kind == "extra_forbidden":
        what = "section" if len(where) == 1 else "key"
        return f"  {name}: unknown {what}; {_suggest(where, [*_leaf_names(name, details['input'])])}"
    meaning = {f"{section}.{key}": field.description for section, key, field in iter_keys()}.get(name)
    if kind == "missing" and meaning is None:
        return f"  [{name}]: section missing; it needs {', '.join(_required_keys(name))}"
    if kind == "missing":
        return (
            f"  {name}: not set, and it has no default; add `{where[-1]} = ...` to {table}, or use "
            f"--set {typed}=...\n    {name}: {meaning}"
        )
    problem = f"  {name} = {details['input']!r}: {details['msg'][:1].lower()}{details['msg'][1:]}"
    if meaning is None:
        return f"{problem}; write a table {table}"
    remedy = REMEDIES_FOR_0.get(name, "") if details["input"] == 0 else ""
    return f"{problem}; change it in the file or with --set {typed}=...{remedy}\n    {name}: {meaning}"


def _leaf_names(name: str, value: object) -> Iterator[str]:
    """Dotted names of all values in an unknown key, which may be a nested table."""
    if not isinstance(value, dict):
        yield name
        return
    for key, own in value.items():
        yield from _leaf_names(f"{name}.{key}", own)


def _required_keys(section: str) -> list[str]:
    return [key for own, key, field in iter_keys() if own == section and field.is_required()]


def _suggest(where: Sequence[str], typed: Sequence[str]) -> str:
    """The remedy for an unknown section or key at `where`; `typed` are all names in it."""
    tables = (name.rpartition(".")[0] for name in typed)
    if hint := _suggest_alias([*dict.fromkeys((*typed, *tables, where[0]))]):  # a table may have any keys
        return hint
    is_section = len(where) == 1
    keys = [key for section, key, _ in iter_keys() if section == where[0]]
    valid = [name for name, _ in iter_sections()] if is_section else keys
    near = difflib.get_close_matches(where[-1], valid, n=1)
    if not (is_section and near) and (hint := _suggest_section(typed)):
        return hint
    return (f"did you mean {near[0]}? " if near else "") + f"valid: {', '.join(valid)}"


def _suggest_alias(typed: Sequence[str]) -> str:
    """The keys for renamed ones and for those of other trainers; empty if there are none."""
    aliases = [(name, alias) for name in typed if (alias := find_alias(name)) is not None]
    return "; ".join(
        f"{name} is {alias.ours} here" + (f" ({alias.note})" if alias.note else "") for name, alias in aliases
    )


def _suggest_section(typed: Sequence[str]) -> str:
    """The right section of keys in a wrong one; empty if there is none."""
    found: dict[str, list[str]] = {}
    notes: dict[str, str] = {}
    for name in typed:
        *tables, last = name.split(".")
        keys = [
            f"{section}.{key}" for section, key, _ in iter_keys() if key == last and section != "reward_task"
        ]
        is_of_evaluations = any(table.startswith(("eval", "val_")) for table in tables)
        if f"sampling.{last}" in keys and f"eval.{last}" in keys:
            keys = [f"eval.{last}" if is_of_evaluations else f"sampling.{last}"]
        elif f"sampling.{last}" in keys and is_of_evaluations:
            notes[last] = ", for training and evaluations alike"
        found[last] = keys
    hints = (
        f"{last} is {' or '.join(keys)} here{notes.get(last, '')}" for last, keys in found.items() if keys
    )
    return "; ".join(hints)


def _resolve_paths(config: Config, folder_of: Callable[[str], Path]) -> Config:
    """Make all paths absolute and check that they exist; `folder_of(key)` is what its path is relative to."""
    update: dict[str, Any] = {}
    for section, _ in iter_sections():
        given = getattr(config, section)
        if section in LIST_SECTIONS:
            update[section] = [_resolve(section, f"{section}.{t.name}", t, folder_of) for t in given]
        else:
            update[section] = _resolve(section, section, given, folder_of)
    key, teachers = "distillation.teachers", config.distillation
    folders = [_existing_path(key, folder, folder_of(key), kind="model") for folder in teachers.folders]
    update["distillation"] = teachers.model_copy(update={"teachers": teachers.servers + folders})
    return config.model_copy(update=update)


def _resolve(section: str, prefix: str, table: Section, folder_of: Callable[[str], Path]) -> Section:
    """The table with absolute paths; its keys are written after `prefix`."""
    changes: dict[str, Any] = {}
    built_in, fields = BUILT_IN.get(section, ()), type(table).model_fields
    for attribute, field in fields.items():
        name, value = field.alias or attribute, getattr(table, attribute)
        rule, key = f"{section}.{name}", f"{prefix}.{name}"
        if value is None or value in built_in:
            continue
        if rule in OBJECTS:
            changes[attribute] = _resolve_attribute(key, value, folder_of)
        elif rule in PATHS:
            revision = getattr(table, "revision", None)
            path = _existing_path(key, value, folder_of(key), built_in, PATHS[rule], revision)
            changes |= {attribute: path} | ({"revision": commit_of(path)} if "revision" in fields else {})
        elif rule in ("engine.options", "fleet.options"):
            changes[attribute] = _resolve_python(value, folder_of(f"{key}.python"))
        elif rule == "reward_task.options":
            changes[attribute] = _resolve_file(value, folder_of(f"{key}.path"))
    return table.model_copy(update=changes)


def _resolve_python(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the interpreter in `python` absolute without resolving links: a virtual environment's interpreter
    is a link.
    """
    python = options.get("python")
    if not isinstance(python, str) or os.sep not in python:
        return options
    return {**options, "python": os.path.abspath(folder / Path(python).expanduser())}


def _resolve_file(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make a file or folder in `path` absolute, if it exists."""
    path = options.get("path")
    if not isinstance(path, str) or not (found := (folder / path).resolve()).exists():
        return options
    return {**options, "path": str(found)}


def _resolve_attribute(key: str, value: str, folder_of: Callable[[str], Path]) -> str:
    """A name for `dora.loading`, with the absolute path of its file."""
    file, colon, name = value.rpartition(":")
    if not (file and colon and name):
        built_in = BUILT_IN.get(key.partition(".")[0], ())
        names = f"be {' or '.join(built_in)}, or " if built_in else ""
        raise ConfigError(f"{key} = {value!r}: must {names}have the form file.py:name or module:name")
    return f"{_existing_path(key, file, folder_of(key))}:{name}" if file.endswith(".py") else value


def _existing_path(
    key: str,
    value: str,
    folder: Path,
    built_in: Sequence[str] = (),
    kind: RepoType | None = None,
    revision: str | None = None,
) -> str:
    """The absolute path; for the name of a hub repository of this kind, that of its snapshot."""
    path = (folder / Path(value).expanduser()).resolve()
    if path.exists():
        if revision not in (None, commit_of(str(path))):
            raise ConfigError(
                f"{key} = {value!r} with revision = {revision!r}: the path exists, and only a hub "
                "repository has revisions; remove it, or name the repository"
            )
        return str(path)
    if kind is not None and is_hub_name(value):
        return str(fetch(key, value, kind, revision, path))
    raise ConfigError(
        f"{key} = {value!r}: {path} does not exist"
        + ("" if Path(value).expanduser().is_absolute() else f" (this path is relative to {folder})")
        + (f"; name an existing path, or the built-in {' or '.join(built_in)}" if built_in else "")
        + missing_snapshot_hint(str(path))
    )
