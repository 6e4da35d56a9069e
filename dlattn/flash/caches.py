"""How a cache of keys and values lies in memory, and as what plans read it.

FlashAttention's caches are more than plans know: pages of any size, entries in any order, padding
on the left. All are reduced to what plans have, by small arrays that the append kernel writes:

- Pages of a power of two are pages. ``cache_batch_idx`` is a table, too, of one page a sequence,
  which has all rows of a cache's entry.
- Other pages are made of smaller ones, whose rows are the largest power of two that divides them: a
  page of 48 rows is three pages of 16.
- What has padding on the left, or entries that would fall into very small pages, is ragged: each
  sequence begins somewhere in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dlattn.calls.arguments import Argument, plain_spec
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.plans.append import Cache
from dlattn.problem import PAGE_TABLES, TensorSpec, offset_role
from dlattn.problem.layout import LONGEST, MOST_RAGGED_ELEMENTS, canonical_stride

#: Entries of a cache are not divided into pages of fewer rows than the copy engine moves.
_LEAST_PAGE = 8


@dataclass(frozen=True)
class CacheLayout:
    """A cache, as it is appended to and as it is attended to.

    Attributes:
        cache: its pages.
        appended: the append plan's roles -> specs.
        attended: the attention plan's roles -> specs.
        between: what the append plan writes for the attention plan, without gaps.
        read: the attention plan's role -> the append plan's.
        is_aligned: entries begin at multiples of 16 bytes if the cache does.
    """

    cache: Cache
    appended: Mapping[str, TensorSpec]
    attended: Mapping[str, TensorSpec]
    between: Mapping[str, TensorSpec] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)
    is_aligned: bool = True

    @property
    def is_paged(self) -> bool:
        """Whether the attention plan reads pages."""
        return PAGE_TABLES["k"] in self.attended

    @property
    def is_ragged(self) -> bool:
        return offset_role("k") in self.attended


def cache_layout(given: Mapping[str, Argument]) -> CacheLayout:
    """The cache of a call.

    Raises:
        InvalidArgumentError: its tensors contradict each other.
        cudnnGraphNotSupportedError: pages that cannot be divided into smaller ones.
    """
    q, k, v = (given[name] for name in ("q", "k_cache", "v_cache"))
    batch = q.shape[0]
    paged = "block_table" in given
    meaning = (
        "(num_blocks, page_block_size, num_heads_k, head_size)"
        if paged
        else "(batch_size_cache, seqlen_cache, num_heads_k, head_size)"
    )
    k.expect_shape((None, None, None, q.shape[3]), meaning)
    v.expect_shape((*k.shape[:3], None), meaning)
    entries, rows, _, _ = k.shape
    table = _table(given, batch)
    if paged and table is not None and table.dim[1] == 0:
        raise InvalidArgumentError(
            f"block_table: expected a page or more for each sequence, got shape {table.dim}."
        )
    if 0 in (entries, rows):
        raise InvalidArgumentError(f"k_cache: expected a row or more, got shape {k.shape}.")
    if table is None and entries < batch:
        raise InvalidArgumentError(
            f"k_cache: expected an entry for each of {batch} sequences, got shape {k.shape}; give "
            "cache_batch_idx or a block_table."
        )
    cache = Cache(rows, entries, table.dim[1] if paged and table is not None else 1)
    if cache.capacity > LONGEST:
        raise cudnnGraphNotSupportedError(
            f"k_cache: a sequence has room for {cache.capacity} rows; plans take up to {LONGEST}."
        )
    container = {"k": plain_spec(k, "bshd"), "v": plain_spec(v, "bshd")}
    appended = {f"{role}_cache": spec for role, spec in container.items()}
    if table is not None:
        appended["pages"] = table
    read = {"k": "k_cache", "v": "v_cache"}
    plain = CacheLayout(cache, appended, container, read=read)
    if "cache_leftpad" in given:
        return _ragged(plain, batch)
    if table is None:
        first = {role: replace(s, dim=(batch, *s.dim[1:])) for role, s in container.items()}
        return replace(plain, attended=_canonical(first))
    if rows & (rows - 1) == 0:
        return _with_table(plain, table, "pages")
    divided = _divided(cache, container, 1 if paged else _LEAST_PAGE)
    if divided is not None:
        cache, smaller = divided
        dim = (batch, cache.pages_per_sequence * cache.split)
        made = TensorSpec("table", dim, (dim[1], 1), data_type.INT32)
        layout = replace(plain, cache=cache, attended=smaller, between={"table": made})
        return _with_table(layout, made, "table")
    if paged:
        raise cudnnGraphNotSupportedError(
            f"k_cache and v_cache: pages of {rows} rows are read as smaller ones, of a power of "
            "two, which needs the same whole number of rows from page to page in both; got strides "
            f"{k.stride} and {v.stride}. Pass contiguous caches."
        )
    return _ragged(plain, batch)


def _table(given: Mapping[str, Argument], batch: int) -> TensorSpec | None:
    """(B, pages of a sequence), of what is not paged one; ``None`` where sequence b is entry b."""
    table, index = given.get("block_table"), given.get("cache_batch_idx")
    if table is None:
        if index is None:
            return None
        index.expect_type(data_type.INT32)
        index.expect_shape((batch,), "(batch_size,)")
        return TensorSpec(index.name, (batch, 1), (index.stride[0], 0), index.dtype)
    for name in ("cache_batch_idx", "cache_leftpad"):
        if name in given:
            raise InvalidArgumentError(
                f"{name}: a cache in pages has no entries; leave it out, or block_table."
            )
    table.expect_type(data_type.INT32)
    table.expect_shape((batch, None), "(batch_size, max_num_blocks_per_seq)")
    return table.vector()


def _with_table(layout: CacheLayout, table: TensorSpec, source: str) -> CacheLayout:
    """The same, in pages that a table of the append plan's says."""
    dim, (batch, page) = (table.dim[0], 1, table.dim[1], 1), table.stride
    spec = replace(table, dim=dim, stride=canonical_stride(dim, (batch, 0, page, 1)))
    tables = PAGE_TABLES.values()
    return replace(
        layout,
        attended={**layout.attended, **dict.fromkeys(tables, spec)},
        read={**layout.read, **dict.fromkeys(tables, source)},
    )


