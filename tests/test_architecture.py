"""Which module may import which: every import in src/dora is checked, also those inside functions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
LEAVES = ("data", "stream", "weights")  # they share identities and errors with the others, and no more

# Which packages of dora a package may import beside its own modules, by the longest matching prefix.
# A package that is not listed here is new: give it a line.
ALLOWED: dict[str, tuple[str, ...]] = {
    "dora": ("dora.api",),
    "dora.api": (
        "dora.config",
        "dora.errors",
        "dora.metrics",
        "dora.report",
        "dora.runtime.run_dir",
        "dora.trainer.checkpoint_folders",
    ),
    "dora.errors": (),
    "dora.text": (),
    "dora.atomic_file": (),
    "dora.full_disk": ("dora.text",),
    "dora.loading": ("dora.errors",),
    "dora.openai_server": ("dora.errors",),
    "dora.auth_token": ("dora.atomic_file", "dora.errors"),
    "dora.curve": ("dora.auth_token",),
    "dora.config": ("dora.core.types", "dora.errors", "dora.trainer.advantage", "dora.trainer.recipe"),
    "dora.core": ("dora.text",),
    "dora.model": ("dora.core.types", "dora.errors", "dora.atomic_file"),
    **{f"dora.{leaf}": ("dora.core.types", "dora.errors") for leaf in LEAVES},
    "dora.weights": ("dora.core.types", "dora.errors", "dora.model"),
    "dora.stream": ("dora.core.types", "dora.errors", "dora.curve", "dora.full_disk"),
    "dora.envs": ("dora.core.types", "dora.errors", "dora.loading"),
    "dora.rewards": ("dora.core.types", "dora.errors", "dora.loading", "dora.openai_server"),
    "dora.engine": ("dora.core.types", "dora.errors", "dora.model"),
    "dora.engine.interface": (
        "dora.core.types",
        "dora.engine",
        "dora.model",
        "dora.trainer",
    ),  # protocols of both kinds of engines
    "dora.engine.backends": (
        "dora.core.types",
        "dora.data.tokenizer",  # servers have none
        "dora.engine",
        "dora.errors",
        "dora.model",
        "dora.weights",
    ),
    "dora.trainer": ("dora.core.types", "dora.errors", "dora.loading", "dora.model", "dora.openai_server"),
    "dora.journal": ("dora.core", "dora.errors", "dora.text"),
    "dora.audit": (
        "dora.core",
        "dora.errors",
        "dora.text",
        "dora.atomic_file",
        "dora.config",
        "dora.journal",
        "dora.stream.sample_db",
        "dora.trainer.checkpoint_folders",
    ),
    "dora.audit.logprob_recheck": ("dora",),  # it computes: engine, trainer and model
    "dora.audit.reward_recheck": ("dora",),
    "dora.metrics": ("dora.core", "dora.errors", "dora.text", "dora.atomic_file", "dora.journal"),
    "dora.report": (
        "dora.core",
        "dora.errors",
        "dora.text",
        "dora.atomic_file",
        "dora.audit",
        "dora.journal",
        "dora.metrics",
        "dora.stream.sample_db",
    ),
    "dora.trace": ("dora.core", "dora.errors", "dora.text", "dora.journal"),
    "dora.dashboard": (
        "dora.errors",
        "dora.auth_token",
        "dora.atomic_file",
        "dora.journal",
        "dora.metrics",
        "dora.report",
    ),
    "dora.runtime": ("dora",),
    "dora.service": (
        "dora.runtime",
        "dora.config",
        "dora.core",
        "dora.data.tool_calls",
        "dora.errors",
        "dora.text",
        "dora.auth_token",
        "dora.metrics",
        "dora.stream",
        "dora.weights",
        "dora.model",
    ),
    "dora.service.client": ("dora.errors",),
    "dora.testing": (
        "dora.core.types",
        "dora.data.tokenizer",
        "dora.engine",
        "dora.errors",
        "dora.model",
        "dora.trainer",
    ),
    "dora.sim": ("dora.core", "dora.errors", "dora.text", "dora.audit.guarantees", "dora.audit.versions"),
    "dora.planner": ("dora.core", "dora.engine", "dora.errors", "dora.text", "dora.journal", "dora.sim"),
    "dora.cli": ("dora",),
    "dora.__main__": ("dora.cli",),
}
# A package of the runtime may import `process` and these modules, which describe a run and start nothing.
SHARED_IN_RUNTIME = ("process", "run_setup", "run_dir", "sample_book")
COMPOSERS = ("dora.runtime.run", "dora.runtime.executor")
# Packages from outside that only some modules may import.
KEPT_IN: dict[str, tuple[str, ...]] = {
    "ray": ("dora.runtime.process.ray", "dora.runtime.process.ray_actor"),
    "torch": (
        "dora.model",
        "dora.engine",
        "dora.trainer",
        "dora.weights",
        "dora.rewards.classifier",
        "dora.runtime",
        "dora.audit.logprob_recheck",
        "dora.cli.tools",
        "dora.cli.dry_run",
        "dora.testing",
    ),
    "gymnasium": ("dora.envs.gymnasium",),
    "openenv": ("dora.envs.openenv",),
    "transformers": ("dora.data.chat", "dora.rewards.classifier", "dora.model.transformers_model"),
    "datasets": ("dora.data.dataset",),
    "huggingface_hub": ("dora.config.hub",),
    "math_verify": ("dora.rewards.math_verify",),
    "opentelemetry": ("dora.metrics.otel",),
    "typer": ("dora.cli",),
    "zmq": ("dora.curve", "dora.runtime.process.rpc", "dora.stream.transport"),
    "pydantic": ("dora.config", "dora.service"),
    "fastapi": ("dora.service",),
    "uvicorn": ("dora.service",),
    "prometheus_client": ("dora.service",),
    "httpx": ("dora.service.client",),
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


def inner_imports(module: str) -> set[str]:
    """Modules of the package that a module imports anywhere, also in functions and under TYPE_CHECKING."""
    return {name for name in imports(module) if name in modules() and not is_package(name)} - {module}


@cache
def imports_at_the_top(module: str) -> frozenset[str]:
    """Imports at the top of the file only: what comes when the module is imported."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    return frozenset(name for node in tree.body for name in names_of(node))


