"""Any framework's tensors, read and allocated.

A type is recognised by its name the first time one of its objects comes by; from the second time
on, reading a tensor costs one dictionary look-up and a few attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError
from dlattn.runtime.frameworks import BY_NAME, Dims, Dlpack, Framework
from dlattn.runtime.protocols import TensorView

__all__ = ["TensorView", "allocate", "allocate_bytes", "order_before", "to_caller", "view"]

# Recognising types --------------------------------------------------------------------------------

_frameworks: dict[type, Framework] = {}
#: ``view`` of each framework above, bound: one attribute look-up less per tensor.
_views: dict[type, Callable[[Any], TensorView]] = {}
#: Types for which :func:`order_before` has nothing to do, as far as seen.
ORDERED_TYPES: set[type] = set()


def _recognise(kind: type) -> Framework:
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        made = BY_NAME.get(f"{package}.{base.__qualname__}")
        if made is not None:
            break
    else:
        made = Dlpack
    known = _frameworks[kind] = made()
    _views[kind] = known.view
    if type(known).order_before is Framework.order_before:
        ORDERED_TYPES.add(kind)
    return known


def framework(obj: Any) -> Framework:
    """The framework of an object, by its type; of name ``dlpack`` for types that are unknown."""
    return _frameworks.get(type(obj)) or _recognise(type(obj))


def view(obj: Any) -> TensorView:
    """Where a tensor lies and what it is, without copying, waiting or taking ownership.

    Raises:
        InvalidVariantPackError: the object is no tensor, or one that cannot be used in place.
    """
    return (_views.get(type(obj)) or framework(obj).view)(obj)


def matcher(like: Any) -> Callable[[Any], int]:
    """A quick test for tensors that are laid out as one seen before.

    Returns:
        A function of any object: its address if it has the type, shape, strides, dtype, device and
        writability of ``like``, else 0.
    """
    return framework(like).matcher(like)


def order_before(objs: Iterable[Any], stream: int) -> None:
    """Make work that is enqueued on ``stream`` later wait for whatever produces these tensors.

    Tensors of torch and CuPy are left alone, because kernels run on their current stream. JAX
    arrays, and CUDA tensors of unknown frameworks, are ordered by an event of their producer's;
    JAX arrays on the CPU, which has no streams, are waited for.

    Args:
        objs: the inputs of a call.
        stream: CUDA stream handle; 0 is the legacy default stream.
    """
    for obj in objs:
        framework(obj).order_before(obj, stream)


# Allocating ---------------------------------------------------------------------------------------


def allocate(like: Any, shape: Dims, stride: Dims, dtype: data_type) -> Any:
    """An uninitialised tensor in the framework and on the device of ``like``.

    For JAX and for unknown frameworks, whose tensors cannot be written to or made from here, it
    is a CuPy or NumPy array; :func:`to_caller` turns it over once it is filled.

    Args:
        shape: elements per dimension.
        stride: non-negative strides in elements, dense or not, in any order.

    Raises:
        InvalidArgumentError: shape and stride do not describe a tensor.
    """
    shape, stride = tuple(shape), tuple(stride)
    if len(shape) != len(stride) or min((*shape, *stride), default=0) < 0:
        raise InvalidArgumentError(
            f"Cannot allocate a tensor of shape {shape} and strides {stride}: expected as many "
            "strides as dimensions, and no negative number"
        )
    return framework(like).empty(like, shape, stride, dtype)


def allocate_bytes(like: Any, nbytes: int) -> Any:
    """An uninitialised one-dimensional uint8 buffer, placed as by :func:`allocate`."""
    return framework(like).empty(like, (nbytes,), (1,), data_type.UINT8)


def to_caller(obj: Any, like: Any) -> Any:
    """Hand a tensor made by :func:`allocate` to the framework of ``like``.

    Nothing but a change of owner for JAX, where the kernel that fills the tensor must have been
    enqueued on CuPy's current stream; JAX has no strided arrays, so that strides other than
    row-major cost a copy there. The identity for all other frameworks.
    """
    return framework(like).from_buffer(obj, like)
