"""The plugins of the servers, imported where neither vLLM nor SGLang is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dora.engine.backends import server_plugins

PLUGINS = Path(server_plugins.__path__[0])


@contextmanager
def imported_plugin(
    monkeypatch: pytest.MonkeyPatch, name: str, stand_ins: Mapping[str, Mapping[str, Any]]
) -> Iterator[Any]:
    """A plugin that imports these members, by module, in place of those of its server."""
    for module, members in stand_ins.items():
        stand_in = ModuleType(module)
        vars(stand_in).update(members)
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.syspath_prepend(PLUGINS)
    before = {*sys.modules}
    yield importlib.import_module(name)
    for module in {*sys.modules} - before:
        if module.startswith("dora_"):
            del sys.modules[module]
