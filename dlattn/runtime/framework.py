"""What dlattn needs from a framework of tensors; :mod:`dlattn.runtime.frameworks` has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np

from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError, InvalidVariantPackError
from dlattn.runtime.protocols import ELEMENT_TYPES, TensorView, element_strides

Dims = tuple[int, ...]

#: Of some objects: their addresses, or ``None``; see :func:`dlattn.runtime.tensors.lookalikes`.
Look = Callable[..., list[int] | None]

#: What addresses are multiples of that a :data:`Look` gives.
LOOK_ALIGNMENT = 16

#: ``TensorView(...)`` without its Python-level constructor: 0.1 us less per tensor.
new_view: Callable[[type[TensorView], tuple[Any, ...]], TensorView] = tuple.__new__

CPU = ("cpu", 0)
#: By ordinal; shared, so that no tuple is made per tensor.
CUDA = tuple(("cuda", index) for index in range(64))


class Framework(ABC):
    """What dlattn needs from one framework; made when the first tensor of it is seen.

    Attributes:
        name: ``torch``, ``cupy``, ``numpy``, ``jax``, or ``dlpack`` for every other one.
        reader: a function that gives the address of all of its tensors, and of its buffers.
        note_written: is told of tensors whose memory was written to, several at once; ``None`` if
            nobody would ask.
    """

    name: ClassVar[str]
    reader: Callable[[Any], int] | None = None
    note_written: Callable[[Iterable[Any]], object] | None = None

    @abstractmethod
    def view(self, obj: Any) -> TensorView:
        """See :func:`view`."""

    def matcher(self, like: Any) -> Callable[[Any], int]:
        """See :func:`matcher`."""
        kind, wanted = type(like), self.view(like)[1:]

        def match(obj: Any) -> int:
            if type(obj) is not kind:
                return 0
            try:
                seen = self.view(obj)
            except InvalidVariantPackError:
                return 0  # it looks like nothing; who knows its name views it, and says why
            return seen[0] if seen[1:] == wanted else 0

        return match

    def lookalikes(self, objs: Sequence[Any]) -> Look | None:
        """See :func:`lookalikes`."""
        return None

    def lasting(self) -> AbstractContextManager[object]:
        """See :func:`lasting`."""
        return nullcontext()

    def address(self, obj: Any) -> int:
        """See :func:`address`."""
        return self.view(obj)[0]

    def signature(self, obj: Any) -> tuple[int, Any]:
        """See :func:`signatures`: the address, and the rest as something hashable that no other
        framework's tensor equals."""
        seen = self.view(obj)
        return seen[0], (type(self), seen[1:])

    @abstractmethod
    def allocator(
        self, like: Any, shape: Dims, stride: Dims, dtype: data_type
    ) -> Callable[[], Any]:
        """See :func:`allocator`."""

    def empty(self, like: Any, shape: Dims, stride: Dims, dtype: data_type) -> Any:
        """See :func:`allocate`."""
        return self.allocator(like, shape, stride, dtype)()

    def assign(self, obj: Any, value: Any) -> None:
        """See :func:`assign`."""
        obj[...] = value

    def array(self, obj: Any) -> Any:
        """See :func:`array`."""
        return obj

    def plain(self, obj: Any) -> Any:
        """As :meth:`array`, but always of CuPy or NumPy."""
        return self.array(obj)

    def adopt(self, array: Any) -> Any:
        """An array of CuPy or NumPy as what :meth:`array` gives; see :func:`array_beside`."""
        return array

    def pad(self, obj: Any, widths: list[tuple[int, int]]) -> Any:
        """See :func:`padded`; widths are NumPy's, and the copy is contiguous."""
        raise InvalidArgumentError(
            f"A {type(obj).__module__}.{type(obj).__qualname__} cannot be padded from here; pass "
            "one whose last dimension is a multiple of 8."
        )

    def on_device(self, array: Any, like: Any) -> Any:
        """See :func:`on_device`."""
        buffer = self.empty(
            like,
            array.shape,
            element_strides(array.strides, array.itemsize),
            ELEMENT_TYPES[array.dtype],
        )
        self.assign(buffer, array) if isinstance(buffer, np.ndarray) else buffer.set(array)
        return self.from_buffer(buffer, like)

    def draw(self, like: Any, generator: Any, count: int) -> tuple[int, int]:
        """See :func:`draw`."""
        if generator is not None:
            raise InvalidArgumentError(
                f"gen_: expected a seed, a pair of seed and offset, or None, with {self.name} "
                f"tensors, got {generator!r:.100}."
            )
        import secrets  # as hardly any call draws one here

        return secrets.randbits(63), 0

    def wants_gradient(self, obj: Any) -> bool:
        """See :func:`dlattn.runtime.gradients.wants_gradient`."""
        return False

    def order_before(self, obj: Any, stream: int) -> None:
        """See :func:`order_before`; nothing for frameworks that run on the caller's stream."""
        return

    def settle(self, obj: Any) -> None:
        """See :func:`settle`; nothing for frameworks that reuse memory in the stream's order."""
        return

    def from_buffer(self, obj: Any, like: Any) -> Any:
        """See :func:`to_caller`; nothing where :meth:`empty` makes the framework's own tensors."""
        return obj
