"""A CUDA device without memory, on a machine without a GPU.

Tensors on the device are torch's fake tensors: they have a shape, a dtype and a device, and no values.
Tensors of the host are real, so that code on the host runs as ever. What is read from the device is ones.

An operation that mixes devices raises. So does an operation that makes the host wait for the device, where
that is forbidden: while a graph is captured, and inside `forbid_syncs`.
"""

from __future__ import annotations

import importlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dora.model.config import ModelConfig

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
SMALL = ModelConfig(  # with heads that Triton's kernels support
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
)
QWEN3_8B = ModelConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    model_type="qwen3",
    tie_word_embeddings=False,
)
_MATMULS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_dot_product_flash_attention}
_MATMULS |= {torch.ops.torch_attn._varlen_attn} if hasattr(torch.ops.torch_attn, "_varlen_attn") else set()
_UNKNOWN_SIZES = {aten.nonzero, aten.masked_select, aten._unique2, aten.repeat_interleave, aten.equal}


class HiddenSync(AssertionError):
    """The host waited for the device."""


class FakeCuda(TorchDispatchMode):
    """The device, while it is active; see the module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.syncs: list[str] = []  # the operations that made the host wait
        self.matmul_dtypes: set[torch.dtype] = set()  # of the operands of matrix products and attention
        self.fp64_shapes: set[tuple[int, ...]] = set()
        self.collectives: Counter[str] = Counter()
        self.num_bytes = self.peak_bytes = 0  # of tensors on the device
        self._pinned = weakref.WeakValueDictionary[int, Any]()
        self._storages: dict[int, int] = {}
        self._forbidden = 0
        self._keeps_meta = False

    @contextmanager
    def forbid_syncs(self) -> Iterator[None]:
        """Raise HiddenSync if the host waits for the device in the block."""
        self._forbidden += 1
        try:
            yield
        finally:
            self._forbidden -= 1

    @contextmanager
    def meta(self) -> Iterator[None]:
        """Leave tensors on the device "meta" there, as while FSDP shards a module.

        Else they are on this device: torch's C++ makes them, for which fake tensors are on "meta".
        """
        self._keeps_meta = True
        try:
            yield
        finally:
            self._keeps_meta = False

    def pinned(self, tensor: Tensor) -> Tensor:
        """Mark a tensor of the host as pinned."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the device."""
        with self.fakes:
            out = torch.empty(shape, dtype=dtype, device=CUDA)
        self._allocated(out)
        return out

    def sync(self, operation: str) -> None:
        """The host waits."""
        self.syncs.append(operation)
        if self._forbidden:
            raise HiddenSync(f"{operation} makes the host wait for the device")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it then handles its local part
        kwargs = dict(kwargs or {})
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # torch looks for the shape of a DTensor
        if kwargs.get("device") == torch.device("meta") and not self._keeps_meta:
            kwargs["device"] = CUDA
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        device, wants_pinned = kwargs.get("device"), kwargs.pop("pin_memory", None)
        op = func.overloadpacket
        is_on_device = any(isinstance(x, FakeTensor) and x.device.type == "cuda" for x in tensors)
        to_device = device is not None and device.type in ("cuda", "meta")
        if op is aten._pin_memory:
            return self.pinned(args[0].clone())
        if not is_on_device and not to_device and not any(isinstance(x, FakeTensor) for x in tensors):
            out = func(*args, **kwargs)
            return self.pinned(out) if wants_pinned else out
        if (moved := self._moved(op, args, kwargs)) is not None:
            return moved
        self._check(op, func, tensors, kwargs)
        with self.fakes:
            out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if is_on_device and isinstance(x, FakeTensor) and x.device.type == "meta":
                x.fake_device = CUDA  # torch 2.14 leaves results of `_fused_rms_norm` on "meta"
        if device is not None and device.type == "cpu":  # as zeros_like of a tensor on the device
            on_host = torch.zeros(out.shape, dtype=out.dtype)
            return self.pinned(on_host) if wants_pinned else on_host
        self._record(op, args, out)
        return out

    def _moved(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The result of a copy between host and device, or of reading a value."""
        if op is aten._local_scalar_dense:
            self.sync("item")
            return torch.ones((), dtype=args[0].dtype).item()
        if op is aten._to_copy and args[0].device.type == "cuda" and _type(kwargs) == "cpu":
            self.sync("a copy to the host")
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if op is aten._to_copy and args[0].device.type == "cpu" and _type(kwargs) == "cuda":
            self._copies(args[0], kwargs.get("non_blocking", False), "a copy to the device")
            return self.empty(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if op is aten.copy_ and args[0].device.type != args[1].device.type:
            host = args[0] if args[0].device.type == "cpu" else args[1]
            is_async = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            self._copies(host, is_async, "copy_ between host and device")
            if args[0].dim() and args[1].dim():
                torch.broadcast_shapes(args[0].shape, args[1].shape)
            return args[0]
        return None

    def _copies(self, host: Tensor, is_async: bool, operation: str) -> None:
        if not (is_async and self.is_pinned(host)):
            self.sync(operation)

    def _check(self, op: Any, func: Any, tensors: list[Tensor], kwargs: Any) -> None:
        if op in _UNKNOWN_SIZES and kwargs.get("output_size") is None:
            raise HiddenSync(f"{func} makes the host wait for the device")
        if op in (aten.index, aten.index_put, aten.index_put_):
            devices = {x.device.type for x in tensors if x.dim()}
            if devices != {"cuda"}:
                self.sync(f"{op} with indices of another device")
            if any(x.dtype == torch.bool for x in tensors[1:]):
                raise HiddenSync(f"{op} with a mask makes the host wait for the device")

    def _record(self, op: Any, args: Any, out: Any) -> None:
        if op in _MATMULS:
            operands = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.matmul_dtypes |= {x.dtype for x in operands if x.is_floating_point()}
        if op.__name__ and str(op).startswith(("c10d.", "_c10d")):
            self.collectives[str(op)] += 1
        for x in tree_leaves(out):
            if isinstance(x, FakeTensor) and x.device.type == "cuda":
                self._allocated(x)
                if x.dtype == torch.float64:
                    self.fp64_shapes.add(tuple(x.shape))

    def _allocated(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in self._storages:
            weakref.finalize(storage, self._resized, storage._cdata, 0)
            self._resized(storage._cdata, storage.nbytes())

    def _resized(self, key: int, num_bytes: int) -> None:
        """Of a storage that has this address."""
        self.num_bytes += num_bytes - self._storages.pop(key, 0)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        if num_bytes:
            self._storages[key] = num_bytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP frees a gathered parameter by an empty storage, and later fills it again."""
        self._resized(storage._cdata, storage.nbytes())


def _type(kwargs: Any) -> str | None:
    return kwargs["device"].type if kwargs.get("device") is not None else None


class _Calls(TorchFunctionMode):
    """What torch does in C++ before an operation is dispatched, and does with a device's own library."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args = [*map(_with_index, args)]
        kwargs = {key: _with_index(value) for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.new_tensor:
            own, values = args
            func, args, kwargs = torch.tensor, [values], {"dtype": own.dtype, "device": own.device} | kwargs
        if func in (torch.tensor, torch.as_tensor):
            device, is_pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
            made = func(*args, **kwargs)
            made = self._cuda.pinned(made) if is_pinned else made
            return made if device is None else made.to(device)
        if func is torch.Tensor.is_pinned and not isinstance(args[0], FakeTensor):
            return self._cuda.is_pinned(args[0])
        if func is torch.Tensor.to and isinstance(args[0], FakeTensor):
            args = [x for x in args if not (isinstance(x, torch.device) and x == args[0].device)]
            if len(args) == 1 and not kwargs:
                return args[0]
        return func(*args, **kwargs)


def _with_index(value: Any) -> Any:
    if isinstance(value, str) and value == "cuda":
        return CUDA
    return CUDA if isinstance(value, torch.device) and value == torch.device("cuda") else value


def _is_on(kind: str, tensor: Tensor) -> bool:
    return tensor.device.type == kind


def _submit(_: ThreadPoolExecutor, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
    """At once, because the device exists in one thread only."""
    future = Future[Any]()
    future.set_result(function(*args, **kwargs))
    return future


class Event:
    """Also of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = wait_event = wait_stream = record

    def record_event(self, *_: Any) -> Event:
        return self

    def synchronize(self) -> None:
        pass


class Graph:
    """A graph computes nothing."""

    def replay(self) -> None:
        pass


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """torch with a device, for the block."""
    importlib.import_module("torch._dynamo.config")  # before torch.Tensor is patched
    mode = FakeCuda()
    make_subclass = Tensor._make_subclass

    def make(cls: Any, elem: Tensor, requires_grad: bool = False, **kwargs: Any) -> Any:
        """Without the guards and streams of a device that torch's own C++ would ask for."""
        if issubclass(cls, FakeTensor):
            kwargs["dispatch_device"] = False
        return make_subclass(cls, elem, requires_grad, **kwargs)

    def tolist(self: FakeTensor) -> Any:
        mode.sync("tolist")
        return torch.ones(self.shape, dtype=self.dtype).tolist()

    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, num_bytes: int) -> Any:
        out = resize(self, num_bytes)
        if self.device.type == "meta":
            mode.resized(self)
        return out

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        with mode.forbid_syncs():
            yield

    patch.setattr(Tensor, "_make_subclass", staticmethod(make))
    patch.setattr(FakeTensor, "tolist", tolist)
    patch.setattr(ThreadPoolExecutor, "submit", _submit)
    patch.setattr(torch.UntypedStorage, "resize_", resize_)
    patch.setattr(torch, "_has_compatible_shallow_copy_type", lambda *_: False)  # of meta and the device
    patch.setattr(DTensor, "device", property(lambda self: self._local_tensor.device), raising=False)
    for kind in ("cpu", "cuda", "meta"):
        is_kind = partial(_is_on, kind)
        patch.setattr(FakeTensor, f"is_{kind}", property(is_kind), raising=False)
    for name, value in {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "graph_pool_handle": lambda: None,
        "current_stream": lambda device=None: Event(),
        "Event": Event,
        "Stream": Event,
        "CUDAGraph": Graph,
        "graph": graph,
        "stream": lambda stream: nullcontext(),
    }.items():
        patch.setattr(torch.cuda, name, value)
    with ExitStack() as stack:
        stack.enter_context(_Calls(mode))
        stack.enter_context(mode)
        yield mode
