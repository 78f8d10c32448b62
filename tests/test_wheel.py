"""The wheel has all that the commands need, the examples included: it works in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WITHOUT = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is installed from a wheel of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, folder / "sources" / name, symlinks=True, ignore=WITHOUT)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "sources")
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--no-index")
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(folder / "sources")]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("dora_rl-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def dora(site: Path, *arguments: str, cwd: Path) -> str:
    # numba would compile all kernels again, at their new place; a run in bfloat16 with one engine needs none.
    environment = {**os.environ, "PYTHONPATH": str(site), "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-P", "-m", "dora", *arguments]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_files_of_the_package_and_no_others(site: Path) -> None:
    def files(folder: Path) -> set[Path]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {path for path in found if "__pycache__" not in path.parts}

    installed = files(site / "dora")
    assert {path for path in installed if path.parts[0] != "examples"} == files(ROOT / "src" / "dora")
    assert files(site / "dora" / "examples") == files(ROOT / "examples")
    metadata = next(site.glob("*.dist-info/METADATA")).read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all(f"Provides-Extra: {name}\n" in metadata for name in extras)


@pytest.mark.timeout(200)
def test_the_demo_and_a_new_model_run_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    where = [sys.executable, "-P", "-c", "import dora; print(dora.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    assert (
        str(site) in subprocess.run(where, env=environment, capture_output=True, text=True, check=True).stdout
    )
    printed = dora(site, "examples", "demo", cwd=tmp_path)
    assert "gcd.toml" in printed
    assert printed.endswith("start with: dora train demo/gcd.toml\n")
    changes = ["eval.num_prompts=4", "trainer.batch_size=2", "engine.dtype=bfloat16", "engine.num_engines=1"]
    few = ["--steps", "2", "--out", "run", *(word for change in changes for word in ("--set", change))]
    dora(site, "train", "demo/gcd.toml", *few, cwd=tmp_path)
    dora(site, "audit", "run", cwd=tmp_path)
    printed = dora(site, "init-model", "tiny", "--tokenizer", "demo/gcd-start", cwd=tmp_path)
    assert printed.startswith("tiny: random qwen3")
