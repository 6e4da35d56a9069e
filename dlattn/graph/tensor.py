"""A tensor of a graph: a declaration, without data."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from typing import Any

from dlattn import dtypes
from dlattn.dtypes import data_type
from dlattn.errors import InvalidGraphError
from dlattn.graph.checks import flag, integer, integers, member, text
from dlattn.graph.operators import Operators
from dlattn.graph.vocabulary import tensor_reordering
from dlattn.records import dataclass

Device = tuple[str, int]


@dataclass
class Attributes:
    """Everything a graph knows about one tensor; empty ``dim`` or ``stride`` means not set yet.

    Attributes:
        uid: the key in variant packs; ``None`` until the user or the graph assigns one.
        uid_from_user: the graph must keep this uid.
        alignment: bytes to which addresses will be aligned; 16 unless set.
        value: the number that a ``tensor_scalar`` holds.
        inferred: the fields that the graph filled in, and may fill in again.
        device: where the object seen by ``tensor_like`` lives, e.g. ``("cuda", 0)``.
    """

    name: str = ""
    dtype: data_type = data_type.NOT_SET
    dim: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    is_virtual: bool = False
    is_pass_by_value: bool = False
    uid: int | None = None
    uid_from_user: bool = False
    reordering_type: tensor_reordering = tensor_reordering.NONE
    alignment: int = 16
    ragged_offset: tensor | None = None
    vector_count: int = 1
    vector_dimension: int = -1
    value: float | int | None = None
    is_compile_time_constant: bool = False
    inferred: frozenset[str] = frozenset()
    device: Device | None = None

    def infer(self, field: str, value: Any) -> None:
        """Fill in a field that the user left unset."""
        setattr(self, field, value)
        self.inferred |= {field}

    def forget_inferred(self) -> None:
        """Unset what was filled in, so that it follows what the user has changed since."""
        for field in self.inferred:
            setattr(self, field, getattr(_UNSET, field))
        self.inferred = frozenset()

    @property
    def elements(self) -> int:
        """The number of elements (1 when ``dim`` is not set)."""
        return math.prod(self.dim)


_UNSET = Attributes()


class tensor(Operators):  # noqa: N801 - cuDNN's public spelling
    """A tensor of a graph (cuDNN frontend 1.23 ``cudnn.tensor``).

    Made by ``pygraph.tensor``, ``pygraph.tensor_like`` or an operation. Setters return the tensor,
    so that they chain, and raise :class:`InvalidGraphError` once the graph is built. Tensors
    compare and hash by identity: they are the keys of variant packs. Operators such as ``+`` raise
    a :class:`TypeError` that names the graph's method.
    """

    __slots__ = ("_frozen", "attributes")

    def __init__(self, attributes: Attributes | None = None) -> None:
        if attributes is not None and not isinstance(attributes, Attributes):
            raise TypeError(f"attributes must be Attributes or None; got {attributes!r:.100}.")
        self.attributes = Attributes() if attributes is None else attributes
        self._frozen = False

    def get_name(self) -> str:
        """The name, which may be empty."""
        return self.attributes.name

    def set_name(self, name: str) -> tensor:
        """Set the name, by which messages and ``Graph`` know the tensor.

        Raises:
            TypeError: it is no str.
        """
        return self._set(name=text("name", name))

    def get_data_type(self) -> data_type:
        """The element type; ``NOT_SET`` until it is set or inferred."""
        return self.attributes.dtype

    def set_data_type(self, data_type: Any) -> tensor:
        """Set the element type: a ``data_type``, or a torch or NumPy dtype."""
        return self._set(dtype=dtypes.from_any(data_type))

    def get_dim(self) -> list[int]:
        """The shape; empty until it is set or inferred."""
        return list(self.attributes.dim)

    def set_dim(self, dim: Iterable[int]) -> tensor:
        """Set the shape, in elements; of packed storage, with the longest length."""
        return self._set(dim=integers("dim", dim))

    def get_stride(self) -> list[int]:
        """The strides, in elements; empty until they are set or inferred."""
        return list(self.attributes.stride)

    def set_stride(self, stride: Iterable[int]) -> tensor:
        """Set the strides, in elements; those of dimensions of size 1 mean nothing."""
        return self._set(stride=integers("stride", stride))

    def get_is_virtual(self) -> bool:
        """Whether it has no memory of its own: an operation's result that is no output."""
        return self.attributes.is_virtual

    def set_is_virtual(self, is_virtual: bool) -> tensor:
        """The opposite of :meth:`set_output`."""
        return self._set(is_virtual=flag("is_virtual", is_virtual))

    def set_output(self, is_output: bool) -> tensor:
        """Make an operation's result an output of the graph, which needs memory in every pack."""
        return self.set_is_virtual(not flag("is_output", is_output))

    def get_is_pass_by_value(self) -> bool:
        """Whether the value is read from host memory."""
        return self.attributes.is_pass_by_value

    def set_is_pass_by_value(self, is_pass_by_value: bool) -> tensor:
        """Say that the value is read from host memory when the graph is executed."""
        return self._set(is_pass_by_value=flag("is_pass_by_value", is_pass_by_value))

    def get_has_compile_time_constant(self) -> bool:
        """Whether it is a ``tensor_scalar`` of ``scalar_type.COMPILE_TIME_CONST``."""
        return self.attributes.is_compile_time_constant

    def get_uid(self) -> int:
        """The key in variant packs; 0 until the user or ``build_operation_graph`` assigns one."""
        return self.attributes.uid or 0

    def set_uid(self, uid: int) -> tensor:
        """Set the key in variant packs; ``IntEnum`` members are welcome."""
        return self._set(uid=integer("uid", uid), uid_from_user=True)

    def get_reordering_type(self) -> tensor_reordering:
        """The order of elements."""
        return self.attributes.reordering_type

    def set_reordering_type(self, reordering_type: tensor_reordering) -> tensor:
        """Set the order of elements; other than ``NONE`` only that of S, ``F16x16``, is run."""
        kind = member("reordering_type", reordering_type, tensor_reordering)
        return self._set(reordering_type=kind)

    def get_alignment(self) -> int:
        """The alignment of addresses, in bytes; 16 unless set."""
        return self.attributes.alignment

    def set_alignment(self, alignment: int) -> tensor:
        """Set the alignment, in bytes, that every address given for this tensor will have.

        Raises:
            InvalidGraphError: it is no power of two.
        """
        alignment = integer("alignment", alignment)
        if alignment < 1 or alignment & (alignment - 1):
            raise InvalidGraphError(
                f"The alignment of {self._said()} must be a power of two in bytes; got {alignment}."
            )
        return self._set(alignment=alignment)

    def get_vector_count(self) -> int:
        """Elements of a vector, in cuDNN's vectorised layouts; 1 unless set."""
        return self.attributes.vector_count

    def get_vector_dimension(self) -> int:
        """The dimension along which vectors lie; -1 unless set."""
        return self.attributes.vector_dimension

    def set_vector_count_and_dimension(self, count: int, dimension: int) -> tensor:
        """Set a vectorised layout, as cuDNN has it; plans read none but a count of 1."""
        return self._set(
            vector_count=integer("count", count), vector_dimension=integer("dimension", dimension)
        )

    def set_ragged_offset(self, ragged_offset: tensor) -> tensor:
        """Declare packed, variable-length storage.

        Args:
            ragged_offset: (B + 1, 1, 1, 1), INT32 or INT64: where each batch entry begins, in
                elements of this tensor, and where the last one ends. The batch stride then means
                nothing; dim keeps the longest length.

        Raises:
            TypeError: it is no tensor of a graph.
        """
        if ragged_offset is not None and not isinstance(ragged_offset, tensor):
            raise TypeError(f"ragged_offset must be a graph tensor; got {ragged_offset!r:.100}.")
        return self._set(ragged_offset=ragged_offset)

    def __repr__(self) -> str:
        return json.dumps(described(self))

    def __copy__(self) -> tensor:
        return tensor(copy.copy(self.attributes))

    def freeze(self) -> None:
        """Refuse every later change: the graph has read the attributes."""
        self._frozen = True

    @property
    def is_frozen(self) -> bool:
        """Whether a graph that has the tensor is built."""
        return self._frozen

    def _set(self, **changes: Any) -> tensor:
        if self._frozen:
            raise InvalidGraphError(
                f"Cannot set the {next(iter(changes))} of {self._said()}: its graph is built. "
                "Set it before build_operation_graph(), or make a new graph."
            )
        for attribute, value in changes.items():
            setattr(self.attributes, attribute, value)
            self.attributes.inferred -= {attribute}
        return self

    def _said(self) -> str:
        return f"tensor {self.attributes.name!r}" if self.attributes.name else "a tensor"


