"""Any framework's tensors, read and allocated.

A type is recognised by its name the first time one of its objects comes by; from the second time
on, reading a tensor costs one dictionary look-up and a few attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError
from dlattn.runtime.framework import Dims, Framework, Look
from dlattn.runtime.frameworks import BY_NAME, Dlpack
from dlattn.runtime.protocols import TensorView

__all__ = ["TensorView", "allocate", "allocate_bytes", "order_before", "to_caller", "view"]

# Recognising types --------------------------------------------------------------------------------

_frameworks: dict[type, Framework] = {}
#: ``view`` of each framework above, bound: one attribute look-up less per tensor.
_views: dict[type, Callable[[Any], TensorView]] = {}
#: The same of ``signature``.
_signatures: dict[type, Callable[[Any], tuple[int, Any]]] = {}
#: And of ``address``.
_addresses: dict[type, Callable[[Any], int]] = {}
#: Types for which :func:`order_before` has nothing to do, as far as seen.
ORDERED_TYPES: set[type] = set()
#: Types whose frameworks want to know what was written to, and what tells them.
WATCHED_TYPES: dict[type, Callable[[Iterable[Any]], object]] = {}


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
    _signatures[kind] = known.signature
    _addresses[kind] = known.address
    if type(known).order_before is Framework.order_before:
        ORDERED_TYPES.add(kind)
    if known.note_written is not None:
        WATCHED_TYPES[kind] = known.note_written
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


def has_shape(obj: Any) -> bool:
    """Whether an object has a shape, which numbers and generators have not."""
    try:
        return hasattr(obj, "shape")
    except RuntimeError:  # a nested tensor of torch's, which has one that cannot be asked for
        return True


def matcher(like: Any) -> Callable[[Any], int]:
    """A quick test for tensors that are laid out as one seen before.

    Returns:
        A function of any object: its address if it has the type, shape, strides, dtype, device and
        writability of ``like``, else 0.
    """
    return framework(like).matcher(like)


def address(obj: Any) -> int:
    """Where a tensor lies; without elements, anywhere."""
    return (_addresses.get(type(obj)) or framework(obj).address)(obj)


def reader(like: Any) -> Callable[[Any], int]:
    """:func:`address`, for what :func:`allocator` makes and other tensors like this one."""
    return framework(like).reader or address


def signatures(objs: Iterable[Any]) -> tuple[tuple[Any, ...], list[int]]:
    """What tells tensors apart that calls treat differently, hashable, and their addresses.

    Of each: its framework, shape, strides, element type, device, writability, whether gradients
    are for it or pass through it, and whether its address is a multiple of 16 bytes; ``None`` stays
    ``None``, at address 0.

    Raises:
        InvalidVariantPackError: an object is no tensor, or one that cannot be used in place.
    """
    key: list[Any] = []
    addresses: list[int] = []
    see, place = key.append, addresses.append
    for obj in objs:
        if obj is None:
            see(None)
            place(0)
            continue
        pointer, looks = (_signatures.get(type(obj)) or framework(obj).signature)(obj)
        see(looks)
        place(pointer)
        if pointer & 15 or not pointer:
            see((pointer & 15, not pointer))
    return tuple(key), addresses


def lookalikes(objs: Sequence[Any]) -> Look | None:
    """A quick test for objects of which :func:`signatures` would say the same, if there is one.

    Args:
        objs: ``None`` for what is left out, as in every call that looks alike; and an object in
            several places is one object there, too.

    Returns:
        A function of as many objects: their addresses, or ``None`` if they look otherwise, or if it
        cannot tell.
    """
    first = {id(obj): at for at, obj in reversed([*enumerate(objs)]) if obj is not None}
    distinct = sorted(first.values())
    if not distinct:
        return None
    look = framework(objs[distinct[0]]).lookalikes([objs[at] for at in distinct])
    if look is None or len(distinct) == len(objs):
        return look
    places = [first.get(id(obj)) for obj in objs]
    missing = [at for at, place in enumerate(places) if place is None]
    again = [(at, it) for at, it in enumerate(places) if it is not None and it != at]
    pick = picker(distinct)
    # Behind the addresses of what is distinct comes that of what is not there.
    number: dict[int | None, int] = {at: n for n, at in enumerate([*distinct, None])}
    spread = picker([number[place] for place in places])

    def look_at_some(*given: Any) -> list[int] | None:
        for at in missing:
            if given[at] is not None:
                return None
        for at, other in again:
            if given[at] is not given[other]:
                return None
        addresses = look(*pick(given))
        if addresses is None:
            return None
        addresses.append(0)
        return [*spread(addresses)]

    return look_at_some


def picker(positions: Sequence[int]) -> Callable[[Any], Any]:
    """What finds these, of which there is one at least, in a sequence: several, or a part of it."""
    first, *more = positions
    return itemgetter(*positions) if more else itemgetter(slice(first, first + 1))


def lasting(like: Any) -> AbstractContextManager[object]:
    """Where tensors of this one's framework are made that later calls return as well, in whatever
    mode those are."""
    return framework(like).lasting()


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


def settle(obj: Any) -> None:
    """Waits for kernels that read tensors which are about to be dropped, if their framework, JAX,
    could give the memory to somebody else before."""
    framework(obj).settle(obj)


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


def allocator(like: Any, shape: Dims, stride: Dims, dtype: data_type) -> Callable[[], Any]:
    """What makes such tensors, again and again, without keeping ``like``; see :func:`allocate`."""
    return framework(like).allocator(like, shape, stride, dtype)


def assign(obj: Any, value: Any) -> None:
    """Sets every element to a number, or to those of a tensor of the same shape, of any framework,
    in the order of the framework's current stream."""
    is_number = isinstance(value, (int, float))
    framework(obj).assign(obj, value if is_number else array_beside(value, obj))


