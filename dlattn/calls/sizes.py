"""What the tensors of a call say together: how many of everything there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlattn.calls.arguments import (
    Argument,
    Laid,
    check_page_size,
    integer,
    packed_spec,
    page_tables,
    plain_spec,
)
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError
from dlattn.problem import QUERY_ROLES, TensorSpec
from dlattn.problem.layout import LONGEST

#: Arguments with cumulative lengths -> roles.
CU_SEQLENS = {"cu_seqlens of q": "cu_seqlens_q", "cu_seqlens of k and v": "cu_seqlens_kv"}

#: Roles of log-sum-exps.
_LSE = ("stats", "dStats")


@dataclass(frozen=True)
class Sizes:
    """What the tensors of a call say together.

    Attributes:
        seq_q, seq_kv: of packed sequences, bounds of their lengths.
        tokens_q, tokens_kv: of packed sequences, rows in all, at most.
        paged: k and v lie in pages.
    """

    batch: int
    heads: int
    seq_q: int
    seq_kv: int
    columns_v: int
    tokens_q: int | None = None
    tokens_kv: int | None = None
    paged: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is no query, or no key."""
        rows = (self.seq_q if self.tokens_q is None else self.tokens_q, self.seq_kv)
        return 0 in (self.batch, self.heads, *rows)

    def shape(self, layout: str, columns: int) -> tuple[int, ...]:
        """Of what has a row for each query of each head."""
        extents = {"b": self.batch, "s": self.seq_q, "h": self.heads, "d": columns}
        extents["t"] = self.tokens_q or 0
        return tuple(extents[letter] for letter in layout)

    def lse(self, layout: str) -> tuple[int, ...]:
        if layout == "thd":
            return (self.heads, self.tokens_q or 0)
        return (self.batch, self.heads, self.seq_q)

    def spec(self, role: str, it: Laid, layout: str) -> TensorSpec:
        """A tensor as the problem sees it."""
        if self.paged and role in ("k", "v"):
            return plain_spec(it, _paged(layout))
        if layout == "thd":
            longest = self.seq_q if role in QUERY_ROLES else self.seq_kv
            return packed_spec(it, "hs" if role in _LSE else "shd", self.batch, longest)
        return plain_spec(it, "bhs" if role in _LSE else layout)


def plain_sizes(there: Mapping[str, Argument], layout: str, most: tuple[Any, Any]) -> Sizes:
    if (
        "cu_seqlens of q" in there
        or "cu_seqlens of k and v" in there
        or any(bound is not None for bound in most)
    ):
        raise InvalidArgumentError(
            f"cu_seqlens and max_seqlens describe packed sequences; leave them out of layout "
            f"{layout!r}, or give layout 'thd'."
        )
    q, k, v = (there[name] for name in "qkv")
    said = f"({', '.join(layout)})"
    q.expect_shape((None,) * 4, said)
    batch, heads, seq_q, columns = (q.shape[layout.index(letter)] for letter in "bhsd")
    paged = "block_table" in there
    fixed = {"d": columns} if paged else {"b": batch, "d": columns}
    k.expect_shape([fixed.get(letter) for letter in layout], f"{said} as of {q.name}")
    fixed = {letter: k.shape[layout.index(letter)] for letter in "bs"}
    v.expect_shape([fixed.get(letter) for letter in layout], f"{said} as of {k.name}")
    _check_heads(there, layout)
    seq_kv = _in_pages(there, batch, fixed["s"]) if paged else fixed["s"]
    return Sizes(batch, heads, seq_q, seq_kv, v.shape[-1], paged=paged)


