"""Who may import whom: the walls of the house, held by walking every import in src/dora."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
STATIONS = ("data", "engine", "rewards", "envs", "stream", "trainer", "weights")

# What a module may import of dora, by the longest matching prefix. Every module may import its
# own package; what is not listed here is a new room: give it a line.
ALLOWED: dict[str, tuple[str, ...]] = {
    "dora": (),
    "dora.errors": (),
    "dora.loading": ("dora.errors",),
    "dora.tokens": ("dora.errors",),
    "dora.sections": ("dora.errors",),
    "dora.learning": ("dora.sections",),
    "dora.operation": ("dora.sections",),
    "dora.fleets": ("dora.config", "dora.sections"),
    "dora.serving": ("dora.config", "dora.errors", "dora.sections"),
    "dora.effects": ("dora.config", "dora.sections", "dora.serving", "dora.trainer.recipe"),
    "dora.policy": ("dora.config", "dora.sections", "dora.errors"),
    "dora.config": (
        "dora.effects",
        "dora.fleets",
        "dora.policy",
        "dora.sections",
        "dora.learning",
        "dora.operation",
        "dora.serving",
        "dora.errors",
        "dora.trainer.recipe",
    ),
    "dora.phrasebook": (),
    "dora.settings": ("dora.config", "dora.fleets", "dora.phrasebook", "dora.sections", "dora.errors"),
    "dora.core": (),
    "dora.model": ("dora.errors",),
    **{f"dora.{station}": ("dora.core.records", "dora.errors") for station in STATIONS},
    "dora.envs": ("dora.core.records", "dora.errors", "dora.loading"),
    "dora.rewards": ("dora.core.records", "dora.errors", "dora.loading"),
    "dora.stream": ("dora.core.records", "dora.errors", "dora.tokens"),
    "dora.engine": ("dora.core.records", "dora.errors", "dora.model"),
    "dora.turns": ("dora.core.records", "dora.errors", "dora.engine", "dora.model"),
    "dora.renewal": ("dora.core.records", "dora.engine", "dora.model", "dora.turns"),
    "dora.handover": ("dora.core.records", "dora.errors", "dora.engine", "dora.model", "dora.turns"),
    "dora.trainer": ("dora.core.records", "dora.errors", "dora.model"),
    "dora.weights": ("dora.core.records", "dora.errors", "dora.model"),
    "dora.backends": (
        "dora.core.records",
        "dora.engine.rows",
        "dora.engine.sequence",
        "dora.errors",
        "dora.handover",
        "dora.model",
        "dora.runtime.stations",
        "dora.weights.store",
    ),
    "dora.runtime": ("dora",),
    "dora.contract": (
        "dora.core.records",
        "dora.data.tokenizer",
        "dora.engine.sequence",
        "dora.errors",
        "dora.handover",
        "dora.model",
        "dora.runtime.stations",
        "dora.trainer",
        "dora.turns.words",
    ),
    "dora.sim": (
        "dora.core",
        "dora.errors",
        "dora.engine.sequence",
        "dora.engine.blocks",
        "dora.engine.scheduler",
    ),
    "dora.observe": ("dora.core", "dora.errors", "dora.tokens"),
    "dora.generate": (
        "dora.core.records",
        "dora.core.wording",
        "dora.data",
        "dora.engine",
        "dora.errors",
        "dora.model",
    ),
    "dora.init_model": ("dora.data", "dora.errors", "dora.model"),
    "dora.doctor": ("dora",),
    "dora.service": ("dora.runtime", "dora.config", "dora.serving", "dora.errors", "dora.tokens"),
    "dora.client": ("dora.errors",),
    "dora.cli": ("dora",),
    "dora.cli_options": (),
    "dora.cli_reading": ("dora",),
    "dora.cli_simulate": ("dora",),
    "dora.__main__": ("dora.cli",),
}
# Packages from outside that only some rooms may import.
KEPT_IN: dict[str, tuple[str, ...]] = {
    "ray": ("dora.runtime.ray",),
    "torch": (
        "dora.model",
        "dora.engine.workspace",
        "dora.engine.runner",
        "dora.engine.sampler",
        "dora.engine.device_sampler",
        "dora.engine.graphs",
        "dora.engine.exact",
        "dora.engine.seats",
        "dora.engine.kernels",
        "dora.engine.engine",
        "dora.handover.engine",
        "dora.trainer",
        "dora.weights",
        "dora.rewards.classifier",
        "dora.backends",
        "dora.runtime",
        "dora.doctor",
        "dora.contract",
    ),
    "gymnasium": ("dora.envs.gymnasium",),
    "transformers": ("dora.data.chat", "dora.rewards.classifier"),
    "datasets": ("dora.data.files",),
    "math_verify": ("dora.rewards.math_verify",),
    "typer": ("dora.cli", "dora.cli_options", "dora.cli_reading", "dora.cli_simulate"),
    "zmq": ("dora.stream.door", "dora.stream.links"),
    "pydantic": (
        "dora.config",
        "dora.sections",
        "dora.fleets",
        "dora.learning",
        "dora.operation",
        "dora.serving",
        "dora.settings",
        "dora.service",
    ),
    "fastapi": ("dora.service",),
    "uvicorn": ("dora.service",),
    "prometheus_client": ("dora.service",),
    "httpx": ("dora.client",),
}
NOT_IN_CORE = {
    "time",
    "random",
    "asyncio",
    "logging",
    "os",
    "io",
    "pathlib",
    "socket",
    "threading",
    "secrets",
}


def is_within(module: str, *rooms: str) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in sorted((SOURCE / "dora").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def names_of(node: ast.AST) -> Iterator[str]:
    """Modules one statement imports; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute"
        assert node.module is not None
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in modules() else node.module


