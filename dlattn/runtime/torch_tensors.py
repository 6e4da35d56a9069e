"""What torch's tensors are; see :mod:`dlattn.runtime.frameworks`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

from dlattn import dtypes
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError, InvalidVariantPackError
from dlattn.opaque import leave_alone
from dlattn.runtime.buffers import array_of
from dlattn.runtime.framework import CPU, CUDA, Dims, Framework, Look, new_view
from dlattn.runtime.protocols import ELEMENT_TYPES, TensorView


class Torch(Framework):
    name = "torch"

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self.note_written = _counter()
        leave_alone()
        self.reader = self._torch.Tensor.data_ptr
        #: How many dispatch modes are on: whether one of them traces, a view finds out.
        self._modes: Callable[[], int] = self._torch._C._len_torch_dispatch_stack

    def view(self, obj: Any) -> TensorView:
        self._expect_no_trace()
        try:
            pointer = obj.data_ptr()
            stride = obj.stride()
        except RuntimeError as error:  # sparse, functorch wrappers, tensors without storage
            raise InvalidVariantPackError(
                f"This {type(obj).__qualname__} has no memory of its own: {error}; pass a dense "
                "tensor, or, inside of torch.func's transforms, call dlattn.torch"
            ) from error
        if not pointer and obj.numel():
            raise InvalidVariantPackError(
                f"This {type(obj).__qualname__} on device {obj.device} has no memory (a meta or "
                "fake tensor); pass one that holds data"
            )
        if obj.is_neg():
            raise InvalidVariantPackError(
                f"This {type(obj).__qualname__} is negated only as torch reads it, and its memory "
                "holds the opposite; pass its resolve_neg()"
            )
        if obj.is_cuda:
            device = CUDA[obj.get_device()]
        elif obj.is_cpu:
            device = CPU
        else:
            device = (obj.device.type, obj.device.index or 0)
        return new_view(
            TensorView,
            (pointer, tuple(obj.shape), stride, ELEMENT_TYPES[obj.dtype], device, True),
        )

    def _expect_no_trace(self) -> None:
        by_jit, torch = self._torch.jit.is_tracing(), self._torch
        proxies = torch._C._TorchDispatchModeKey.PROXY
        if by_jit or (self._modes() and torch._C._get_dispatch_mode(proxies) is not None):
            raise InvalidVariantPackError(
                f"{'torch.jit.trace' if by_jit else 'make_fx'} records PyTorch's own operations "
                "alone, so that what it makes would not run this call; take torch.export, or "
                "make_fx, with functions of dlattn.torch"
            )

    def matcher(self, like: Any) -> Callable[[Any], int]:
        # Comparing torch's own objects takes half the time of a view.
        kind, shape, stride = type(like), like.shape, like.stride()
        dtype, device = like.dtype, like.device
        # A third of torch.jit.is_tracing's time. What looks alike while torch traces is refused by
        # a view, too: an output that is given makes nobody ask again.
        is_tracing, modes = self._torch._C._is_tracing, self._modes

        def match(obj: Any) -> int:
            try:
                if (
                    type(obj) is kind
                    and not is_tracing()
                    and not modes()
                    and obj.dtype is dtype
                    and obj.shape == shape
                    and obj.stride() == stride
                    and obj.device == device
                    and not obj.is_neg()
                ):
                    address: int = obj.data_ptr()
                    return address
            except RuntimeError:  # it has no strides, or no memory: a view says what is wrong
                pass
            return 0

        return match

    def lookalikes(self, objs: Sequence[Any]) -> Look | None:
        from dlattn.runtime.guards import lookalikes  # for functions alone, not for graphs

        return lookalikes(objs)

    def lasting(self) -> AbstractContextManager[object]:
        mode: AbstractContextManager[object] = self._torch.inference_mode(False)
        return mode

    def address(self, obj: Any) -> int:
        pointer: int = obj.data_ptr()
        return pointer

    def signature(self, obj: Any) -> tuple[int, Any]:
        # Torch's own objects take a third of the time of a view, and strides of what is contiguous
        # need not be asked for: those of sizes 1 mean nothing.
        learned = self.wants_gradient(obj)
        try:
            strides = obj.is_contiguous() or obj.stride()
            if not obj.is_neg() and not self._modes():
                return obj.data_ptr(), (obj.shape, strides, obj.dtype, obj.device, learned)
        except RuntimeError:
            pass
        pointer, looks = super().signature(obj)  # which says what is wrong
        return pointer, (looks, learned)

    def allocator(
        self, like: Any, shape: Dims, stride: Dims, dtype: data_type
    ) -> Callable[[], Any]:
        # A tensor's own method takes half the time of torch.empty_strided, which parses a device.
        alike = self.empty(like, (0,), (1,), dtype)
        shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
        own = partial(alike.new_empty_strided, shape, stride)
        quick = _quick_empty(like.device.type)
        if quick is None:
            return own
        quickly = partial(quick, shape, stride, alike.dtype)
        if like.is_cpu or self._torch.cuda.device_count() == 1:
            return quickly
        current, index = self._torch._C._cuda_getDevice, like.get_device()
        return lambda: quickly() if current() == index else own()

    def empty(self, like: Any, shape: Dims, stride: Dims, dtype: data_type) -> Any:
        self._expect_no_trace()
        # Of a tensor that is made once, an allocator's own one would be work for nothing.
        element = getattr(self._torch, dtypes.to_torch_name(dtype))
        return self._torch.empty_strided(shape, stride, dtype=element, device=like.device)

    def assign(self, obj: Any, value: Any) -> None:
        obj.detach()[...] = value

    def array(self, obj: Any) -> Any:
        return obj.detach()

    def plain(self, obj: Any) -> Any:
        return array_of(self.view(obj))

    def adopt(self, array: Any) -> Any:
        copy = array.copy()
        if copy.dtype.kind != "V":
            return self._torch.from_numpy(copy)
        # Torch reads no types of ml_dtypes.
        element = getattr(self._torch, dtypes.to_torch_name(ELEMENT_TYPES[copy.dtype]))
        return self._torch.from_numpy(copy.view(f"i{copy.itemsize}")).view(element)

    def pad(self, obj: Any, widths: list[tuple[int, int]]) -> Any:
        return self._torch.nn.functional.pad(obj.detach(), widths[-1]).contiguous()

    def on_device(self, array: Any, like: Any) -> Any:
        return self._torch.from_numpy(array).to(like.device, non_blocking=True)

    def wants_gradient(self, obj: Any) -> bool:
        return bool(obj.requires_grad and self._torch.is_grad_enabled())

    def draw(self, like: Any, generator: Any, count: int) -> tuple[int, int]:
        torch, on_cuda = self._torch, like.is_cuda
        if generator is None:
            index = like.get_device()
            generator = torch.cuda.default_generators[index] if on_cuda else torch.default_generator
        if not isinstance(generator, torch.Generator):
            raise InvalidArgumentError(
                "gen_: expected a torch.Generator, a seed, a pair of seed and offset, or None, got "
                f"{generator!r:.100}."
            )
        if generator.device.type != "cuda":
            drawn = torch.randint(2**63 - 1, (), generator=generator, device=generator.device)
            return int(drawn), 0
        offset = generator.get_offset()
        generator.set_offset(offset + count)
        return generator.initial_seed(), offset


class CausalBias(Torch):
    """Of PyTorch's own class of that name, whose tensors stand for what their memory is not."""

    def view(self, obj: Any) -> TensorView:
        raise InvalidVariantPackError(
            "A CausalBias of torch.nn.attention says where a diagonal is, and its memory is never "
            "written; give causal=True with an alignment, or pass it as attn_mask to "
            "dlattn.torch.scaled_dot_product_attention"
        )

    def signature(self, obj: Any) -> tuple[int, Any]:
        return Framework.signature(self, obj)

    def matcher(self, like: Any) -> Callable[[Any], int]:
        return Framework.matcher(self, like)


@lru_cache(maxsize=8)
def _quick_empty(device: str) -> Callable[[Dims, Dims, Any], Any] | None:
    """What code of ``torch.compile`` allocates by on the current device, if this torch has it: half
    the time of a tensor's own method, as it asks no dispatcher."""
    if device not in ("cpu", "cuda"):
        return None
    torch: Any = sys.modules["torch"]
    try:
        make: Any = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}")
        made = make((2, 3), (1, 2), torch.bfloat16)
        found = tuple(made.shape), made.stride(), made.dtype, made.device.type
    except Exception:
        return None
    return make if found == ((2, 3), (1, 2), torch.bfloat16, device) else None


def _counter() -> Callable[[Iterable[Any]], object]:
    """What tells autograd that tensors were written to: of the function for that, the part in C,
    if this torch has it, in half the time."""
    torch: Any = sys.modules["torch"]
    try:
        count: Callable[[Iterable[Any]], object] = torch._C._increment_version
        count(())
    except (AttributeError, TypeError):
        one_by_one = torch.autograd.graph.increment_version
        return lambda objs: [one_by_one(obj) for obj in objs]
    return count
