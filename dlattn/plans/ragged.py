"""What the kernels of a ragged problem know of its batch entries: ``kernels/ragged.cuh``."""

from __future__ import annotations

import ctypes
from functools import cached_property

from dlattn.dtypes import data_type
from dlattn.plans.argument import Divisor, LengthRef, Params
from dlattn.plans.kernels import KernelLaunch
from dlattn.plans.params import Place, places_of
from dlattn.plans.source import kernel_source
from dlattn.problem import RAGGED_ROLES, Direction, Geometry, Padding, Problem, Scale
from dlattn.records import dataclass
from dlattn.runtime.jit import KernelSource

_THREADS = 256

#: Bytes of ``RaggedEntry``, an item, a length, an offset, ``MappedEntry`` times
#: ``mapped_tensors``, and a bundle.
_ENTRY, _ITEM, _LENGTH, _OFFSET, _MAPPED, _BUNDLE = 16, 16, 4, 8, 8 * 5, 4

#: More tiles than any workspace has room for.
_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True)
class Items:
    """The work that persistent blocks take one after the other.

    Attributes:
        rows: queries, or keys, of an item.
        most: how many items there can be.
        of_keys: items are tiles of keys, of a group of heads; else of queries, of a head.
        last_first: of a head, the last tile is taken first.
        bundles: the most that there can be of groups of heads whose sums of dQ share a place.
    """

    rows: int
    most: int
    of_keys: bool
    last_first: bool
    bundles: int = 0


@dataclass(frozen=True)
class RaggedScratch:
    """Memory that the first kernel of a ragged problem writes, and its parameters.

    Attributes:
        tile_q: rows of a tile of row statistics.
        row_tiles: of those, how many the workspace has room for, of one head.
        items: for plans whose blocks are persistent; these also have tensor maps.
        key_tiles: where items add to sums of dK and dV, the tiles of keys that the workspace has
            room for sums of, of one head.
    """

    geometry: Geometry
    tile_q: int = 1
    row_tiles: int = _UNBOUNDED
    items: Items | None = None
    key_tiles: int = 0

    @cached_property
    def _by_tokens(self) -> list[str]:
        """Roles of the tensors whose offsets the first kernel writes."""
        return list(filter(self.geometry.by_tokens, RAGGED_ROLES))

    @property
    def nbytes(self) -> int:
        batch, items = self.geometry.batch, self.items
        persistent = 0
        if items is not None:
            persistent = _ITEM * (1 + items.most) + _MAPPED * batch + _BUNDLE * items.bundles
        offsets = _OFFSET * len(self._by_tokens)
        size = persistent + (self._entry + offsets + 2 * _LENGTH) * batch
        return -(-size // 256) * 256

    @property
    def _entry(self) -> int:
        """Bytes of an entry, with the number of its first key tile if that is asked for."""
        return _ENTRY + (4 if self.key_tiles else 0)

    def kernel(self) -> KernelLaunch:
        """The kernel that writes it."""
        source = ragged_source(counts_key_tiles=self.key_tiles > 0)
        grid = self.geometry.batch, 1, 1
        return KernelLaunch(
            source, grid, _THREADS, 0, plain=True, programmatic=self.items is not None
        )

    def describe(self, params: Params) -> None:
        """Writes what is no address."""
        ref, groups = params.ragged, params.heads_q // params.heads_per_block.number
        ref.tile_q, ref.groups = Divisor.of(self.tile_q), Divisor.of(groups)
        ref.wave = Divisor.of(min(params.items.pairs.number, groups))
        ref.row_tiles, ref.key_tiles = self.row_tiles, self.key_tiles
        ref.item_rows = Divisor.of(1 if self.items is None else self.items.rows)
        if self.items is not None:
            ref.items_of_keys, ref.last_first = self.items.of_keys, self.items.last_first
        params.seq_len_q = params.seq_len_kv = LengthRef(0, 1, 0, 0)

    def places(self, params: Params) -> list[Place]:
        """Where addresses go; the memory is aligned to 16 bytes."""
        batch, ref = self.geometry.batch, params.ragged
        arrays: list[tuple[ctypes.Structure, str, int]] = []
        if self.items is not None:
            arrays += [(ref, "items", _ITEM * (1 + self.items.most))]
            arrays += [(ref, "mapped", _MAPPED * batch)]
        refs = [getattr(params, role) for role in self._by_tokens]
        arrays += [(it, "offsets", _OFFSET * batch) for it in refs]
        arrays += [(ref, "entries", self._entry * batch)]
        if self.items is not None and self.items.bundles:
            arrays += [(ref, "bundles", _BUNDLE * self.items.bundles)]
        lengths = params.seq_len_q, params.seq_len_kv
        return places_of([*arrays, *((it, "data", _LENGTH * batch) for it in lengths)])


@dataclass(frozen=True)
class _Tiling:
    cpp: str
    threads: int = _THREADS
    min_blocks: int = 1


def ragged_source(*, counts_key_tiles: bool = False) -> KernelSource:
    """The kernel: one for problems whose items add to sums of dK and dV, one for all others."""
    any_problem = Problem(
        Direction.FORWARD, data_type.HALF, 8, 8, (Scale(),), (Padding(),), ragged=True
    )
    counts = ", true" if counts_key_tiles else ""
    tiling = _Tiling(f"RaggedTiling<{_THREADS}{counts}>")
    return kernel_source("ragged", any_problem, tiling, 0)
