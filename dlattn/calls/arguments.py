"""A function's tensors as it was given them: named, checked, and as roles of a problem."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dlattn.dtypes import data_type, itemsize
from dlattn.errors import InvalidArgumentError, InvalidVariantPackError, cudnnGraphNotSupportedError
from dlattn.problem import PAGE_TABLES, TensorSpec
from dlattn.problem.layout import canonical_stride, overlaps
from dlattn.problem.score import SOFTCAPS, is_float32
from dlattn.runtime.gradients import wants_gradient
from dlattn.runtime.protocols import TensorView
from dlattn.runtime.tensors import framework, view

#: Where each letter of a layout is in a problem's tensors.
_AXES = {"b": 0, "h": 1, "s": 2, "d": 3}


@dataclass(frozen=True)
class Argument:
    """One tensor under the name of its argument.

    Attributes:
        position: among the tensors of the call.
        learned: gradients are for it, or pass through it.
    """

    name: str
    position: int
    framework: str
    seen: TensorView
    learned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.seen.shape)

    @property
    def stride(self) -> tuple[int, ...]:
        return tuple(self.seen.stride)

    @property
    def dtype(self) -> data_type:
        return self.seen.dtype

    def expect_shape(self, shape: Sequence[int | None], meaning: str) -> None:
        """Refuse another shape; ``None`` stands for any size.

        Args:
            meaning: the shape in words, such as ``"(batch, seqlen_q, num_heads, head_size)"``.

        Raises:
            InvalidArgumentError: the shape differs.
        """
        agrees = len(self.shape) == len(shape) and all(
            want in (None, got) for got, want in zip(self.shape, shape, strict=True)
        )
        if not agrees:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise InvalidArgumentError(
                f"{self.name}: expected shape ({wanted}), {meaning}, got {self.shape}."
            )

    def expect_type(self, *types: data_type) -> None:
        """Refuse another element type.

        Raises:
            InvalidArgumentError: it is none of ``types``.
        """
        if self.dtype not in types:
            wanted = " or ".join(dict.fromkeys(wanted.name for wanted in types))
            raise InvalidArgumentError(
                f"{self.name}: expected elements of {wanted}, got {self.dtype.name}; cast it."
            )

    def expect_rows(self) -> None:
        """Refuse a last dimension with gaps; what has none is no matter of strides.

        Raises:
            InvalidArgumentError: its stride is not 1.
        """
        if 0 not in self.shape and self.shape[-1:] not in ((), (1,)) and self.stride[-1] != 1:
            raise InvalidArgumentError(
                f"{self.name}: expected a stride of 1 for the last dimension, got strides "
                f"{self.stride}; pass a contiguous copy."
            )

    @property
    def is_contiguous(self) -> bool:
        """Whether elements follow each other in memory, the last dimension's first."""
        if 0 in self.shape:
            return True
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and stride != step:
                return False
            step *= size
        return True

    def expect_contiguous(self) -> None:
        """Refuse a tensor with gaps.

        Raises:
            InvalidArgumentError: it has.
        """
        if not self.is_contiguous:
            one = len(self.stride) == 1
            got = f"stride {self.stride[0]}" if one else f"strides {self.stride}"
            raise InvalidArgumentError(f"{self.name}: expected a contiguous tensor, got {got}.")

    def expect_output(self) -> None:
        """Refuse memory that cannot take results.

        Raises:
            InvalidArgumentError: it is read-only, it requires a gradient, which would be that of
                what it held before, or elements may share an address.
        """
        if self.learned:
            raise InvalidArgumentError(
                f"{self.name}: it is written to, but it requires a gradient; pass its detach(), "
                "or call under torch.no_grad()."
            )
        if not self.seen.writable:
            raise InvalidArgumentError(
                f"{self.name}: it is written to, but its framework made it read-only, as JAX's "
                "arrays are; pass one that can be written to, or nothing where that is allowed."
            )
        if 0 not in self.shape and overlaps(self.shape, self.stride):
            raise InvalidArgumentError(
                f"{self.name}: it is written to, but with shape {self.shape} and strides "
                f"{self.stride} elements may share an address; pass a tensor without overlap."
            )

    def vector(self) -> TensorSpec:
        """As it is: one number for each batch entry, for example."""
        return TensorSpec(self.name, self.shape, self.stride, self.dtype)


