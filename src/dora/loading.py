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

    Raises `error`, with the line at which an import failed.
    """
    source, colon, attribute = name.rpartition(":")
    if not (source and colon and attribute):
        raise error(f"{key} = {name!r}: must read file.py:name or module:name")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as raised:
        raise error(f"{key} = {name!r}: {_explain(source, raised)}") from raised
    found = getattr(module, attribute, None)
    if not callable(found):
        own = [k for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        raise error(f"{key} = {name!r}: {source} has no {attribute!r}; it has {', '.join(own) or 'nothing'}")
    return found


def describe_call(name: str, raised: BaseException) -> str:
    """What a call of the user's function `name` raised, and at which line of the user's files."""
    source = name.rpartition(":")[0]
    reason = " ".join(f"{type(raised).__name__}: {raised}".split())
    own = [f for f in traceback.extract_tb(raised.__traceback__) if _is_own(f.filename, source)]
    return f"{reason} ({own[-1].filename}:{own[-1].lineno})" if own else reason


def _explain(source: str, raised: BaseException) -> str:
    """Where an import failed, why, and the remedy, in one line."""
    reason = " ".join(f"{type(raised).__name__}: {raised}".split())
    if isinstance(raised, SyntaxError) and raised.filename is not None:
        return f"{raised.filename}:{raised.lineno}: {type(raised).__name__}: {raised.msg}; correct that line"
    # The last frame of the user's file; what it calls in libraries says less.
    frames = [
        frame for frame in traceback.extract_tb(raised.__traceback__) if _is_own(frame.filename, source)
    ]
    if not frames:
        remedy = "name an existing file" if source.endswith(".py") else "install it, or correct the name"
        if Path(f"{source}.py").is_file():
            remedy = f"name the file, {source}.py, or add its folder to PYTHONPATH"
        return f"importing {source} raised {reason}; {remedy}"
    remedy = "install it, or correct that line" if isinstance(raised, ImportError) else "correct that line"
    command = f"python {source}" if source.endswith(".py") else f'python -c "import {source}"'
    return f"{frames[-1].filename}:{frames[-1].lineno}: {reason}; {remedy}; `{command}` shows the traceback"


def _is_own(filename: str, source: str) -> bool:
    """Whether a frame belongs to the file, or to a file beside it, or to the module `source`."""
    if source.endswith(".py"):
        return Path(filename).parent == Path(source).resolve().parent
    return Path(filename).with_suffix("").as_posix().endswith(source.replace(".", "/"))


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