def imports_when_loaded(module: str) -> set[str]:
    """Of these, the modules of the package."""
    return {name for name in imports_at_the_top(module) if name in modules()} - {module}


def is_package(module: str) -> bool:
    return modules()[module].name == "__init__.py"


def rule_of(module: str) -> str:
    """The longest line of ALLOWED that a module falls under."""
    top = ".".join(module.split(".")[:2])
    assert top in ALLOWED, f"{module} is in a new package: say in ALLOWED what it may import"
    return max((rule for rule in ALLOWED if is_within(module, rule)), key=len)


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_its_own_package_and_what_the_plan_allows(module: str) -> None:
    rule = rule_of(module)
    own = () if rule == "dora" or rule == module else (rule,)
    inside = {name for name in imports(module) if is_within(name, "dora") and name != "dora"}
    assert not {name for name in inside if not is_within(name, *own, *ALLOWED[rule])}


def test_the_core_imports_only_the_pure_part_of_the_standard_library() -> None:
    for module in modules():
        if is_within(module, "dora.core"):
            outside = {name.partition(".")[0] for name in imports(module)} - {"dora"}
            assert outside <= sys.stdlib_module_names - NOT_IN_CORE, module


def test_heavy_packages_stay_where_they_belong() -> None:
    for module in modules():
        for package, owners in KEPT_IN.items():
            if any(is_within(name, package) for name in imports(module)):
                assert is_within(module, *owners), f"{module} imports {package}"


def test_no_imports_form_a_cycle() -> None:
    TopologicalSorter({module: inner_imports(module) for module in modules()}).prepare()


def test_packages_of_the_runtime_do_not_import_one_another() -> None:
    wrong = []
    for module in modules():
        parts = module.split(".")
        if parts[:2] == ["dora", "runtime"] and len(parts) == 4:
            shared = SHARED_IN_RUNTIME if parts[2] != "process" else ()
            allowed = tuple(f"dora.runtime.{name}" for name in (parts[2], *shared))
            used = {name for name in imports(module) if is_within(name, "dora.runtime")}
            wrong += [(module, name) for name in sorted(used) if not is_within(name, *allowed)]
    assert wrong == []


def test_only_the_run_and_its_executor_compose() -> None:
    importers = {m for m in modules() if any(name in COMPOSERS for name in imports(m))}
    inside = {module for module in importers if is_within(module, "dora.runtime", "dora.service")}
    assert inside <= {*COMPOSERS}


def loaded_with(module: str) -> set[str]:
    """All modules of the package that come when one is imported."""
    reached, todo = set(), {module}
    while todo:
        module = todo.pop()
        reached.add(module)
        todo |= imports_when_loaded(module) - reached
    return reached


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    loaded = loaded_with("dora.cli.main")
    assert {name for name in loaded if not is_within(name, "dora.cli")} <= {"dora.errors"}
    assert not [name for name in loaded if {"torch", "numpy", "pydantic"} & imports(name)]


@pytest.mark.parametrize("module", ["dora.config.load", "dora.trainer.recipe", "dora.trainer.advantage"])
def test_what_checks_a_configuration_or_rewards_loads_no_torch(module: str) -> None:
    assert not [name for name in loaded_with(module) if "torch" in imports(name)]


@pytest.mark.parametrize(
    "module",
    [
        "dora.runtime.process.ray_actor",
        "dora.runtime.process.storage_process",
        "dora.runtime.scoring.reward_worker",
    ],
)
def test_storage_and_reward_workers_load_nothing_heavy(module: str) -> None:
    """On a Ray cluster each of them is a new process, which imports its modules itself."""
    packages = {
        name: {found.partition(".")[0] for found in imports_at_the_top(name)} for name in loaded_with(module)
    }
    heavy = {"torch", "numba", "pydantic", "transformers"}
    assert not [name for name, found in packages.items() if heavy & found]
