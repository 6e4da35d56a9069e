"""Writing new tokens into a cache of keys and values: ``cuda_src/kernels/append.cuh``."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from dlattn.dtypes import data_type, to_cpp
from dlattn.errors import InvalidArgumentError, InvalidVariantPackError
from dlattn.plans.argument import LengthRef, TensorRef
from dlattn.plans.direct import DirectPlan, direct_source, has_wide_rows, lanes_of, unit_size
from dlattn.plans.kernels import MOST_BLOCKS_YZ, KernelLaunch
from dlattn.problem import TensorSpec
from dlattn.problem.score import Array
from dlattn.records import dataclass
from dlattn.runtime.target import Target

THREADS = 256

#: Roles that are (batch or page, head, row, column) tensors, and those that are lengths.
ROW_ROLES = ("k_new", "v_new", "q", "k_cache", "v_cache", "q_rotated")
LENGTH_ROLES = ("cache_seqlens", "leftpad")
#: Roles of plain addresses, in the order of their structs.
ENTRY_ROLES = ("seq_len_kv", "table", "k_offsets", "v_offsets")


@dataclass(frozen=True)
class Cache:
    """How sequences lie in containers of keys and values (``CacheRef`` in the kernel).

    A cache that is not paged is one whose pages are whole sequences.

    Attributes:
        page_rows: rows of a page, any number.
        pages: of the container.
        pages_per_sequence: most pages of a sequence.
        split: of how many smaller pages the plan that follows makes each.
        page_step: how many of these lie between the starts of two neighbouring pages.
    """

    page_rows: int
    pages: int
    pages_per_sequence: int
    split: int = 1
    page_step: int = 1

    @property
    def capacity(self) -> int:
        """Rows that a sequence has room for."""
        return self.page_rows * self.pages_per_sequence


@dataclass(frozen=True)
class Rotation:
    """How queries and new keys are turned (rotary position embedding, arXiv 2104.09864).

    Attributes:
        interleaved: pairs are neighbouring columns (GPT-J), else columns of two halves (NeoX).
        queries_move: query i is at position ``cached + i``; else all are at ``cached``.
    """

    interleaved: bool
    queries_move: bool


class CacheRef(ctypes.Structure):
    """Which page of a container each page of a sequence is."""

    _fields_ = [
        ("table", ctypes.c_uint64),
        ("batch", ctypes.c_int64),
        ("page", ctypes.c_int64),
        ("page_rows", ctypes.c_int32),
        ("pages", ctypes.c_int32),
        ("pages_per_sequence", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class AppendParams(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = [
        *((role, TensorRef) for role in ROW_ROLES),
        ("pages", CacheRef),
        *((role, LengthRef) for role in LENGTH_ROLES),
        ("cos", ctypes.c_uint64),
        ("sin", ctypes.c_uint64),
        *((role, ctypes.c_uint64) for role in ENTRY_ROLES),
        ("split", ctypes.c_int32),
        ("page_step", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("cached_tokens", ctypes.c_int32),
        ("new_tokens", ctypes.c_int32),
        ("seq_q", ctypes.c_int32),
        ("heads_k", ctypes.c_int32),
        ("heads_v", ctypes.c_int32),
        ("heads_q", ctypes.c_int32),
        ("head_dim_qk", ctypes.c_int32),
        ("head_dim_v", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("angles", ctypes.c_int32),
        ("queries_move", ctypes.c_int32),
    ]


class Append(DirectPlan):
    """New tokens into a cache, and what attention over the cache then needs to know.

    Its tensors, of which all but the containers may be absent:
        k_cache, v_cache: (pages, Hk, page_rows, Dqk) and (pages, Hv, page_rows, Dv).
        k_new, v_new: (B, Hk, new, Dqk) and (B, Hv, new, Dv), written behind the cached tokens.
        q, q_rotated: (B, Hq, Sq, Dqk), what is turned, and where it goes.
        cos, sin: (angles, rotary_dim / 2), contiguous.
        pages: (B, pages_per_sequence), int32, a page for each page of a sequence; without it,
            sequence b is page b.
        cache_seqlens, leftpad: (B), int32 or int64: rows before the new tokens, and rows without
            tokens before all others.
        seq_len_kv: (B), int32, written: rows with tokens afterwards.
        table: (B, pages_per_sequence * split), int32, written: ``pages``, of smaller pages.
        k_offsets, v_offsets: (B + 1), int64, written: where the first token of each sequence is.

        cached_tokens: int32, by value: in the place of ``cache_seqlens``, the same of all.

    Without ``cache_seqlens`` and ``cached_tokens``, and without new tokens, all rows are cached.
    """

    name = "append"

    def __init__(
        self,
        tensors: Mapping[str, TensorSpec],
        target: Target,
        wide: bool,
        *,
        batch: int,
        cache: Cache,
        rotation: Rotation | None = None,
    ) -> None:
        self.batch = batch
        self.cache = cache
        self.rotation = rotation
        super().__init__(tensors, target, wide)

    def refusal(self) -> str | None:
        """Why no kernel can do this, or ``None``."""
        target, cache = self.target, self.cache
        if target.kind == "cuda" and target.capability < (8, 0):
            return f"it needs compute capability 8.0 or above; {target} has {target.version}."
        if self.batch > MOST_BLOCKS_YZ:
            return f"the batch must be at most {MOST_BLOCKS_YZ}; got {self.batch}."
        smaller = max(cache.pages_per_sequence * cache.split, cache.pages * cache.page_step)
        if max(cache.capacity, smaller, self._rows) >= 2**30:
            return "a cache must have fewer than 2**30 pages, and a call as few new rows."
        return None

    @property
    def _rows(self) -> int:
        """Of a sequence, what is written, and what is rotated."""
        new = self._new_tokens * (self._dim("k_cache", 1) + self._dim("v_cache", 1))
        return new + self._dim("q", 1) * self._dim("q", 2)

    def _dim(self, role: str, axis: int) -> int:
        return self.tensors[role].dim[axis] if role in self.tensors else 0

    @property
    def _new_tokens(self) -> int:
        return self._dim("k_new", 2)

    def make_argument(self) -> AppendParams:
        cache = self.cache
        params = AppendParams(
            pages=CacheRef(
                page_rows=cache.page_rows,
                pages=cache.pages,
                pages_per_sequence=cache.pages_per_sequence,
            ),
            split=cache.split,
            page_step=cache.page_step,
            batch=self.batch,
            cached_tokens=cache.capacity,
            new_tokens=self._new_tokens,
            seq_q=self._dim("q", 2),
            heads_k=self._dim("k_cache", 1),
            heads_v=self._dim("v_cache", 1),
            heads_q=self._dim("q", 1),
            head_dim_qk=self._dim("k_cache", 3),
            head_dim_v=self._dim("v_cache", 3),
            rotary_dim=2 * self._dim("cos", 1),
            angles=self._dim("cos", 0),
            queries_move=self.rotation is not None and self.rotation.queries_move,
        )
        for role, spec in self.tensors.items():
            if role in ROW_ROLES:
                batch, head, row, _ = spec.stride
                setattr(params, role, TensorRef(0, batch, head, row))
            elif role in LENGTH_ROLES:
                setattr(params, role, LengthRef(0, spec.stride[0], spec.dtype is data_type.INT64))
            elif role == "pages":
                params.pages.batch, params.pages.page = spec.stride
        return params

    def kernel(self) -> KernelLaunch:
        element = self.tensors["k_cache"].dtype
        angle = self.tensors["cos"].dtype if "cos" in self.tensors else element
        interleaved = self.rotation is not None and self.rotation.interleaved
        rows = [spec for role, spec in self.tensors.items() if role in ROW_ROLES]
        unit = unit_size(True, element)
        rotary_dim = 2 * self._dim("cos", 1)
        # A unit's columns turn together, and so do their partners.
        turned = rotary_dim if interleaved else rotary_dim // 2
        columns = [spec.dim[3] for spec in rows]
        wide = (
            self.wide
            and all(map(has_wide_rows, rows))
            and not any(n % unit for n in (*columns, turned))
        )
        lanes = lanes_of(max(columns), unit_size(wide, element))
        source = direct_source(
            self.name,
            AppendParams,
            THREADS,
            to_cpp(element),
            to_cpp(angle),
            lanes,
            wide,
            interleaved,
        )
        blocks = max(1, -(-self._rows // (THREADS // lanes)))
        return KernelLaunch(source, (blocks, self.batch, 1), THREADS, 0)

    # In NumPy ---------------------------------------------------------------------------------

    def on_host(self, arrays: Mapping[str, Array]) -> None:
        role = "cached_tokens" if "cached_tokens" in arrays else "cache_seqlens"
        cached = self._lengths(role, arrays, self.cache.capacity)
        padding = self._lengths("leftpad", arrays, 0)
        numbers = self._page_numbers(arrays.get("pages"))
        new = self._new_tokens
        if (cached + new > self.cache.capacity).any():
            raise InvalidVariantPackError(
                f"cache_seqlens: {new} new tokens behind {cached.tolist()} do not fit the "
                f"{self.cache.capacity} rows that the cache has for a sequence; make it larger."
            )
        filled = np.maximum(0, cached + new - padding)
        # Before anything is written; and of what is neither written nor read, nothing is asked.
        self._check_pages(arrays, np.where(filled + new > 0, cached + new, 0), numbers)
        positions = cached[:, None] + np.arange(new)
        self._write_tokens(arrays, positions, self._places(positions, numbers))
        if "q_rotated" in arrays:
            assert self.rotation is not None
            steps = np.arange(self._dim("q", 2)) * self.rotation.queries_move
            positions = cached[:, None] + steps
            arrays["q_rotated"][...] = self._rotated(arrays["q"], positions, arrays)
        self._describe(arrays, filled, padding, numbers)

    def _lengths(self, role: str, arrays: Mapping[str, Array], otherwise: int) -> Array:
        if role not in arrays:
            return np.full(self.batch, otherwise, np.int64)
        numbers = np.broadcast_to(arrays[role].reshape(-1).astype(np.int64), self.batch)
        if (numbers < 0).any():
            raise InvalidArgumentError(
                f"{self.tensors[role].name}: expected 0 or more tokens, got {numbers.tolist()}."
            )
        return np.minimum(numbers, self.cache.capacity)

    def _page_numbers(self, table: Array | None) -> Array:
        """(B, pages_per_sequence), -1 where there is no page."""
        if table is None:
            table = np.arange(self.batch).reshape(-1, 1)
        return np.where((table >= 0) & (table < self.cache.pages), table, -1)

    def _check_pages(self, arrays: Mapping[str, Array], rows: Array, numbers: Array) -> None:
        """Refuse sequences of so many rows, (B,), that have no page for one."""
        used = -(-rows // self.cache.page_rows)
        is_missing = (np.arange(numbers.shape[1]) < used[:, None]) & (numbers < 0)
        for entry in np.flatnonzero(is_missing.any(1))[:1]:
            raise InvalidVariantPackError(
                f"{self.tensors['pages'].name}: sequence {entry}, of {rows[entry]} rows, has "
                f"{arrays['pages'][entry, : used[entry]].tolist()}; expected numbers from 0 to "
                f"{self.cache.pages - 1}, of what the cache has."
            )

    def _places(self, positions: Array, numbers: Array) -> tuple[Array, Array]:
        """The page of each new token, and the row there, (B, tokens), no two of which agree."""
        pages = np.take_along_axis(numbers, positions // self.cache.page_rows, axis=1)
        rows = positions % self.cache.page_rows
        places = (pages * self.cache.page_rows + rows).reshape(-1)
        order = places.argsort(kind="stable")
        for at in np.flatnonzero(np.diff(places[order]) == 0)[:1]:
            one, other = order[at : at + 2] // self._new_tokens
            raise InvalidVariantPackError(
                f"{self.tensors['pages'].name}: expected a row of the cache for each new token, "
                f"got one row for tokens of sequence {one} and of sequence {other}; give each its "
                "own."
            )
        return pages, rows

    def _write_tokens(
        self, arrays: Mapping[str, Array], positions: Array, places: tuple[Array, Array]
    ) -> None:
        if "k_new" not in arrays:
            return
        pages, rows = places
        k_new = arrays["k_new"]
        if self.rotation is not None:
            k_new = self._rotated(k_new, positions, arrays)
        for cache, new in ((arrays["k_cache"], k_new), (arrays["v_cache"], arrays["v_new"])):
            cache[pages, :, rows] = new.swapaxes(1, 2)

    def _rotated(self, x: Array, positions: Array, arrays: Mapping[str, Array]) -> Array:
        """Rows (B, H, S, D) turned by the angles of positions (B, S)."""
        assert self.rotation is not None
        compute: Any = np.float64 if x.dtype == np.float64 else np.float32
        angles, half = arrays["cos"].shape
        known = positions < angles
        index = np.where(known, positions, 0)
        cos, sin = (
            np.where(known[:, None, :, None], arrays[name][index][:, None].astype(compute), np.nan)
            for name in ("cos", "sin")
        )
        if self.rotation.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        turned = x.copy()
        a, b = (x[..., part].astype(compute) for part in (first, second))
        with np.errstate(all="ignore"):
            turned[..., first] = a * cos - b * sin
            turned[..., second] = a * sin + b * cos
        return turned

    def _describe(
        self, arrays: Mapping[str, Array], filled: Array, padding: Array, numbers: Array
    ) -> None:
        if "k_offsets" in arrays:
            # Of a sequence without rows, the entry may not exist.
            first = np.maximum(0, numbers[:, 0])
            for name in ("k", "v"):
                page, _, row, _ = self.tensors[f"{name}_cache"].stride
                begins = first * page + padding * row
                arrays[f"{name}_offsets"][:-1] = begins
                arrays[f"{name}_offsets"][-1] = begins[-1]
        if "seq_len_kv" in arrays:
            arrays["seq_len_kv"][...] = filled
        if "table" in arrays:
            split = self.cache.split
            parts = numbers[:, :, None] * self.cache.page_step + np.arange(split)
            arrays["table"][...] = np.where(numbers[:, :, None] < 0, -1, parts).reshape(
                self.batch, -1
            )
