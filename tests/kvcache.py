"""Calls of ``flash_attn_with_kvcache``, as data: built, run, and held to the oracle.

What is appended, and where, is said once more here, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

from dlattn.flash import flash_attn_with_kvcache
from tests import oracle
from tests.callers import Caller
from tests.cases import Case


@dataclass(frozen=True)
class CacheCase:
    """One call; its repr is one line that evaluates to it.

    Attributes:
        cached: tokens of each sequence before the call, padding included.
        seqlens_as: how these are given: ``"int32"``, ``"int64"``, ``"number"`` (then all are as the
            first), or ``"none"``: the cache is full.
        new: tokens that are appended; ``None`` is no k and v.
        room: rows that a sequence may have, at least as many as it needs.
        page: rows of a page; ``None`` is no block table.
        index: there is a cache_batch_idx.
        leftpad: rows of each sequence before its first token, if they are given.
        rotary: columns that are rotated; 0 is no rotation.
        angles: type of cos and sin, ``"float32"`` or that of q.
        exact: what is rotated, and by what, has so few bits that no type rounds the result; else
            only the caches are compared.
        layout: of caches in memory: ``"plain"``, ``"heads first"``, ``"packed"`` (rows of k beside
            those of v), ``"interleaved"`` (pages of k between those of v), or ``"odd"`` (rows not
            aligned).
        given: the output goes to memory of the caller's.
        lse: the log-sum-exp is asked for.
    """

    dtype: str = "float16"
    heads: int = 1
    heads_k: int = 1
    head_size: int = 8
    head_size_v: int = 8
    seqlen: int = 1
    cached: tuple[int, ...] = (1,)
    seqlens_as: str = "int32"
    new: int | None = None
    room: int = 1
    page: int | None = None
    index: bool = False
    leftpad: tuple[int, ...] | None = None
    rotary: int = 0
    interleaved: bool = True
    angles: str = "float32"
    exact: bool = True
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    alibi: str | None = None
    scale: float | None = None
    sinks: bool = False
    layout: str = "plain"
    given: bool = False
    lse: bool = True
    seed: int = 0

    def __repr__(self) -> str:
        given = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"CacheCase({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    @property
    def batch(self) -> int:
        return len(self.cached)

    @property
    def before(self) -> tuple[int, ...]:
        """Tokens in the cache."""
        if self.seqlens_as == "none":
            return (self.capacity,) * self.batch
        return (self.cached[0],) * self.batch if self.seqlens_as == "number" else self.cached

    @property
    def added(self) -> int:
        return self.new or 0

    @property
    def capacity(self) -> int:
        """Rows that a sequence has room for: of whole pages."""
        rows = max(1, self.room, max(self.cached) + self.added)
        return rows if self.page is None else -(-rows // self.page) * self.page

    @property
    def padding(self) -> tuple[int, ...]:
        return self.leftpad or (0,) * self.batch

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys that each sequence is attended to."""
        return tuple(
            max(0, n + self.added - pad) for n, pad in zip(self.before, self.padding, strict=True)
        )

    def window(self) -> tuple[int, int]:
        """``mha_fwd_kvcache``, before ``set_params_fprop``: -1 is none."""
        left = -1 if self.left >= self.capacity else self.left
        right = -1 if self.right >= self.capacity else self.right
        return left, 0 if self.causal else right

    def as_case(self) -> Case:
        """The attention alone, as cuDNN would say it, for the oracle."""
        left, right = self.window()
        if left >= 0 and right < 0:
            right = self.capacity
        return Case(
            dtype=self.dtype,
            batch=self.batch,
            heads_q=self.heads,
            heads_k=self.heads_k,
            heads_v=self.heads_k,
            seq_q=self.seqlen,
            seq_kv=max(1, *self.lengths),
            head_dim_qk=self.head_size,
            head_dim_v=self.head_size_v,
            scale=self.head_size**-0.5 if self.scale is None else self.scale,
            softcap=self.softcap or None,
            alibi=self.alibi,
            left=None if left < 0 else left + 1,
            right=None if right < 0 else right,
            bottom_right=True,
            len_kv=self.lengths,
            sink=0.0 if self.sinks else None,
        )


#: Every way to lay a cache out, once.
SMALL = {
    "one step": CacheCase(
        heads=8, heads_k=2, head_size=128, head_size_v=128, cached=(100, 3), new=1, room=256,
        rotary=128, causal=True,
    ),
    "pages of 48 rows, NeoX": CacheCase(
        dtype="bfloat16", heads=4, heads_k=2, head_size=64, head_size_v=64, seqlen=3,
        cached=(100, 0, 47), new=3, room=200, page=48, rotary=32, interleaved=False, causal=True,
        layout="interleaved",
    ),
    "entries in any order, a number of tokens": CacheCase(
        heads=2, head_size=128, head_size_v=128, seqlen=2, cached=(70, 70), seqlens_as="number",
        new=2, room=192, index=True, causal=True,
    ),
    "padding on the left": CacheCase(
        heads=4, heads_k=4, head_size=128, head_size_v=128, seqlen=5, cached=(90, 130), new=5,
        room=200, leftpad=(3, 130), causal=True, index=True,
    ),
    "element-wise access": CacheCase(
        heads=2, head_size=24, head_size_v=24, cached=(9,), new=2, room=33, rotary=6, page=3,
        layout="odd", interleaved=False,
    ),
    "a full cache": CacheCase(
        heads=8, heads_k=1, head_size=64, head_size_v=64, cached=(128, 128), seqlens_as="none",
        room=128, sinks=True, left=50,
    ),
}  # fmt: skip


