"""Decodes of each way to divide items among blocks on Hopper."""

from __future__ import annotations

from tests.cases import Case

#: Heads as most models have them.
WIDE = {"head_dim_qk": 128, "head_dim_v": 128, "scale": 0.09}


def _lengths(batch: int, keys: int) -> tuple[int, ...]:
    """Of all kinds, no two alike if they are fewer than keys."""
    return tuple(keys if entry == 1 else 211 * entry % keys for entry in range(batch))


#: Multiprocessors; blocks of an item, of a multiprocessor, stages of each (see `DecodeTiling`).
DIVIDED = {
    "blocks alone": (132, (1, 2, 2), Case(
        **WIDE, batch=66, heads_q=16, heads_k=8, heads_v=8, seq_kv=300, sink=0.0
    )),
    "blocks alone, of long items": (5, (1, 2, 1), Case(
        **WIDE, batch=5, heads_q=8, heads_k=4, heads_v=4, seq_kv=4200
    )),
    "blocks alone, lengths, pages": (132, (1, 2, 2), Case(
        **WIDE, batch=67, heads_q=8, heads_k=2, heads_v=2, seq_q=2, seq_kv=700, len_q=(2,) * 67,
        len_kv=_lengths(67, 700), right=0, bottom_right=True, page_k=64, page_v=16,
    )),
    "blocks alone, more tiles than a warp has lanes": (5, (1, 2, 2), Case(
        **WIDE, batch=14, heads_q=8, heads_k=4, heads_v=4, seq_kv=2900, len_q=(1,) * 14,
        len_kv=_lengths(14, 2900), page_k=16, page_v=64,
    )),
    "blocks alone, of long items, lengths": (2, (1, 2, 1), Case(
        **WIDE, batch=17, heads_q=4, heads_k=2, heads_v=2, seq_kv=4200, len_q=(1,) * 17,
        len_kv=_lengths(17, 4200), page_k=64, page_v=64,
    )),
    "shares of two blocks": (132, (0, 2, 1), Case(
        **WIDE, batch=67, heads_q=8, heads_k=2, heads_v=2, seq_kv=1500, len_q=(1,) * 67,
        len_kv=_lengths(67, 1500),
    )),
    "shares of two blocks, several items each": (5, (0, 2, 1), Case(
        **WIDE, batch=9, heads_q=8, heads_k=2, heads_v=2, seq_q=3, seq_kv=1300, len_q=(3,) * 9,
        len_kv=_lengths(9, 1300), right=0, bottom_right=True, sink=0.0, page_k=16, page_v=16,
    )),
    "shares of one block, several items each": (5, (0, 1, 2), Case(
        **WIDE, batch=7, heads_q=8, heads_k=2, heads_v=2, seq_kv=1300, page_k=16, page_v=16,
    )),
    "shares of several items of a tile, rings that are as many ahead": (5, (0, 1, 4), Case(
        head_dim_qk=40, head_dim_v=64, scale=0.09, batch=9, heads_q=8, heads_k=2, heads_v=2,
        seq_q=3, seq_kv=100, right=0, bottom_right=True,
    )),
    "parts in groups": (132, (0, 1, 1), Case(**WIDE, heads_q=8, seq_kv=17000, sink=0.0)),
    "parts in groups, lengths, pages": (132, (0, 1, 1), Case(
        **WIDE, batch=3, heads_q=8, seq_q=2, seq_kv=5000, len_q=(2, 1, 2), len_kv=(5000, 1, 4999),
        right=0, bottom_right=True, page_k=64, page_v=16,
    )),
    "32 rows, parts in groups": (132, (0, 1, 1), Case(
        **WIDE, heads_q=8, seq_q=4, seq_kv=6000, right=0, bottom_right=True
    )),
    "24 rows, lengths, pages": (132, (0, 1, 1), Case(
        **WIDE, batch=3, heads_q=8, seq_q=3, seq_kv=9000, len_q=(3, 1, 2), len_kv=(9000, 33, 2047),
        page_k=16, page_v=64,
    )),
    "32 rows, clusters of few blocks": (132, (8, 1, 2), Case(
        **WIDE, batch=7, heads_q=8, seq_q=4, seq_kv=2000, right=0, bottom_right=True
    )),
    "24 rows, clusters of few blocks, lengths, pages": (132, (8, 1, 2), Case(
        **WIDE, batch=8, heads_q=8, seq_q=3, seq_kv=1500, len_q=(3, 1, 2) * 2 + (3, 3),
        len_kv=_lengths(8, 1500), page_k=16, page_v=64,
    )),
    "32 rows, clusters": (132, (2, 1, 2), Case(
        **WIDE, batch=62, heads_q=8, seq_q=4, seq_kv=300, sink=0.0
    )),
    "32 rows, several items each": (5, (0, 1, 2), Case(
        **WIDE, batch=12, heads_q=8, seq_q=4, seq_kv=700, len_q=(4,) * 12,
        len_kv=_lengths(12, 700), page_k=16, page_v=16,
    )),
}  # fmt: skip
