"""DORA-RL: asynchronous reinforcement learning of language models.

Several policy versions generate at once; every response is finished by the version that
began it, none is dropped or trained twice, and none is older than a bound when trained.

`dora.train` starts a run, `dora.load` opens one, and both return a `dora.Run`; see docs/python-api.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dora.api import Run as Run
    from dora.api import load as load
    from dora.api import train as train

__version__ = "0.1.0"
__all__ = ["Run", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import the Python API when it is first used: processes of a run import this package, too."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dora import api

    return getattr(api, name)


def __dir__() -> list[str]:
    """With the names that are not imported yet, for tab completion."""
    return sorted({*globals(), *__all__})