#: For classes that have a method named ``tensor``.
Tensor = tensor


def described(t: tensor) -> dict[str, Any]:
    """A tensor's attributes as JSON values, under cuDNN's keys."""
    it = t.attributes
    return {
        "name": it.name,
        "data_type": it.dtype.name,
        "dim": list(it.dim),
        "stride": list(it.stride),
        "is_virtual": it.is_virtual,
        "is_pass_by_value": it.is_pass_by_value,
        "pass_by_value": it.value,
        "reordering_type": it.reordering_type.name,
        "alignment": it.alignment,
        "uid": t.get_uid(),
        "uid_assigned": it.uid is not None,
    }


def check_number(label: str, it: Attributes) -> None:
    """Check that what is passed by value is one number: kernels are given no more.

    Raises:
        InvalidGraphError: it has several elements.
    """
    if it.is_pass_by_value and it.elements != 1:
        raise InvalidGraphError(
            f"{label} has dim {it.dim} and is passed by value, as only one element can be; call "
            "set_is_pass_by_value(False) on it."
        )


def packed_strides(dim: tuple[int, ...], like: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides without gaps: row-major, or in the order of the strides ``like``.

    The last dimension always comes out innermost: every plan reads heads along it.
    """
    last = len(dim) - 1
    order = list(range(last))
    if like is not None:
        order.sort(key=lambda axis: -like[axis])
    strides = [1] * len(dim)
    step = dim[last] if dim else 1
    for axis in reversed(order):
        strides[axis] = step
        step *= dim[axis]
    return tuple(strides)