def packed_sizes(there: Mapping[str, Argument], most: tuple[Any, Any]) -> Sizes:
    q, k, v = (there[name] for name in "qkv")
    q.expect_shape((None,) * 3, "(tokens, heads, D)")
    paged = "block_table" in there
    if paged:
        k.expect_shape((None, None, None, q.shape[2]), "(pages, rows of a page, heads, D of q)")
        v.expect_shape((*k.shape[:2], None, None), "(pages of k, rows of a page, heads, D)")
    else:
        k.expect_shape((None, None, q.shape[2]), f"(tokens, heads, D of {q.name})")
        v.expect_shape((k.shape[0], None, None), f"(tokens of {k.name}, heads, D)")
    _check_heads(there, "thd")
    needed = list(CU_SEQLENS)
    if paged and "lengths of k and v" in there:
        needed.remove("cu_seqlens of k and v")
    if not all(name in there for name in needed):
        raise InvalidArgumentError(
            "layout 'thd' packs sequences; give cu_seqlens, which says where they begin."
        )
    (count, *_) = there["cu_seqlens of q"].shape or (1,)
    batch = max(0, count - 1)
    for name in needed:
        there[name].expect_type(data_type.INT32)
        there[name].expect_shape((batch + 1,), "the number of sequences and one more")
        there[name].expect_contiguous()
    most_kv = _in_pages(there, batch, k.shape[1]) if paged else k.shape[0]
    longest = [
        tokens if bound is None else integer("max_seqlens", bound)
        for tokens, bound in zip((q.shape[0], most_kv), most, strict=True)
    ]
    if min(longest) < 0:
        raise InvalidArgumentError(f"max_seqlens: expected 0 or more, got {most}.")
    seq_q, seq_kv = longest
    seq_q, seq_kv = min(seq_q, q.shape[0]), seq_kv if paged else min(seq_kv, most_kv)
    if paged and seq_kv > most_kv:
        raise InvalidArgumentError(
            f"max_seqlens: expected at most the {most_kv} keys that the pages of a sequence hold, "
            f"got {seq_kv}; pass a wider block_table, or a smaller maximum."
        )
    tokens_kv = 2**31 - 1 if paged else k.shape[0]
    return Sizes(batch, q.shape[1], seq_q, seq_kv, v.shape[-1], q.shape[0], tokens_kv, paged)


def _in_pages(there: Mapping[str, Argument], batch: int, page: int) -> int:
    """How many keys of a sequence its pages hold."""
    table = there["block_table"]
    page_tables(table, batch)
    check_page_size(there["k"], page)
    held = table.shape[1] * page
    if held > LONGEST:
        raise InvalidArgumentError(
            f"block_table: expected pages for at most {LONGEST} keys, got {table.shape[1]} pages "
            f"of {page} rows; pass a narrower table."
        )
    return held


def _paged(layout: str) -> str:
    """The dimensions of pages: b counts them, s their rows."""
    return "bshd" if layout == "thd" else layout


def check_shared(shared: tuple[bool, bool], sizes: Sizes, there: Mapping[str, Argument]) -> None:
    """Refuse one tensor for queries and keys of which there are not as many."""
    longest = sizes.seq_q, sizes.seq_kv
    # Of keys in pages, cumulative lengths are lengths.
    tokens = sizes.tokens_q, sizes.tokens_q if sizes.paged else sizes.tokens_kv
    # Packed in as many rows, sequences may be alike, whatever bounds of their lengths are given.
    packed = sizes.tokens_q is not None and not sizes.paged
    bounds_differ = longest[0] != longest[1]
    alike = (
        ("lengths", *(tokens if packed and bounds_differ else longest)),
        ("cu_seqlens", *tokens),
    )
    q, k, v = (there[role].name for role in "qkv")
    for is_shared, (name, of_q, of_kv) in zip(shared, alike, strict=True):
        if is_shared and of_q != of_kv:
            raise InvalidArgumentError(
                f"{name}: one tensor is of {q}, {k} and {v} alike, but {q} has {of_q} rows and {k} "
                f"{of_kv}; give a pair, {name}=(of {q}, of {k} and {v}), where None is all."
            )


def _check_heads(there: Mapping[str, Argument], layout: str) -> None:
    axis = layout.index("h") - len(layout)  # from behind, as pages of packed sequences have more
    heads = there["q"].shape[axis]
    for name in ("k", "v"):
        own = there[name].shape[axis]
        if heads and (own == 0 or heads % own):
            raise InvalidArgumentError(
                f"{there[name].name}: expected a number of heads that divides the {heads} of "
                f"{there['q'].name}, got {own}."
            )
    for name in ("q", "v"):
        if there[name].shape[-1] == 0:
            raise InvalidArgumentError(
                f"{there[name].name}: expected one column or more, got none."
            )
