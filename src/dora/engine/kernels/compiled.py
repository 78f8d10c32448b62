"""How the numba kernels are compiled: ahead of use, for one signature, in fp32 and for one thread.

Compiled code is cached beside its file, so only the first process of an installation waits for
the compiler (seconds).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
_LOG2E = np.float32(math.log2(math.e))
_LOWEST, _HIGHEST = np.float32(-87), np.float32(88)  # exp stays a normal fp32 number
_BIAS, _MANTISSA_BITS = np.int32(127), np.int32(23)
# 2 ** f for |f| <= 1/2 by its Taylor series: relative error 2e-7
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7))

Array = NDArray[Any]
Scalar = np.floating[Any]  # fp32
_Function = TypeVar("_Function", bound=Callable[..., None])


def compiled(signature: str) -> Callable[[_Function], _Function]:
    """Compile at import for one signature, or load what an earlier process compiled."""
    decorator = njit(f"void({signature})", fastmath=True, error_model="numpy", nogil=True, cache=True)
    return cast(Callable[[_Function], _Function], decorator)


@njit(inline="always")
def exp(x: Any) -> Any:
    """exp in fp32, written so that the compiler can vectorise the loop around it."""
    power = min(max(x, _LOWEST), _HIGHEST) * _LOG2E
    whole = np.float32(math.floor(power + HALF))
    f = power - whole
    fraction = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    return fraction * np.int32((np.int32(whole) + _BIAS) << _MANTISSA_BITS).view(np.float32)
