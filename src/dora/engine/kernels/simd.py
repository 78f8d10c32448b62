"""SIMD intrinsics for numba: vectors of 16 floats in registers, and prefetching.

Each is one or a few LLVM instructions; LLVM splits the vectors for processors with narrower ones. Arrays must
be contiguous, indices count elements from the first, and bounds are not checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

WIDTH = 16  # floats in a vector and in a cache line

_INT = ir.IntType(32)
_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
_UNDEFINED = ir.Constant(_VECTOR, ir.Undefined)
_FAST = ("fast",)  # allows a fused multiply-add


class _VectorType(types.Type):
    """The numba type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector_type: Any) -> None:
        super().__init__(manager, vector_type, _VECTOR)  # type: ignore[no-untyped-call]


_VECTOR_TYPE = _VectorType()


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any, kind: Any) -> Any:
    """A pointer to the element of the first argument, an array, at the index in the second."""
    values = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.bitcast(builder.gep(values.data, [arguments[1]]), kind.as_pointer())


def _prefetch(_: Any, array: Any, at: Any) -> Any:
    """prefetch(array, at): load the cache line of an element that is read soon.

    Hardware prefetchers stop at the end of a page.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8)
        pointer = _pointer(context, builder, signature, arguments, byte)
        function_type = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), _INT, _INT, _INT])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte.as_pointer()], function_type)
        read, into_all_caches, data = _INT(0), _INT(3), _INT(1)
        builder.call(function, [pointer, read, into_all_caches, data])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


def _load(_: Any, array: Any, at: Any) -> Any:
    """load(array, at): the vector that starts at an index."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(context, builder, signature, arguments, _VECTOR), align=4)

    return _VECTOR_TYPE(array, types.int64), generate


def _store(_: Any, array: Any, at: Any, vector: Any) -> Any:
    """store(array, at, vector): write a vector from an index on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _pointer(context, builder, signature, arguments, _VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


def _splat(_: Any, value: Any) -> Any:
    """splat(value): a vector with the float in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.insert_element(_UNDEFINED, arguments[0], _INT(0))
        return builder.shuffle_vector(first, _UNDEFINED, _lanes([0] * WIDTH))

    return _VECTOR_TYPE(types.float32), generate


def _multiply_add(_: Any, left: Any, right: Any, addend: Any) -> Any:
    """multiply_add(left, right, addend): left * right + addend, lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(builder.fmul(*arguments[:2], flags=_FAST), arguments[2], flags=_FAST)

    return _VECTOR_TYPE(left, right, addend), generate


def _store_totals(_: Any, array: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """store_totals(array, at, a, b, c, d): the sums over the lanes of four vectors, as four floats.

    All four are reduced at once, by pairwise sums of neighbouring lanes of a and b, c and d, and of the
    results.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def sum_of(x: Any, y: Any, left: list[int], right: list[int]) -> Any:
            parts = (builder.shuffle_vector(x, y, _lanes(lanes)) for lanes in (left, right))
            return builder.fadd(*parts, flags=_FAST)

        low, high = list(range(8)), list(range(8, 16))
        a, b, c, d = (sum_of(vector, _UNDEFINED, low, high) for vector in arguments[2:])
        even, odd = [0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15]
        ab, cd = sum_of(a, b, even, odd), sum_of(c, d, even, odd)
        abcd = sum_of(ab, cd, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
        four = sum_of(abcd, abcd, [0, 1, 2, 3], [4, 5, 6, 7])
        builder.store(four, _pointer(context, builder, signature, arguments, four.type), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, a, b, c, d), generate


def _lanes(numbers: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_INT, len(numbers)), numbers)


prefetch: Any = intrinsic(_prefetch)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
splat: Any = intrinsic(_splat)
multiply_add: Any = intrinsic(_multiply_add)
store_totals: Any = intrinsic(_store_totals)
