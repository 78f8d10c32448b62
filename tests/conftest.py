"""Settings of all tests: Triton's kernels, an offline hub, processes, time limits, order, repeats."""

from __future__ import annotations

import asyncio
import gc
import inspect
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():  # Triton must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that looks like one of the hub downloads nothing

# As in a run: processes that tests start are forks of one that has imported torch.
multiprocessing.set_forkserver_preload(["dora.runtime.process.preload"])

settings.register_profile("dora", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dora")

TESTS = Path(__file__).parent
LONGEST = ["test_gpu_script.py", "runs/test_ray.py", "contract/test_executor.py", "test_wheel.py"]
HAS_FAILED = pytest.StashKey[bool]()  # some test, since the last one began
WITH_PROCESSES = {TESTS / name for name in ("contract", "runs", "service")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then runs, so that no worker of pytest-xdist is alone at the end.

    A failed test of processes or connections is repeated once, and pytest names it. The up to ten processes
    of a run share two cores with other tests, and with strangers on a machine of a cloud.
    """
    items.sort(key=_position)
    for item in items:
        if WITH_PROCESSES.intersection(item.path.parents):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: the path of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="dora-") as made:
        yield Path(made)


@pytest.fixture
def benchmark_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of benchmarks/ can be imported by their names, until the end of the test."""
    folder, others = TESTS.parent / "benchmarks", {*sys.modules}
    monkeypatch.syspath_prepend(str(folder))
    yield
    for name in {*sys.modules} - others:
        if folder in Path(getattr(sys.modules[name], "__file__", None) or "").parents:
            del sys.modules[name]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine, which runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    has_failed = call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)
    item.config.stash[HAS_FAILED] = item.config.stash.get(HAS_FAILED, False) or has_failed


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Free what a failed test has left open: its traceback keeps it, and a later test would be blamed."""
    if item.config.stash.get(HAS_FAILED, False):
        item.config.stash[HAS_FAILED] = False
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def _position(item: pytest.Item) -> int:
    """Where the file of a test comes; files of one position keep their order."""
    name = item.path.relative_to(TESTS).as_posix()
    return LONGEST.index(name) if name in LONGEST else len(LONGEST) + (not name.startswith("runs/"))
