"""What each framework's tensors are: read, matched, allocated and ordered, one class a framework.

No framework is imported on its own account: by the time one of its tensors comes by, it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dlattn.dtypes import data_type
from dlattn.errors import InvalidVariantPackError
from dlattn.runtime.buffers import (
    array_of,
    cuda_ordinal,
    cupy_stream,
    empty_cupy,
    empty_numpy,
    wait_for,
)
from dlattn.runtime.framework import CPU, CUDA, Dims, Framework, new_view
from dlattn.runtime.protocols import (
    ELEMENT_TYPES,
    TensorView,
    element_strides,
    export,
    view_by_protocol,
)
from dlattn.runtime.torch_tensors import CausalBias, Torch
from dlattn.runtime.xla import jax_device, xla_strides


class _Cupy(Framework):
    name = "cupy"

    def view(self, obj: Any) -> TensorView:
        memory = obj.data
        dtype = obj.dtype
        return new_view(
            TensorView,
            (
                memory.ptr,
                obj.shape,
                element_strides(obj.strides, dtype.itemsize),
                ELEMENT_TYPES[dtype],
                CUDA[memory.device_id],
                True,
            ),
        )

    def allocator(
        self, like: Any, shape: Dims, stride: Dims, dtype: data_type
    ) -> Callable[[], Any]:
        return partial(empty_cupy, like.data.device_id, shape, stride, dtype)

    def pad(self, obj: Any, widths: list[tuple[int, int]]) -> Any:
        import cupy

        return cupy.ascontiguousarray(cupy.pad(obj, widths))


class _Numpy(Framework):
    name = "numpy"

    def view(self, obj: Any) -> TensorView:
        dtype = obj.dtype
        return new_view(
            TensorView,
            (
                obj.ctypes.data,
                obj.shape,
                element_strides(obj.strides, dtype.itemsize),
                ELEMENT_TYPES[dtype],
                CPU,
                obj.flags.writeable,
            ),
        )

    def allocator(
        self, like: Any, shape: Dims, stride: Dims, dtype: data_type
    ) -> Callable[[], Any]:
        return partial(empty_numpy, shape, stride, dtype)

    def pad(self, obj: Any, widths: list[tuple[int, int]]) -> Any:
        return np.ascontiguousarray(np.pad(obj, widths))


class _Masked(_Numpy):
    def view(self, obj: Any) -> TensorView:
        raise InvalidVariantPackError(
            "A numpy.ma.MaskedArray has a mask of its own, which dlattn does not read; pass its "
            "data, or what filled() gives"
        )


class Dlpack(Framework):
    """Any type with an exchange protocol. Its buffers are CuPy's or NumPy's."""

    name = "dlpack"

    def view(self, obj: Any) -> TensorView:
        return view_by_protocol(obj, cuda_ordinal)

    def allocator(
        self, like: Any, shape: Dims, stride: Dims, dtype: data_type
    ) -> Callable[[], Any]:
        kind, index = self.view(like).device
        if kind == "cuda":
            return partial(empty_cupy, index, shape, stride, dtype)
        return partial(empty_numpy, shape, stride, dtype)

    def assign(self, obj: Any, value: Any) -> None:
        seen = self.view(obj)
        if 0 not in seen.shape:
            array_of(seen)[...] = value

    def array(self, obj: Any) -> Any:
        seen = self.view(obj)
        self.order_before(obj, cupy_stream(seen.device))
        return array_of(seen)

    def order_before(self, obj: Any, stream: int) -> None:
        if self.view(obj).device[0] != "cuda":
            return
        if hasattr(type(obj), "__dlpack__"):
            export(obj, stream or 1)  # the producer makes the stream wait; 0 is spelled 1
        elif (producer := obj.__cuda_array_interface__.get("stream")) is not None:
            wait_for(producer, stream)


class _JaxBuffer(Dlpack):
    """What ``buffer_callback`` hands out: XLA has ordered it before ``ctx.stream`` already."""

    def order_before(self, obj: Any, stream: int) -> None:
        return


class _Jax(Dlpack):
    name = "jax"

    def view(self, obj: Any) -> TensorView:
        try:
            pointer = obj.unsafe_buffer_pointer()
            layout = obj._pjrt_layout
        except AttributeError:  # another jaxlib: the protocol says the same, in 10 us
            return super().view(obj)._replace(writable=False)
        except (RuntimeError, ValueError) as error:  # sharded over devices, deleted or donated
            raise InvalidVariantPackError(
                f"This JAX array has no single buffer: {error}"
            ) from error
        shape = obj.shape
        return new_view(
            TensorView,
            (
                pointer,
                shape,
                xla_strides(layout, shape),
                ELEMENT_TYPES[obj.dtype],
                jax_device(obj.sharding),
                False,
            ),
        )

    def order_before(self, obj: Any, stream: int) -> None:
        if jax_device(obj.sharding)[0] == "cuda":
            obj.__dlpack__(stream=stream or 1)
        else:
            obj.block_until_ready()

    def pad(self, obj: Any, widths: list[tuple[int, int]]) -> Any:
        import jax

        return jax.numpy.pad(obj, widths)

    def settle(self, obj: Any) -> None:
        if jax_device(obj.sharding)[0] == "cuda":
            import cupy

            cupy.cuda.get_current_stream().synchronize()

    def from_buffer(self, obj: Any, like: Any) -> Any:
        import jax

        if isinstance(obj, np.ndarray):
            # NumPy exports no ml_dtypes through DLPack; on the CPU, JAX reads NumPy directly.
            return jax.device_put(obj, next(iter(like.devices())))
        import cupy

        obj = cupy.ascontiguousarray(obj)
        if obj.dtype.itemsize > 1 or obj.dtype.kind in "iub":
            return jax.dlpack.from_dlpack(obj)
        # CuPy exports no fp8.
        as_bytes = jax.dlpack.from_dlpack(obj.view(np.uint8))
        return jax.lax.bitcast_convert_type(as_bytes, obj.dtype)


class _JaxTracer(Dlpack):
    def view(self, obj: Any) -> TensorView:
        raise InvalidVariantPackError(
            f"{obj!r:.100} stands for a JAX array while JAX traces (inside jit, grad or vmap) and "
            "has no memory yet; use dlattn.jax, whose functions JAX can trace, or call outside"
        )


#: By package and class name.
BY_NAME: dict[str, type[Framework]] = {
    "torch.Tensor": Torch,
    "torch.CausalBias": CausalBias,
    "cupy.ndarray": _Cupy,
    "numpy.ndarray": _Numpy,
    "numpy.MaskedArray": _Masked,
    "jaxlib.ArrayImpl": _Jax,
    "jax.Buffer": _JaxBuffer,
    "jax.Tracer": _JaxTracer,
}
