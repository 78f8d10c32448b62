"""Environments are loaded by the name in the configuration; errors name the missing method."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.envs.base import Environment, load_environment
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


@pytest.mark.parametrize("close", ["", "    async def close(self): ...\n"])
def test_an_environment_needs_a_plain_close_method(tmp_path: Path, close: str) -> None:
    file = tmp_path / "open.py"
    methods = "    async def reset(self, row, seed): ...\n    async def step(self, action): ...\n"
    file.write_text(f"class Open:\n{methods}{close}")
    with pytest.raises(EnvError, match="it needs a method `def close`"):
        load_environment(f"{file}:Open")


@pytest.mark.parametrize("restore", ["", "    async def restore(self, state): ...\n"])
def test_an_environment_with_snapshots_can_restore_them(tmp_path: Path, restore: str) -> None:
    file = tmp_path / "stored.py"
    methods = f"    def snapshot(self): ...\n{restore}"
    file.write_text(f"from dora.envs.base import Environment\nclass Stored(Environment):\n{methods}")
    with pytest.raises(EnvError, match="it also needs a method `def restore`"):
        load_environment(f"{file}:Stored")
