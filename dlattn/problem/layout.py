"""What strides mean: which of them matter, whether elements share memory, how wide accesses are."""

from __future__ import annotations

from dlattn.dtypes import data_type, itemsize
from dlattn.problem.score import Bias

#: Roles whose element type is the problem's, and which kernels move in wide accesses.
IO_ROLES = ("q", "k", "v", "o", "dO", "dQ", "dK", "dV")

#: A bound beyond every sequence, small enough to add to any position in 32 bits.
FARTHEST = 2**30

#: Rows of the longest sequence, or of its pages: kernels add a bound, and what a tile is larger, to
#: positions.
LONGEST = FARTHEST - 2**10

#: Elements of the longest ragged tensor: what the copy engine can count, eight at a time, from 0 to
#: ``2**31 - 2``: where the last sequence ends is a coordinate, too.
MOST_RAGGED_ELEMENTS = 8 * (2**31 - 2)

#: Bytes of the widest access to global memory.
WIDEST_ACCESS = 16


def canonical_stride(dim: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with those that mean nothing made equal: where the size is 1, 0, or 1 if last."""
    last = len(dim) - 1
    return tuple(
        step if size > 1 else int(axis == last)
        for axis, (size, step) in enumerate(zip(dim, stride, strict=True))
    )


def overlaps(dim: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements may share an address; exact for every nested layout."""
    reach = 0
    for step, size in sorted((s, d) for d, s in zip(dim, stride, strict=True) if d > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def in_order(dim: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Sizes and strides from the innermost on, joined if one goes on where another ends: the same
    of all orders of the same elements."""
    runs: list[tuple[int, int]] = []
    for step, size in sorted((s, d) for d, s in zip(dim, stride, strict=True) if d > 1):
        if runs and step == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * size, runs[-1][1])
        else:
            runs.append((size, step))
    return tuple(runs)


def is_wide(
    dim: tuple[int, ...], stride: tuple[int, ...], dtype: data_type, alignment: int, ragged: bool
) -> bool:
    """Whether every row begins at a multiple of :data:`WIDEST_ACCESS` bytes.

    Args:
        alignment: of the tensor's address, in bytes.
        ragged: entries begin anywhere along the batch, at offsets that keep the alignment.
    """
    first = int(ragged)
    sizes, steps = dim[first:-1], stride[first:-1]
    used = [s * itemsize(dtype) for d, s in zip(sizes, steps, strict=True) if d > 1]
    return all(offset % WIDEST_ACCESS == 0 for offset in (*used, alignment))


def bias_edit(
    dim: tuple[int, ...], stride: tuple[int, ...], dtype: data_type, alignment: int, seq_q: int
) -> Bias:
    """How a bias of (B, H, S_q, S_kv), any of them 1, lies in memory.

    Args:
        alignment: of its address, in bytes.
        seq_q: queries of the call.
    """
    contiguous = dim[3] > 1 and stride[3] == 1
    is_short = itemsize(dtype) <= 2
    one_row = dim[2] < seq_q or (seq_q > 1 and stride[2] == 0)
    aligned = is_short and contiguous and is_wide(dim, stride, dtype, alignment, False)
    return Bias(dtype, contiguous, aligned, one_row=aligned and one_row)
