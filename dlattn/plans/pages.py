"""Paged keys and values on the CPU: where the rows of each sequence are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dlattn.errors import InvalidVariantPackError
from dlattn.problem import PAGE_TABLES, Geometry, offset_role
from dlattn.problem.score import Array
from dlattn.records import dataclass


@dataclass(frozen=True)
class Pages:
    """Which pages of a container hold tokens.

    Attributes:
        table: the user's name for the table, for messages.
        numbers: of each sequence, its pages, in order.
        lengths: of each sequence, in rows.
    """

    table: str
    numbers: Sequence[Array]
    lengths: Sequence[int]

    def gather(self, container: Array, seq_kv: int) -> Array:
        """Rows of (pages, H, page, D) by sequence, (B, H, seq_kv, D): 0 past the lengths."""
        _, heads, page, head_dim = container.shape
        rows = np.zeros((len(self.numbers), heads, seq_kv, head_dim), container.dtype)
        for entry, (numbers, length) in enumerate(zip(self.numbers, self.lengths, strict=True)):
            own = container[numbers].swapaxes(0, 1).reshape(heads, -1, head_dim)
            rows[entry, :, :length] = own[:, :length]
        return rows

    def scatter(self, rows: Array, container: Array) -> None:
        """Writes rows (B, H, seq_kv, D), 0 past the lengths, into whole pages.

        Raises:
            InvalidVariantPackError: sequences share a page, whose rows would be only one's.
        """
        _, heads, page, head_dim = container.shape
        used, times = np.unique(np.concatenate(self.numbers), return_counts=True)
        if (times > 1).any():
            raise InvalidVariantPackError(
                f"{self.table}: page {used[times > 1][0]} belongs to several sequences, or to one "
                "twice; pages that get gradients must not be shared."
            )
        for numbers, own, length in zip(self.numbers, rows, self.lengths, strict=True):
            whole = np.zeros((heads, len(numbers) * page, head_dim), rows.dtype)
            whole[:, :length] = own[:, :length]
            container[numbers] = whole.reshape(heads, -1, page, head_dim).swapaxes(0, 1)


def pages_of(
    role: str, geometry: Geometry, tensors: Mapping[str, Array], len_kv: Array
) -> Pages | None:
    """The pages of k or of v, ``None`` where it is not paged.

    Args:
        role: ``"k"`` or ``"v"``.
        len_kv: actual lengths, (B, 1, 1, 1).

    Raises:
        InvalidVariantPackError: within a length, the table has a page that there is not.
    """
    page, name = geometry.page_size(role), PAGE_TABLES[role]
    if page is None:
        return None
    spec, count = geometry.tensors[name], geometry.tensors[role].dim[0]
    numbers, lengths = [], [int(length) for length in len_kv.ravel()]
    for entry, length in enumerate(lengths):
        first = tensors[offset_role(name)].ravel()[entry] if spec.packed else 0
        own = np.arange(first, first - (-length // page))
        if spec.packed and own.size and not 0 <= first <= own[-1] < tensors[name].size:
            raise InvalidVariantPackError(
                f"{spec.name}: sequence {entry}, of {length} rows in pages of {page}, has entries "
                f"{first} to {own[-1]}, and offsets end the table at {tensors[name].size}; give a "
                "longer table, or a shorter length."
            )
        found = tensors[name][own] if spec.packed else tensors[name][entry, 0, own, 0]
        if ((found < 0) | (found >= count)).any():
            raise InvalidVariantPackError(
                f"{spec.name}: the pages of sequence {entry}, of {length} rows, are "
                f"{found.tolist()}; expected numbers from 0 to {count - 1}."
            )
        numbers.append(found)
    return Pages(spec.name, numbers, lengths)
