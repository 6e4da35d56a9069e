"""Host memory as the reference engine sees it: one array for each tensor, ragged ones padded, paged
ones gathered."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dlattn.dtypes import to_numpy
from dlattn.plans.pages import Pages, pages_of
from dlattn.problem import (
    PAGE_TABLES,
    QUERY_ROLES,
    Geometry,
    TensorSpec,
    cu_seqlens_role,
    offset_role,
)
from dlattn.problem.layout import LONGEST
from dlattn.problem.problem import DELTA_GAP
from dlattn.problem.score import Array


class HostSequences:
    """The sequences of one call.

    Attributes:
        len_q, len_kv: actual lengths, (B, 1, 1, 1), int64.
    """

    def __init__(self, geometry: Geometry, pointers: Mapping[str, int]) -> None:
        self._geometry = geometry
        self._pointers = pointers
        self.len_q = self._lengths_of("seq_len_q", "q")
        self.len_kv = self._lengths_of("seq_len_kv", "k", "v")

    @property
    def given_shift(self) -> Array:
        """Lengths of keys less those of queries, (B, 1, 1, 1), as they were given: no more than the
        longest sequence that there may be, but maybe more than there are rows."""
        geometry = self._geometry
        of_q, of_kv = (
            lengths(self._given(role), geometry.batch, LONGEST)
            if role in geometry.tensors
            else lengths(None, geometry.batch, size)
            for role, size in (("seq_len_q", geometry.seq_q), ("seq_len_kv", geometry.seq_kv))
        )
        return of_kv - of_q

    def lengths_of(self, role: str) -> Array:
        """Rows of each sequence of a tensor, (B,)."""
        return (self.len_q if role in QUERY_ROLES else self.len_kv).reshape(-1)

    def offsets(self, role: str) -> Array:
        """Where each sequence of a ragged tensor begins, and where the last one ends, in elements;
        of a packed table in entries."""
        if not self._geometry.by_tokens(role):
            return self._given(offset_role(role)).reshape(-1).astype(np.int64)
        rows = self._given(cu_seqlens_role(role)).astype(np.int64)
        if role == "delta":
            rows = rows + DELTA_GAP * np.arange(len(rows))
        return rows * self._geometry.tensors[role].stride[2]

    def _given(self, role: str) -> Array:
        return host_array(self._pointers[role], self._geometry.tensors[role])

    def _lengths_of(self, given: str, *sources: str) -> Array:
        """As given, else from the first ragged tensor's offsets, else full."""
        geometry = self._geometry
        batch, tensors = geometry.batch, geometry.tensors
        longest = geometry.seq_q if given == "seq_len_q" else geometry.seq_kv
        if (role := cu_seqlens_role(sources[0])) in tensors:
            cu_seqlens = self._given(role)
            own = (self._given(given) if given in tensors else np.diff(cu_seqlens)).reshape(-1)
            # As in the kernels: no sequence leaves the tensors.
            return lengths(
                np.minimum(own, (geometry.most_tokens(sources[0]) or 0) - cu_seqlens[:-1]),
                batch,
                longest,
            )
        for source in sources:
            if given not in tensors and geometry.is_ragged(source):
                distances = np.diff(self.offsets(source))
                row = max(1, tensors[source].stride[2])  # one token is as long as any number says
                return lengths(distances // row, batch, longest)
        return lengths(self._given(given) if given in tensors else None, batch, longest)


class HostMemory(HostSequences):
    """The tensors of one call.

    Attributes:
        arrays: role -> array in the declared shape. Of ragged tensors, and of k and v in pages,
            copies with zeros past the lengths: :meth:`write` takes results back.
    """

    def __init__(self, geometry: Geometry, pointers: Mapping[str, int]) -> None:
        super().__init__(geometry, pointers)
        self.arrays: dict[str, Array] = {}
        for role, spec in geometry.tensors.items():
            if spec.ragged:
                padded = self.arrays[role] = np.zeros(spec.dim, to_numpy(spec.dtype))
                for entry, rows in enumerate(self._entries(role)):
                    padded[entry, :, : rows.shape[1]] = rows
            elif spec.packed:
                count = max(0, int(self.offsets(role).max()))
                self.arrays[role] = host_array(
                    pointers[role], replace(spec, dim=(count,), stride=(1,))
                )
            else:
                self.arrays[role] = self._given(role)
        self._pages: dict[str, Pages] = {}
        for role in PAGE_TABLES:
            pages = pages_of(role, geometry, self.arrays, self.len_kv)
            if pages is not None:
                self._pages[f"d{role.upper()}"] = pages
                self.arrays[role] = pages.gather(self.arrays[role], geometry.seq_kv)

    def write(self, role: str, result: Array) -> None:
        """Stores a result of the declared shape; of a ragged tensor only what the lengths hold, of
        a paged one (B, H, Skv, D) in its pages."""
        if role in self._pages:
            self._pages[role].scatter(result, self.arrays[role])
            return
        if not self._geometry.is_ragged(role):
            self.arrays[role][...] = result
            return
        for entry, rows in enumerate(self._entries(role)):
            rows[...] = result[entry, :, : rows.shape[1]]

    def _entries(self, role: str) -> list[Array]:
        """Of each batch entry, the (H, length, D) elements in memory."""
        spec = self._geometry.tensors[role]
        _, heads, _, columns = spec.dim
        _, head, row, column = spec.stride
        itemsize = to_numpy(spec.dtype).itemsize
        return [
            host_array(
                self._pointers[role] + int(offset) * itemsize,
                TensorSpec(spec.name, (heads, int(size), columns), (head, row, column), spec.dtype),
            )
            for offset, size in zip(self.offsets(role), self.lengths_of(role), strict=False)
        ]


def lengths(given: Array | None, batch: int, size: int) -> Array:
    """Actual lengths (B, 1, 1, 1), int64, clamped into [0, size]; all full when not given."""
    if given is None:
        return np.full((batch, 1, 1, 1), size, np.int64)
    return np.clip(given.astype(np.int64), 0, size).reshape(batch, 1, 1, 1)


def host_array(address: int, spec: TensorSpec) -> Array:
    """Host memory as the array that a spec describes."""
    dtype = to_numpy(spec.dtype)
    if 0 in spec.dim:
        return np.empty(spec.dim, dtype)
    extent = 1 + sum((d - 1) * s for d, s in zip(spec.dim, spec.stride, strict=True))
    memory = memoryview((ctypes.c_byte * (extent * dtype.itemsize)).from_address(address))
    strides = [s * dtype.itemsize for s in spec.stride]
    return np.ndarray(spec.dim, dtype, memory, strides=strides)