@cache
def imports(module: str) -> frozenset[str]:
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    return frozenset(name for node in ast.walk(tree) for name in names_of(node))


def imports_when_loaded(module: str) -> set[str]:
    """Imports at the top of the file only: those inside functions cannot make a cycle."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    return {name for node in tree.body for name in names_of(node) if name in modules()} - {module}


def room_of(module: str) -> str:
    """The longest line of ALLOWED that a module falls under."""
    top = ".".join(module.split(".")[:2])
    assert top in ALLOWED, f"{module} is a new room: say in ALLOWED what it may import"
    return top


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_its_own_room_and_what_the_plan_allows(module: str) -> None:
    room = room_of(module)
    own = () if room == "dora" else (room,)
    inside = {name for name in imports(module) if is_within(name, "dora")}
    assert not {name for name in inside if not is_within(name, *own, *ALLOWED[room])}


def test_the_core_imports_only_the_pure_part_of_the_standard_library() -> None:
    for module in modules():
        if is_within(module, "dora.core"):
            outside = {name.partition(".")[0] for name in imports(module)} - {"dora"}
            assert outside <= sys.stdlib_module_names - NOT_IN_CORE, module


def test_heavy_packages_stay_in_their_rooms() -> None:
    for module in modules():
        for package, rooms in KEPT_IN.items():
            if any(is_within(name, package) for name in imports(module)):
                assert is_within(module, *rooms), f"{module} imports {package}"


def test_no_import_goes_in_a_circle() -> None:
    TopologicalSorter({module: imports_when_loaded(module) for module in modules()}).prepare()


def loaded_with(module: str) -> set[str]:
    """All modules of the package that come when one is imported."""
    reached, todo = set(), {module}
    while todo:
        module = todo.pop()
        reached.add(module)
        todo |= imports_when_loaded(module) - reached
    return reached


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    commands = {"dora.cli", "dora.cli_options", "dora.cli_reading", "dora.cli_simulate"}
    assert loaded_with("dora.cli") == {*commands, "dora.errors"}


@pytest.mark.parametrize("module", ["dora.settings", "dora.trainer.recipe", "dora.trainer.scoring"])
def test_what_judges_a_configuration_or_rewards_loads_no_torch(module: str) -> None:
    assert not [name for name in loaded_with(module) if "torch" in imports(name)]
