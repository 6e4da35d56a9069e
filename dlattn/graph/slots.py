"""Of each tensor of a variant pack: where it is found, and what makes it the graph's.

Every tensor costs one look-up, one view and one comparison; sentences are made only once something
differs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dlattn.dtypes import data_type, to_numpy
from dlattn.errors import InvalidVariantPackError
from dlattn.graph.lower import HostNumber, Lowered
from dlattn.graph.tensor import Device, tensor
from dlattn.plans.host import HostSequences, host_array
from dlattn.problem import TensorSpec
from dlattn.problem.layout import MOST_RAGGED_ELEMENTS, canonical_stride
from dlattn.problem.problem import SCALAR_ROLES
from dlattn.problem.score import Array
from dlattn.runtime.protocols import compact_strides
from dlattn.runtime.target import Target
from dlattn.runtime.tensors import TensorView, matcher, order_before, view

#: No memory is mapped below: numbers there are mistakes, such as a scale given as an int.
_LOWEST_ADDRESS = 4096


class Sizes(NamedTuple):
    """What one call's tensor holds, where it is ragged.

    Attributes:
        elements: from the first to the last.
        gap: what may be missing behind its last token.
    """

    elements: int
    gap: int


class Accepted(NamedTuple):
    """What the last accepted tensor looked like; one object, so that threads see all of it or none.

    Attributes:
        match: the address of a tensor that is laid out as it was, else 0.
        sizes: those of such a tensor, if it is ragged.
    """

    match: Callable[[Any], int]
    sizes: Sizes | None


class Slot:
    """One tensor of the pack: its keys, and what the last accepted tensor looked like."""

    def __init__(
        self, role: str, t: tensor, spec: TensorSpec, target: Target, is_output: bool
    ) -> None:
        self.role = role
        self.key = t
        self.uid = t.get_uid()
        self.spec = spec
        self.by_value = spec.by_value
        self.is_output = is_output
        #: What in a pack is the number itself. Of an integer by value, an int is; of all others,
        #: that is an address.
        self.numbers = _numbers(spec.dtype) if spec.by_value else ()
        self.takes_int = int in self.numbers
        self.alignment = 1 if spec.by_value else t.get_alignment()
        self.device: Device = (
            ("cpu", 0) if spec.by_value or target.kind == "cpu" else ("cuda", target.index)
        )
        self.accepted = Accepted(lambda value: 0, None)

    def admit(self, value: Any) -> tuple[int, Sizes | None]:
        """Of a tensor that agrees with the graph in all that means something, the address and, if
        it is ragged, the sizes.

        Raises:
            InvalidVariantPackError: it does not, or is no tensor.
        """
        try:
            seen = view(value)
        except InvalidVariantPackError as error:
            raise InvalidVariantPackError(f"{self.said}: {error}") from error
        complaint = self._complaint(seen)
        if complaint is not None:
            raise InvalidVariantPackError(f"{self.said}: {complaint}")
        sizes = self._sizes(seen.shape, seen.stride)
        self.accepted = Accepted(matcher(value), sizes)
        return seen.ptr, sizes

    def number(self, value: Any) -> Array:
        """A number of the pack's as what it is passed by.

        Raises:
            InvalidVariantPackError: its type does not hold it.
        """
        dtype = self.spec.dtype
        try:
            with np.errstate(over="ignore"):
                number = np.array(value, to_numpy(dtype))
            holds = math.isfinite(number) or not math.isfinite(value)
        except OverflowError:
            holds = False
        if not holds:
            raise InvalidVariantPackError(
                f"{self.said}: expected a number that {dtype} holds, got {value}."
            )
        return number

    @property
    def said(self) -> str:
        return f"{self.spec.name} (uid {self.uid})"

    def _sizes(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> Sizes | None:
        return None

    def _complaint(self, seen: TensorView) -> str | None:
        spec = self.spec
        ptr, shape, stride, dtype, device, writable = seen
        if dtype is not spec.dtype:
            return f"expected elements of {spec.dtype}, got {dtype}; cast the tensor."
        if device != self.device:
            wanted, got = said_device(self.device), said_device(device)
            return f"expected memory on {wanted}, got {got}; move the tensor."
        misfit = self._misfit(tuple(shape), tuple(stride))
        if misfit is not None:
            return misfit
        if self.is_output and not writable:
            return "it is written to, but its framework made it read-only; pass a writable tensor."
        return self._address_complaint(ptr)

    def _misfit(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> str | None:
        spec = self.spec
        if not shape and math.prod(spec.dim) == 1:
            return None  # frameworks have single elements without axes
        if self._size(shape) != self._size(spec.dim):
            return f"expected shape {spec.dim}, got {shape}; pass a tensor of that shape."
        if len(shape) == len(spec.dim) and canonical_stride(shape, stride) != spec.stride:
            return (
                f"expected strides {spec.stride} (those of sizes 1 aside), got {stride}; "
                "pass a tensor of that layout, or declare this one in a new graph."
            )
        return None

    def checked_address(self, ptr: int) -> int:
        """A raw address, of which only the alignment can be checked."""
        complaint = self._address_complaint(ptr)
        if complaint is not None:
            raise InvalidVariantPackError(f"{self.said}: {complaint}")
        return ptr

    def _address_complaint(self, ptr: int) -> str | None:
        if not _LOWEST_ADDRESS <= ptr < 2**64:
            return f"expected a tensor or an address, got {ptr}."
        if ptr % self.alignment:
            return (
                f"expected an address aligned to {self.alignment} bytes, got {ptr:#x}; copy the "
                "tensor, or call set_alignment() with what its addresses have and build again."
            )
        return None

    def _size(self, shape: tuple[int, ...]) -> Any:
        """What must be equal: the shape, or for scalars only that there is one element."""
        single = all(size == 1 for size in shape)
        is_scalar = self.role in SCALAR_ROLES or self.by_value
        return () if single and is_scalar else tuple(shape)


class RaggedSlot(Slot):
    """A ragged tensor's. Only the device knows the offsets; those in host memory are checked."""

    def _sizes(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> Sizes:
        return Sizes(0 if 0 in shape else _extent(shape, stride), stride[0])

    def check_sequences(
        self, sequences: HostSequences, offsets_name: str, sizes: Sizes | None
    ) -> None:
        """Refuses offsets in host memory that leave the tensor, sequences that do, and results that
        share rows; of an address, which has no sizes, none."""
        if sizes is None:
            return
        offsets, end = sequences.offsets(self.role), sizes.elements + sizes.gap
        least, most = offsets.min(), offsets.max()
        if least < 0 or most > end:
            raise InvalidVariantPackError(
                f"{offsets_name}: expected offsets from 0 to at most {end}, where {self.said} "
                f"ends, got {least} to {most}; count elements of that tensor."
            )
        lengths = sequences.lengths_of(self.role)
        reach = self._reach(offsets[:-1], lengths)
        if reach.max() > sizes.elements:
            entry = int(reach.argmax())
            raise InvalidVariantPackError(
                f"{offsets_name}: sequence {entry} begins at {offsets[entry]} and ends, with its "
                f"length, at {reach[entry]}, behind {self.said}, of {sizes.elements} elements; "
                "give another offset, a shorter length, or more memory."
            )
        shared = self._sharing(offsets[:-1], lengths) if self.is_output else None
        if shared is not None:
            one, other = shared
            raise InvalidVariantPackError(
                f"{offsets_name}: sequences {one} and {other} of {self.said} begin at "
                f"{offsets[one]} and {offsets[other]}, and have rows in common with their lengths "
                f"of {lengths[one]} and {lengths[other]}; results need rows of their own."
            )

    def _sharing(self, offsets: Array, lengths: Array) -> tuple[int, int] | None:
        """Two sequences, one next to the other in memory, that have rows in common."""
        _, heads, _, columns = self.spec.dim
        _, head, row, _ = self.spec.stride
        used = np.flatnonzero(lengths > 0)
        order = used[np.argsort(offsets[used], kind="stable")]
        fewest, most = 1 - lengths[order[1:]], lengths[order[:-1]] - 1
        # Of the rows of both, from every head of one to every head of the other, the nearest two.
        heads_between = np.arange(1 - heads, heads)[:, None]
        distance = np.diff(offsets[order]) - heads_between * head
        meet = np.zeros(len(fewest), bool)
        for nearest in (0, 1):
            # Of sequences of one token, no distance is known.
            tokens = np.clip(distance // max(row, 1) + nearest, fewest, most)
            meet |= (abs(distance - tokens * row) < columns).any(0)
        found = np.flatnonzero(meet)
        return (int(order[found[0]]), int(order[found[0] + 1])) if len(found) else None

    def _reach(self, offsets: Array, lengths: Array) -> Array:
        """Where each sequence ends; one without tokens does nowhere."""
        _, heads, _, columns = self.spec.dim
        _, head, row, _ = self.spec.stride
        last = offsets + (lengths - 1) * row + (heads - 1) * head + columns
        return np.where(lengths > 0, last, 0)

    def _misfit(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> str | None:
        """Of anything but (tokens, heads, columns), columns alone left out if there is one; the
        declared shape; or memory without gaps in one dimension."""
        _, heads, longest, columns = self.spec.dim
        _, head, row, _ = self.spec.stride
        # Of few tokens, the graph does not know the distance from one to the next.
        step = row if longest > 1 else None
        if len(shape) == 1:
            fits = stride == (1,) or shape == (1,)
        elif shape == self.spec.dim:
            fits = canonical_stride(shape[1:], stride[1:]) == self.spec.stride[1:]
        else:
            if len(shape) == 2 and columns == 1:
                shape, stride = (*shape, 1), (*stride, 1)
            wanted = (step, head, 1)
            fits = shape[1:] == (heads, columns) and all(
                size == 1 or want in (None, got)
                for size, want, got in zip(shape, wanted, stride, strict=True)
            )
        # Kernels count whole rows, the last one, too.
        if fits and max(_extent(shape, stride), shape[0] * stride[0]) > MOST_RAGGED_ELEMENTS:
            return (
                f"expected at most {MOST_RAGGED_ELEMENTS} elements, got shape {shape}; split the "
                "batch."
            )
        if fits:
            return None
        return (
            f"expected (tokens, heads, columns) = (any, {heads}, {columns}) with strides ({row}, "
            f"{head}, 1), got shape {shape} and strides {stride}; pass such a view of the packed "
            "memory, or an address."
        )


class TableSlot(RaggedSlot):
    """A packed page table's: memory of any shape, without gaps. What its sequences read of it,
    their plan checks."""

    def _sizes(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> Sizes:
        return Sizes(math.prod(shape), 0)

    def _reach(self, offsets: Array, lengths: Array) -> Array:
        return offsets

    def _misfit(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> str | None:
        if canonical_stride(shape, stride) == canonical_stride(shape, compact_strides(shape)):
            return None
        return f"expected entries one after the other, got shape {shape} and strides {stride}."


class TransposedSlot(Slot):
    """That of a tensor whose last two axes the graph has swapped; packs may, or may not."""

    def _misfit(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> str | None:
        if super()._misfit(shape, stride) is None:
            return None
        swapped = copy.copy(self)
        dim, stride = _swap(self.spec.dim), _swap(self.spec.stride)
        swapped.spec = replace(self.spec, dim=dim, stride=canonical_stride(dim, stride))
        return Slot._misfit(swapped, shape, stride)


def _swap(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes[:-2], sizes[-1], sizes[-2])


class NumberSlot(Slot):
    """That of a number that plans do not read, because the graph knows what it has to be."""

    def __init__(self, number: HostNumber, target: Target) -> None:
        super().__init__("", number.tensor, number.spec, target, is_output=False)
        self._number = number

    def check(self, value: Any) -> None:
        """Refuses another number than the graph was made for."""
        if not isinstance(value, self.numbers):
            is_address = type(value) is int
            address = self.checked_address(value) if is_address else self.admit(value)[0]
            if not is_address:
                order_before([value], 0)
            value = host_array(address, self.spec).item()
        if not self._number.accepts(float(value)):
            raise InvalidVariantPackError(
                f"{self.said}: expected {self._number.wanted}, got {value}; pass that."
            )


def slot_type(role: str, spec: TensorSpec, lowered: Lowered) -> type[Slot]:
    if role in lowered.transposed:
        return TransposedSlot
    return RaggedSlot if spec.ragged else TableSlot if spec.packed else Slot


def _numbers(dtype: data_type) -> tuple[type, ...]:
    """Python's and NumPy's types of numbers that a type of elements stands for."""
    if np.issubdtype(to_numpy(dtype), np.integer):
        return int, np.integer
    return (int, np.integer, np.bool_) if dtype is data_type.BOOLEAN else (float, np.floating)


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def said_device(device: Device) -> str:
    kind, index = device
    return kind if kind == "cpu" else f"{kind}:{index}"