class Laid(Protocol):
    """Anything that has a name and lies in memory: an argument, or a result."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> data_type: ...


def plain_spec(it: Laid, letters: str) -> TensorSpec:
    """A tensor as a problem's (B, H, S, D).

    Args:
        letters: b, h, s and d, one for each of its dimensions; axes that it lacks have size 1.
    """
    dim, stride = [1, 1, 1, 1], [0, 0, 0, 0]
    for letter, size, step in zip(letters, it.shape, it.stride, strict=True):
        dim[_AXES[letter]], stride[_AXES[letter]] = size, step
    return TensorSpec(it.name, tuple(dim), canonical_stride(tuple(dim), tuple(stride)), it.dtype)


def packed_spec(it: Laid, letters: str, batch: int, longest: int) -> TensorSpec:
    """Packed sequences, whose cumulative lengths are the call's.

    Args:
        letters: as of :func:`plain_spec`, s for the tokens of all sequences.
    """
    plain = plain_spec(it, letters)
    (_, heads, _, columns), (_, head, _, column) = plain.dim, plain.stride
    # Which matters even where no sequence has two tokens.
    row = it.stride[letters.index("s")] if plain.dim[2] > 1 else columns
    dim, stride = (batch, heads, longest, columns), (0, head, row, column)
    return TensorSpec(it.name, dim, stride, it.dtype, ragged=True)


#: Whose words a caller uses -> what the arguments are called there that have other names here.
SAID: dict[str, dict[str, str]] = {
    "dlattn": {},
    "torch": {
        "q": "query",
        "k": "key",
        "v": "value",
        "bias": "attn_mask",
        "lengths of q": "lengths of query",
        "lengths of k and v": "lengths of key and value",
        "cu_seqlens of q": "offsets of query",
        "cu_seqlens of k and v": "offsets of key and value",
    },
    "jax": {
        "q": "query",
        "k": "key",
        "v": "value",
        "lengths of q": "query_seq_lengths",
        "lengths of k and v": "key_value_seq_lengths",
        "window": "local_window_size",
    },
}


def admit(
    needed: Iterable[str], given: Mapping[str, Any], words: str = "dlattn"
) -> dict[str, Argument]:
    """The tensors that are not ``None``, by name, in the order of the call's tensors.

    Args:
        needed: names of those that must not be ``None``.
        words: in which arguments are named to the user; see :data:`SAID`.

    Raises:
        InvalidArgumentError: one is no tensor, on another device than the first, has a negative
            stride, or on CUDA belongs to torch where others do not.
        cudnnGraphNotSupportedError: they lie on a device that dlattn does not run on.
    """
    said = SAID[words]
    for name in needed:
        if given[name] is None:
            raise InvalidArgumentError(f"{said.get(name, name)}: expected a tensor, got None.")
    arguments: dict[str, Argument] = {}
    for position, (role, value) in enumerate(given.items()):
        if value is None:
            continue
        name = said.get(role, role)
        try:
            owner, seen = framework(value).name, view(value)
            argument = Argument(name, position, owner, seen, wants_gradient(value))
        except InvalidVariantPackError as error:
            raise InvalidArgumentError(f"{name}: {error}") from error
        if any(n > 1 and step < 0 for n, step in zip(argument.shape, argument.stride, strict=True)):
            raise InvalidArgumentError(
                f"{name}: expected no negative stride, got {argument.stride}; pass a copy."
            )
        size = itemsize(argument.dtype)
        if argument.seen.ptr % size:
            raise InvalidArgumentError(
                f"{name}: expected an address aligned to its {size}-byte elements, got "
                f"{argument.seen.ptr:#x}; pass a copy."
            )
        arguments[role] = argument
    first = next(iter(arguments.values()))
    kind, index = first.seen.device
    if kind not in ("cpu", "cuda"):
        raise cudnnGraphNotSupportedError(
            f"{first.name} is on a {kind} device; dlattn runs on CUDA and on the CPU."
        )
    for argument in arguments.values():
        _check_company(first, argument)
    return arguments


def _check_company(first: Argument, other: Argument) -> None:
    if other.seen.device != first.seen.device:
        (kind, index), (wanted, wanted_index) = other.seen.device, first.seen.device
        raise InvalidArgumentError(
            f"{other.name}: expected memory on {wanted}:{wanted_index}, where {first.name} is, got "
            f"{kind}:{index}; move it."
        )
    owners = {first.framework, other.framework}
    if first.seen.device[0] == "cuda" and len(owners) > 1 and "torch" in owners:
        raise InvalidArgumentError(
            f"{first.name} is a tensor of {first.framework} and {other.name} one of "
            f"{other.framework}, which run on streams of their own; convert one by DLPack."
        )


def are_aligned(arguments: Iterable[Argument]) -> bool:
    """Whether every tensor of 16-bit elements lies at a multiple of 16 bytes."""
    return all(it.seen.ptr % 16 == 0 for it in arguments if itemsize(it.dtype) == 2)


def integer(name: str, value: Any) -> int:
    """An option that is an integer.

    Raises:
        InvalidArgumentError: it is not.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name}: expected an integer, got {value!r:.100}.") from None


