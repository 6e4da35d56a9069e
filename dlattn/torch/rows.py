"""Memory as plans read it."""

from __future__ import annotations

from torch import Tensor

from dlattn.runtime.protocols import strides_as


def is_in_rows(x: Tensor) -> bool:
    """Whether its last dimension has no gaps."""
    return x.is_contiguous() or x.stride(-1) == 1


def in_rows(x: Tensor) -> Tensor:
    """As it is, or a copy if its last dimension has gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def is_movable(x: Tensor) -> bool:
    """Whether the copy engine can move its rows, which can neither repeat memory, as gradients of
    sums do, nor negate it, as those of imaginary parts do."""
    in_place = x.is_contiguous() or (x.stride(-1) == 1 and 0 not in x.stride())
    return in_place and not x.is_neg()


def movable(x: Tensor) -> Tensor:
    """As it is, or else a copy."""
    return x if is_movable(x) else x.resolve_neg().contiguous()


def empty_as(x: Tensor, columns: int) -> Tensor:
    """What a result of so many columns is, that has the rows of x."""
    shape = (*x.shape[:-1], columns)
    return x.new_empty_strided(shape, strides_as(shape, x.shape, x.stride()))
