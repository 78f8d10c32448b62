"""Compare-and-swap of a word in memory that several processes map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Words = NDArray[np.int64]


def _compare_exchange(typing_context: Any, words: Any, index: Any, expected: Any, new: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type = signature.args[0]
        array = context.make_array(array_type)(context, builder, args[0])
        get_pointer: Any = cgutils.get_item_pointer
        pointer = get_pointer(context, builder, array_type, array, [args[1]])
        result = builder.cmpxchg(pointer, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(words, index, expected, new), generate


_compiled_exchange: Any = intrinsic(_compare_exchange)


def _compare_and_swap(words: Words, index: int, expected: int, new: int) -> bool:
    return bool(_compiled_exchange(words, index, expected, new))


_signature = "boolean(int64[::1], int64, int64, int64)"
compare_and_swap: Callable[[Words, int, int, int], bool] = njit(_signature, cache=True)(_compare_and_swap)
"""Set words[index] to `new` if it is `expected`, in one step; returns whether it was. A full barrier."""