class CacheCall:
    """The tensors of a case in NumPy."""

    def __init__(self, case: CacheCase) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed)
        self.type = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
        batch, size, size_v = case.batch, case.head_size, case.head_size_v
        self.q = self.normal(batch, case.seqlen, case.heads, size)
        self.new = [
            self.normal(batch, case.new, case.heads_k, n) if case.new is not None else None
            for n in (size, size_v)
        ]
        self.table = self._table()
        rows = case.page or case.capacity
        entries = int(self.table.max()) + 2
        self.caches = [self.normal(entries, rows, case.heads_k, n) for n in (size, size_v)]
        turns = self.rng.uniform(0, 6.3, (case.capacity + 3, case.rotary // 2))
        self.cos, self.sin = np.cos(turns), np.sin(turns)
        if case.rotary and case.exact:
            quarters = [np.round(4 * np.float64(x)).clip(-7, 7) / 4 for x in (self.q, self.new[0])]
            self.q, self.new[0] = (x.astype(self.type) for x in quarters)
            self.cos, self.sin = (np.round(4 * x) / 4 for x in (self.cos, self.sin))
        angles = self.type if case.angles == "same" else np.float32
        self.cos, self.sin = (x.astype(angles) for x in (self.cos, self.sin))
        self.slopes = None
        if case.alibi:
            shape = (case.heads,) if case.alibi == "H" else (batch, case.heads)
            self.slopes = self.rng.uniform(0, 0.3, shape).astype(np.float32)
        self.sinks = self.rng.normal(size=case.heads).astype(np.float32) if case.sinks else None

    def normal(self, *shape: int) -> Any:
        return self.rng.normal(size=shape).astype(self.type)

    def _table(self) -> Any:
        """(B, pages of a sequence), of what is not paged one."""
        case = self.case
        pages = case.capacity // case.page if case.page else 1
        if not (case.page or case.index):
            return np.arange(case.batch).reshape(-1, 1)
        numbers = self.rng.permutation(case.batch * pages + 2)[: case.batch * pages]
        return numbers.reshape(case.batch, pages)

    def place(self, entry: int, row: int) -> tuple[int, int]:
        """Where a row of a sequence is in a cache."""
        rows = self.case.page or self.case.capacity
        return int(self.table[entry, row // rows]), row % rows

    def rotated(self, x: Any, position: int) -> Any:
        """A row of heads (H, D), rounded to the case's type; pairs are complex numbers."""
        case, x = self.case, np.array(x)
        turn = np.float64(self.cos[position]) + 1j * np.float64(self.sin[position])
        half = case.rotary // 2
        one, other = (
            (slice(0, case.rotary, 2), slice(1, case.rotary, 2))
            if case.interleaved
            else (slice(0, half), slice(half, case.rotary))
        )
        turned = (np.float64(x[:, one]) + 1j * np.float64(x[:, other])) * turn
        x[:, one], x[:, other] = turned.real, turned.imag
        return x

    def expected_caches(self) -> list[Any]:
        """With what is appended."""
        caches = [np.array(x) for x in self.caches]
        for entry, before in enumerate(self.case.before):
            for token in range(self.case.added):
                at = self.place(entry, before + token)
                k, v = (x[entry, token] for x in self.new)
                caches[0][at] = self.rotated(k, before + token) if self.case.rotary else k
                caches[1][at] = v
        return caches

    def expected_queries(self) -> Any:
        """(B, Hq, Sq, D) as they are compared with keys."""
        case, q = self.case, np.array(self.q)
        moves = case.window() != (-1, -1)
        for entry, before in enumerate(case.before):
            for row in range(case.seqlen * bool(case.rotary)):
                # Queries behind the last angle are those of no key.
                position = before + moves * row
                if position < len(self.cos):
                    q[entry, row] = self.rotated(q[entry, row], position)
                else:
                    q[entry, row] = np.nan
        return q.swapaxes(1, 2)

    def by_sequence(self, cache: Any) -> Any:
        """(B, Hk, longest, D): the keys that are attended to, 0 behind them."""
        case = self.case
        _, _, heads, columns = cache.shape
        rows = np.zeros((case.batch, heads, max(1, *case.lengths), columns), cache.dtype)
        for entry, length in enumerate(case.lengths):
            for key in range(length):
                rows[entry, :, key] = cache[self.place(entry, case.padding[entry] + key)]
        return rows


def check_cache(case: CacheCase, caller: Caller) -> None:
    """Fails unless the output is right, and the caches changed only where they should."""
    try:
        _check(CacheCall(case), caller)
    except BaseException:
        print(f'pytest tests/test_repro.py --repro "{case!r}"')
        raise


def _check(call: CacheCall, caller: Caller) -> None:
    case = call.case
    buffers, views = _laid_out(call, caller)
    k, v = (None if x is None else caller.tensor(x) for x in call.new)
    seqlens: Any = None
    if case.seqlens_as == "number":
        seqlens = case.cached[0]
    elif case.seqlens_as != "none":
        seqlens = caller.tensor(np.array(case.cached, case.seqlens_as))
    options = {
        "cache_seqlens": seqlens,
        "softmax_scale": case.scale,
        "causal": case.causal,
        "window_size": (case.left, case.right),
        "softcap": case.softcap,
        "rotary_interleaved": case.interleaved,
        "return_softmax_lse": case.lse,
    }
    arrays = {"alibi_slopes": call.slopes, "sinks": call.sinks}
    if case.rotary:
        arrays |= {"rotary_cos": call.cos, "rotary_sin": call.sin}
    if case.page:
        arrays["block_table"] = call.table.astype(np.int32)
    elif case.index:
        arrays["cache_batch_idx"] = call.table[:, 0].astype(np.int32)
    if case.leftpad:
        arrays["cache_leftpad"] = np.array(case.leftpad, np.int32)
    tensors = {name: caller.tensor(x) for name, x in arrays.items() if x is not None}
    out = None
    if case.given:
        out = caller.tensor(np.zeros((*call.q.shape[:3], case.head_size_v), call.type))
    q = caller.tensor(call.q)
    found = flash_attn_with_kvcache(q, *views, k, v, **options, **tensors, out=out)
    o, lse = found if case.lse else (found, None)
    assert type(o) is type(q) and (out is None or o is out)

    want = call.expected_caches()
    after = []
    for buffer, expected, columns in zip(buffers, want, (call.case.rotary, 0), strict=True):
        cache = _seen(caller.host(buffer[0]), *buffer[1:])
        after.append(cache)
        got, exact = (np.float64(x) for x in (cache, expected))
        # Of the result, and of the two products before they cancel.
        eps = 0.0 if case.exact else float(ml_dtypes.finfo(call.type).eps)
        tiny = 16 * float(np.finfo("float64" if case.dtype == "float64" else "float32").eps)
        assert (got[..., columns:] == exact[..., columns:]).all(), "a row was copied wrongly"
        error = abs(got - exact)[..., :columns]
        bound = eps * abs(exact)[..., :columns] + tiny * (not case.exact)
        assert (error <= bound).all(), "a key was turned wrongly"
    given = {
        "q": call.expected_queries(),
        "k": call.by_sequence(after[0]),
        "v": call.by_sequence(after[1]),
        "dO": np.zeros((case.batch, case.heads, case.seqlen, case.head_size_v), call.type),
    }
    if call.slopes is not None:
        given["alibi_slopes"] = call.slopes
    if call.sinks is not None:
        given["sink_token"] = call.sinks.reshape(1, -1, 1, 1)
    results = {"o": caller.host(o).swapaxes(1, 2)}
    assert results["o"].dtype == call.type
    if lse is not None:
        stats = caller.host(lse)[..., None]
        assert stats.dtype == np.float32 and not np.isneginf(stats).any()
        stats[np.isposinf(stats)] = -np.inf
        results["stats"] = stats
    known = ~np.isnan(np.float64(given["q"])).any(axis=(1, 3))
    if not known.all():  # behind the last angle; 0 where no key is attended to
        unknown = np.float64(results["o"].swapaxes(1, 2)[~known])
        assert (np.isnan(unknown) | (unknown == 0)).all()
        return
    if case.exact or not case.rotary:
        oracle.assert_close(case.as_case(), given, results)


def _laid_out(call: CacheCall, caller: Caller) -> tuple[list[tuple[Any, str, int]], list[Any]]:
    """The memory of both caches, and the caches in it."""
    layout = call.case.layout
    pair = layout in ("packed", "interleaved") and call.caches[0].shape == call.caches[1].shape
    if pair:
        axis = 3 if layout == "packed" else 1
        memory = caller.tensor(np.stack(call.caches, axis=axis))
        buffers = [(memory, layout, which) for which in (0, 1)]
    elif layout == "heads first":
        turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in call.caches]
        buffers = [(caller.tensor(x), layout, 0) for x in turned]
    elif layout == "odd":
        padded = [np.concatenate([x[..., :1], x], axis=-1) for x in call.caches]
        buffers = [(caller.tensor(x), layout, 0) for x in padded]
    else:
        buffers = [(caller.tensor(x), "plain", 0) for x in call.caches]
    return buffers, [_seen(*buffer) for buffer in buffers]


def _seen(memory: Any, layout: str, which: int) -> Any:
    """A cache, (entries, rows, heads, columns), in its memory."""
    if layout == "packed":
        return memory[:, :, :, which]
    if layout == "interleaved":
        return memory[:, which]
    if layout == "heads first":
        return memory.swapaxes(1, 2)
    return memory[..., 1:] if layout == "odd" else memory
