"""Environments are loaded by the name in the configuration; errors name the missing method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dora.envs.base import Environment, Step, check_step, load_environment
from dora.errors import EnvError

MODULE = "tests.envs.countdown"


def test_an_environment_is_loaded_from_a_file_and_from_a_module(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from {MODULE} import Countdown\n\ndef make():\n    return Countdown()\n")
    for name in (f"{file}:make", f"{file}:Countdown", f"{MODULE}:Countdown"):
        assert isinstance(load_environment(name)(), Environment)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("Countdown", "must read file.py:name or module:name"),
        ("nowhere.py:Countdown", "nowhere.py does not exist"),
        ("no_such_module_here:Countdown", "ModuleNotFoundError"),
        (f"{MODULE}:Countup", "has no 'Countup'; it has Countdown"),
        (f"{MODULE}:LIMITS", "has no 'LIMITS'"),
        ("pathlib:Path", "it needs a method `async def reset`"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_explained(name: str, complaint: str) -> None:
    with pytest.raises(EnvError) as refusal:
        load_environment(name)
    assert str(refusal.value).startswith(f"env.environment = {name!r}: ")
    assert complaint in str(refusal.value)


def test_options_are_keyword_arguments_of_the_class(tmp_path: Path) -> None:
    file = tmp_path / "sized.py"
    file.write_text(
        f"from {MODULE} import Countdown\n\nclass Sized(Countdown):\n"
        "    def __init__(self, size, step=1):\n        super().__init__()\n        self.size = size, step\n"
    )
    assert vars(load_environment(f"{file}:Sized", {"size": 3})())["size"] == (3, 1)
    for options, complaint in (({}, "missing a required argument: 'size'"), ({"size": 3, "stp": 2}, "'stp'")):
        with pytest.raises(
            EnvError, match=r"it has the parameters \(size, step=1\), and env.options = "
        ) as refusal:
            load_environment(f"{file}:Sized", options)
        assert complaint in str(refusal.value)
        assert str(refusal.value).endswith("; correct env.options")


def test_methods_must_be_coroutines(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text(
        "class Plain:\n    async def reset(self, row, seed): ...\n    def step(self, action): ...\n"
    )
    with pytest.raises(EnvError, match="it needs a method `async def step`"):
        load_environment(f"{file}:Plain")


def write_environment(folder: Path, *methods: str, base: str = "") -> str:
    """The name of a class in a file, with these methods."""
    file, head = folder / "own.py", "from dora.envs.base import Environment\n" if base else ""
    file.write_text(f"{head}class Own{base}:\n" + "".join(f"    {method}: ...\n" for method in methods))
    return f"{file}:Own"


RESET, STEP = "async def reset(self, row, seed)", "async def step(self, action)"


@pytest.mark.parametrize(("method", "missing"), [(RESET, "step"), (STEP, "reset")])
def test_a_method_that_is_only_inherited_from_the_base_class_is_missing(
    tmp_path: Path, method: str, missing: str
) -> None:
    name = write_environment(tmp_path, method, base="(Environment)")
    with pytest.raises(EnvError, match=f"it needs a method `async def {missing}`"):
        load_environment(name)


def test_an_environment_needs_a_method_close(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="it needs a method `def close`"):
        load_environment(write_environment(tmp_path, RESET, STEP))


def test_an_environment_with_snapshots_can_restore_them(tmp_path: Path) -> None:
    name = write_environment(tmp_path, RESET, STEP, "def snapshot(self)", base="(Environment)")
    with pytest.raises(EnvError, match="it also needs a method `def restore`"):
        load_environment(name)


@pytest.mark.parametrize("method", ["close", "snapshot", "restore"])
def test_methods_that_must_not_be_coroutines(tmp_path: Path, method: str) -> None:
    plain = [f"def {other}(self, *state)" for other in ("close", "snapshot", "restore") if other != method]
    name = write_environment(tmp_path, RESET, STEP, *plain, f"async def {method}(self, *state)")
    with pytest.raises(EnvError, match=f"`{method}` must not be async: write `def {method}`"):
        load_environment(name)


@pytest.mark.parametrize("done", [0.75, 1, None, "yes"])
def test_a_step_whose_done_is_no_bool_is_refused_with_the_order(done: object) -> None:
    with pytest.raises(TypeError, match=r"True or False; step returns \(observation, reward, done\)"):
        check_step(("x", False, done))


@pytest.mark.parametrize("done", [True, np.True_])
def test_a_step_may_have_a_done_of_numpy_and_a_bool_as_reward(done: bool) -> None:
    assert check_step(("x", True, done)) == Step("", 1.0, True)