def flag(name: str, value: Any) -> bool:
    """An option that is true or false; ``None`` is false, and 0 and 1 are what they are to Python.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if value is None or (isinstance(value, (int, np.bool_)) and value in (0, 1)):
        return bool(value)
    raise InvalidArgumentError(f"{name}: expected True or False, got {value!r:.100}.")


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    """An option that is one of some words.

    Raises:
        InvalidArgumentError: it is none of them.
    """
    words = list(known)
    if not isinstance(value, str) or value not in words:
        raise InvalidArgumentError(f"{name}: expected one of {words}, got {value!r:.100}.")
    return value


def number(name: str, value: Any) -> float:
    """An option that is a number, as kernels hold it in 32 bits.

    Raises:
        InvalidArgumentError: it is not.
    """
    if not isinstance(value, numbers.Real) or not is_float32(value):
        raise InvalidArgumentError(
            f"{name}: expected a finite number of float32, as a float or an int, "
            f"got {value!r:.100}."
        )
    return float(value)


def soft_cap(value: Any) -> float | None:
    """The bound of the scores; ``None`` of 0, too.

    Raises:
        InvalidArgumentError: it is no number, or one that float32 cannot divide by.
    """
    if value is None or (bound := number("softcap", value)) == 0:
        return None
    least, most = SOFTCAPS
    if not least <= bound <= most:
        raise InvalidArgumentError(
            f"softcap: expected 0 or None, for none, or {least} to {most}, got {bound}."
        )
    return bound


def same_type(arguments: Iterable[Argument], types: Sequence[data_type]) -> data_type:
    """The element type of tensors that must agree.

    Raises:
        InvalidArgumentError: they do not, or have none of ``types``.
    """
    first, *others = arguments
    first.expect_type(*types)
    for other in others:
        if other.dtype is not first.dtype:
            raise InvalidArgumentError(
                f"{other.name}: expected elements of {first.dtype.name}, as {first.name} has, got "
                f"{other.dtype.name}; cast one."
            )
    return first.dtype


def page_tables(table: Argument, batch: int) -> dict[str, TensorSpec]:
    """A table (B, pages of a sequence), of both k and v."""
    table.expect_type(data_type.INT32)
    table.expect_shape((batch, None), "(batch_size, max_num_blocks_per_seq)")
    table.expect_rows()
    return dict.fromkeys(PAGE_TABLES.values(), plain_spec(table, "bs"))


def check_page_size(container: Argument, page: int) -> None:
    """Refuse pages that plans do not take.

    Raises:
        cudnnGraphNotSupportedError: the size is no power of two.
    """
    if page < 1 or page & (page - 1):
        raise cudnnGraphNotSupportedError(
            f"{container.name} has pages of {page} rows, from shape {container.shape}; plans take "
            "pages of a power of two."
        )