def _divided(
    cache: Cache, container: Mapping[str, TensorSpec], least: int
) -> tuple[Cache, dict[str, TensorSpec]] | None:
    """The cache in pages of a power of two, of so many rows or more; ``None`` if there is none."""
    rows = cache.page_rows & -cache.page_rows
    while rows >= least:
        steps = {_step(spec, rows) for spec in container.values()}
        step = steps.pop()
        if not steps and step is not None:
            split = cache.page_rows // rows
            pages = (cache.pages - 1) * step + split
            smaller = {}
            for role, spec in container.items():
                _, heads, _, columns = spec.dim
                _, head, row, column = spec.stride
                dim, stride = (pages, heads, rows, columns), (rows * row, head, row, column)
                smaller[role] = replace(spec, dim=dim, stride=stride)
            return replace(cache, split=split, page_step=step), _canonical(smaller)
        rows //= 2
    return None


def _step(spec: TensorSpec, rows: int) -> int | None:
    """Pages of so many rows from one page of a container to the next, if it is a whole number."""
    page, _, row, _ = spec.stride
    if spec.dim[0] == 1:
        return spec.dim[2] // rows
    return None if row == 0 or page % (rows * row) else page // (rows * row)


def _ragged(layout: CacheLayout, batch: int) -> CacheLayout:
    """The same, of sequences that begin anywhere."""
    offsets = TensorSpec("offsets", (batch + 1,), (1,), data_type.INT64)
    attended, between, read = {}, {}, dict(layout.read)
    is_aligned = True
    for role, spec in layout.attended.items():
        entry, head, row, column = spec.stride
        dim = (batch, *spec.dim[1:])
        attended[role] = replace(spec, dim=dim, stride=(0, head, row, column), ragged=True)
        attended[offset_role(role)] = between[f"{role}_offsets"] = offsets
        read[offset_role(role)] = f"{role}_offsets"
        is_aligned = is_aligned and entry % 8 == row % 8 == 0
        # Nor does the copy engine reach further.
        is_aligned = is_aligned and spec.dim[0] * entry <= MOST_RAGGED_ELEMENTS
    return replace(layout, attended=attended, between=between, read=read, is_aligned=is_aligned)


def _canonical(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {
        role: replace(spec, stride=canonical_stride(spec.dim, spec.stride))
        for role, spec in specs.items()
    }
