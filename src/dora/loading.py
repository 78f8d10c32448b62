"""Load the objects that a configuration names: "file.py:attribute" or "package.module:attribute"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from dora.errors import InputError


def load_attribute(name: str, key: str, error: type[InputError] = InputError) -> Any:
    """The function or class called `name`, which is the value of the setting `key`.

    Raises `error`, with the traceback of a module that cannot be imported.
    """
    source, colon, attribute = name.rpartition(":")
    if not (source and colon and attribute):
        raise error(f"{key} = {name!r}: must read file.py:name or module:name")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as raised:
        raise error(
            f"{key} = {name!r}: importing {source} raised {type(raised).__name__}: {raised}\n"
            f"{traceback.format_exc()}"
        ) from raised
    found = getattr(module, attribute, None)
    if not callable(found):
        own = [k for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        raise error(f"{key} = {name!r}: {source} has no {attribute!r}; it has {', '.join(own) or 'nothing'}")
    return found


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"the file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"dora_own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look the module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the file may import modules of its folder
    spec.loader.exec_module(module)
    return module