def array(obj: Any) -> Any:
    """The same memory, of one element or more, as what is indexed and computed with as in NumPy: of
    torch a tensor without a graph, else an array of CuPy, on whose current stream its producer is
    done with it, or of NumPy."""
    return framework(obj).array(obj)


def array_beside(obj: Any, like: Any) -> Any:
    """As :func:`array`, to compute with together with ``array(like)``: where torch and another
    framework meet, which they do in host memory alone, torch gets a copy."""
    own, other = framework(obj), framework(like)
    return own.array(obj) if type(own) is type(other) else other.adopt(own.plain(obj))


def padded(obj: Any, columns: int) -> Any:
    """A copy with so many columns, those behind the given ones 0.

    Raises:
        InvalidArgumentError: the framework is unknown.
    """
    *rows, own = view(obj).shape
    return framework(obj).pad(obj, [(0, 0)] * len(rows) + [(0, columns - own)])


def on_device(array: Any, like: Any) -> Any:
    """A NumPy array as a tensor in the framework and on the device of ``like``."""
    return framework(like).on_device(array, like)


def draw(like: Any, generator: Any, count: int) -> tuple[int, int]:
    """A seed and an offset of Philox, of which ``count`` offsets from there on are used up.

    Args:
        like: a tensor of the framework whose generator it is.
        generator: the framework's; ``None`` for its own one, of the device of ``like``.
    """
    return framework(like).draw(like, generator, count)


def allocate_bytes(like: Any, nbytes: int) -> Any:
    """An uninitialised one-dimensional uint8 buffer, placed as by :func:`allocate`."""
    return framework(like).empty(like, (nbytes,), (1,), data_type.UINT8)


def hands_over(like: Any) -> bool:
    """Whether :func:`to_caller` has anything to do for the framework of ``like``."""
    return type(framework(like)).from_buffer is not Framework.from_buffer


def to_caller(obj: Any, like: Any) -> Any:
    """Hand a tensor made by :func:`allocate` to the framework of ``like``.

    Nothing but a change of owner for JAX, where the kernel that fills the tensor must have been
    enqueued on CuPy's current stream; JAX has no strided arrays, so that strides other than
    row-major cost a copy there. The identity for all other frameworks.
    """
    return framework(like).from_buffer(obj, like)
