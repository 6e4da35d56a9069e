"""Random attention calls. Every feature of dlattn has a field here, and a line that draws it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import strategies as st

#: Mostly those that every kernel has.
HEAD_DIMS = (*4 * [*range(8, 257, 8)], *range(264, 513, 8))

_FLOATS = ("bfloat16", "float16", "float32")
BIAS_DTYPES = (*_FLOATS, "bool", "uint8")

#: Roles whose memory layout a case may choose.
ROLES = (
    *("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
    *("score_max", "score_sum_exp", "sink_token", "dSink_token", "dBias"),
)

#: Roles of tensors that may be ragged, by the lengths that their entries have.
RAGGED_Q = ("q", "o", "stats", "score_max", "score_sum_exp", "dO", "dQ")
RAGGED_KV = ("k", "v", "dK", "dV")

#: Layouts whose strides keep rows on 16-byte boundaries (see :func:`tests.builders.strides`).
ALIGNED_LAYOUTS = ("bshd", "bhsd", "sbhd", "packed", "padded")


@dataclass(frozen=True)
class Case:
    """One attention call, forward or backward; its repr is one line that evaluates to it.

    Attributes:
        dtype: float16, bfloat16, float32 or float64: the type of q, k, v, o and their gradients.
        scale: attn_scale; ``None`` leaves the argument out, which means 1.0.
        scale_as: how the scale is given: ``"value"`` (a Python float), ``"host"`` (an fp32 tensor
            passed by value) or ``"device"`` (an fp32 tensor).
        softcap: bound of soft-capped scores, or ``None``.
        alibi: ``"cudnn"`` for cuDNN's slopes, or the shape of a tensor of slopes: ``"H"``, ``"BH"``
            or ``"BH11"``; ``None`` for none.
        bias: element type of the bias, of which ``"bool"`` and ``"uint8"`` mask; ``None`` for none.
        bias_axes: its axes, of ``"bhqk"``, that are not of size 1.
        bias_layout: ``"keys"`` if keys are its last axis in memory, ``"queries"`` if queries are.
        blocks: the share of blocks of 128 x 128 that a block mask keeps; ``None`` for no mask.
        blocks_axes: its axes, of ``"bh"``, that are not of size 1.
        blocks_layout: its last axis in memory, as of a bias.
        d_bias: element type of the bias's gradient; ``None`` for none.
        left, right: the diagonal band's bounds; ``None`` is no bound.
        bottom_right: the diagonal ends in the bottom right corner instead of the top left one.
        len_q, len_kv: actual lengths, one per batch entry, or ``None`` for full ones.
        len_dtypes: integer types of the two length tensors.
        page_k, page_v: rows of a page of k, of v, and of their gradients; ``None`` is not paged.
        packed_tables: page tables are packed, with offsets.
        ragged: roles of the tensors that are ragged: packed by :func:`tests.builders.packing`.
        gaps: memory is left out between their sequences.
        lengths_as: ``"tensors"``, or ``"offsets"`` where lengths can follow from those of a ragged
            q, k or v.
        offset_dtype: integer type of the offsets.
        bounded: ragged backwards are told how many tokens there are in all.
        layouts: (role, layout) for each tensor that is not laid out as ``"bshd"``.
        wild_strides: dimensions of size 1 carry a meaningless stride.
        stats: type of the stats that the forward writes and the backward reads; with ``None``
            there is no backward.
        row_outputs: which of score_max and score_sum_exp the forward writes, too.
        sink: about the mean of the heads' sinks; ``None`` is no sink.
        deterministic: the backward must give the same bits in every run.
        dropout: the probability to drop, by Philox, or the element type of a mask; or ``None``.
        dropout_as: how seed and offset, or the mask's scales, are given: ``"value"`` (Python
            numbers), ``"host"`` (tensors passed by value) or ``"device"``.
        dropout_dtypes: integer types of seed and offset.
        dropout_axes, dropout_layout: of the mask, as of the bias.
        rng_dump: forward and backward write the mask.
        logits: about the standard deviation of the scaled scores.
        offset: what is added to every scaled score, through the first column of q and k.
        tails: what rows past the lengths hold: ``"nan"``, ``"inf"`` or ``"huge"``.
        seed: of the data.
    """

    dtype: str = "bfloat16"
    batch: int = 1
    heads_q: int = 1
    heads_k: int = 1
    heads_v: int = 1
    seq_q: int = 1
    seq_kv: int = 1
    head_dim_qk: int = 8
    head_dim_v: int = 8
    scale: float | None = None
    scale_as: str = "value"
    softcap: float | None = None
    alibi: str | None = None
    bias: str | None = None
    bias_axes: str = "bhqk"
    bias_layout: str = "keys"
    blocks: float | None = None
    blocks_axes: str = "bh"
    blocks_layout: str = "keys"
    d_bias: str | None = None
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    len_q: tuple[int, ...] | None = None
    len_kv: tuple[int, ...] | None = None
    len_dtypes: tuple[str, str] = ("int32", "int32")
    page_k: int | None = None
    page_v: int | None = None
    packed_tables: bool = False
    ragged: tuple[str, ...] = ()
    gaps: bool = False
    lengths_as: str = "tensors"
    offset_dtype: str = "int32"
    bounded: bool = False
    layouts: tuple[tuple[str, str], ...] = ()
    wild_strides: bool = False
    stats: str | None = "float32"
    row_outputs: tuple[str, ...] = ()
    sink: float | None = None
    deterministic: bool = False
    dropout: float | str | None = None
    dropout_as: str = "device"
    dropout_dtypes: tuple[str, str] = ("int64", "int64")
    dropout_axes: str = "bhqk"
    dropout_layout: str = "keys"
    rng_dump: bool = False
    logits: float = 1.0
    offset: float = 0.0
    tails: str = "nan"
    seed: int = 0

    def __repr__(self) -> str:
        given = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    def layout(self, role: str) -> str:
        return dict(self.layouts).get(role, "bshd")

    def page(self, role: str) -> int | None:
        """Rows of a page of this tensor; ``None`` if it is not paged."""
        return {
            "k": self.page_k, "dK": self.page_k, "v": self.page_v, "dV": self.page_v,
        }.get(role)  # fmt: skip

    @property
    def scale_value(self) -> float:
        """The scale that the engine reads: as a tensor it is float32."""
        scale = 1.0 if self.scale is None else self.scale
        return scale if self.scale_as == "value" else struct.unpack("f", struct.pack("f", scale))[0]

    def scores_dim(self) -> tuple[int, int, int, int]:
        return (self.batch, self.heads_q, self.seq_q, self.seq_kv)

    def bias_dim(self) -> tuple[int, ...]:
        return self._broadcast_dim(self.bias_axes)

    def bias_stride(self) -> tuple[int, ...]:
        return _gapped_stride(self.bias_dim(), self.bias_layout)

    def mask_dim(self) -> tuple[int, ...]:
        """Of dropout's."""
        return self._broadcast_dim(self.dropout_axes)

    def mask_stride(self) -> tuple[int, ...]:
        return _gapped_stride(self.mask_dim(), self.dropout_layout)

    def _broadcast_dim(self, axes: str) -> tuple[int, ...]:
        named = zip("bhqk", self.scores_dim(), strict=True)
        return tuple(size if axis in axes else 1 for axis, size in named)

    @property
    def is_random(self) -> bool:
        """Whether dropout is by Philox."""
        return isinstance(self.dropout, float)

    @property
    def drops(self) -> bool:
        """Whether engines compute dropout."""
        return self.dropout is not None and (self.dropout != 0.0 or self.rng_dump)

    def philox(self) -> tuple[int, int]:
        """Philox's seed and offset: of any sign, and large where the type allows it."""
        seed, offset = 40503 * self.seed - 2**30, 7 * self.seed - 5
        wide = [dtype == "int64" for dtype in self.dropout_dtypes]
        return (seed << 30 if wide[0] else seed, offset << 20 if wide[1] else offset)

    def dropout_scale(self) -> float:
        """What kept probabilities are multiplied by; of a mask, float32 has its inverse exactly."""
        if isinstance(self.dropout, float):
            return 1 / (1 - self.dropout)
        return 1.0 if self.dropout is None else 2.0

    def blocks_dim(self) -> tuple[int, ...]:
        batch, heads = (
            size if axis in self.blocks_axes else 1
            for axis, size in zip("bh", (self.batch, self.heads_q), strict=True)
        )
        queries, keys = (-(-seq // 128) for seq in (self.seq_q, self.seq_kv))
        return (batch, heads, queries, -(-keys // 8))

    def blocks_stride(self) -> tuple[int, ...]:
        """With gaps after each head."""
        b, h, q, k = self.blocks_dim()
        head = q * k + 3
        return (h * head, head, *((k, 1) if self.blocks_layout == "keys" else (1, q)))

    def slopes_dim(self) -> tuple[int, ...] | None:
        """The shape of the slopes, if they are a tensor."""
        batch, heads = self.batch, self.heads_q
        return {
            "H": (heads,), "BH": (batch, heads), "BH11": (batch, heads, 1, 1),
        }.get(self.alibi or "")  # fmt: skip

    def lengths_q(self) -> tuple[int, ...]:
        return self.len_q or (self.seq_q,) * self.batch

    def lengths_kv(self) -> tuple[int, ...]:
        return self.len_kv or (self.seq_kv,) * self.batch

    def length_source(self, side: str) -> str | None:
        """The tensor whose offsets tell the lengths of ``"q"`` or ``"kv"``, if any does."""
        if self.lengths_as == "tensors":
            return None
        return next((role for role in side if role in self.ragged), None)

    def length_tensors(self) -> dict[str, tuple[int, ...]]:
        """The lengths that are given as tensors, by role."""
        sides = {
            "seq_len_q": ("q", RAGGED_Q, self.len_q, self.lengths_q()),
            "seq_len_kv": ("kv", RAGGED_KV, self.len_kv, self.lengths_kv()),
        }
        given = {}
        for role, (side, roles, lengths, full) in sides.items():
            if self.length_source(side) is None:
                chosen = full if set(roles) & set(self.ragged) else lengths
                given |= {role: chosen} if chosen is not None else {}
        return given

    def dims(self) -> dict[str, tuple[int, int, int, int]]:
        """Shapes by role; of what is paged, as if it were not (see :mod:`tests.pages`)."""
        rows_q, rows_kv = (self.batch, self.heads_q, self.seq_q), self.seq_kv
        q = (*rows_q, self.head_dim_qk)
        k = (self.batch, self.heads_k, rows_kv, self.head_dim_qk)
        v = (self.batch, self.heads_v, rows_kv, self.head_dim_v)
        o, row, head = (*rows_q, self.head_dim_v), (*rows_q, 1), (1, self.heads_q, 1, 1)
        return {
            **{"q": q, "k": k, "v": v, "o": o, "dO": o, "dQ": q, "dK": k, "dV": v},
            **{"stats": row, "score_max": row, "score_sum_exp": row},
            **{"sink_token": head, "dSink_token": head, "dBias": self.bias_dim()},
        }


def _gapped_stride(dim: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """With gaps after each head."""
    _, h, q, k = dim
    head = q * k + 3
    return (h * head, head, *((k, 1) if layout == "keys" else (1, q)))


@dataclass(frozen=True)
class Profile:
    """How large and how varied the cases are.

    Attributes:
        dtypes: element types to draw from, with the types of stats that go with each.
        edges: sequence lengths to draw often: one around each tile boundary.
        block_edges: lengths to draw often where there is a block mask.
        longest: longest sequence.
        heads: query heads to draw from.
    """

    dtypes: dict[str, tuple[str, ...]]
    edges: tuple[int, ...]
    block_edges: tuple[int, ...]
    longest: int
    heads: tuple[int, ...]


PROFILES = {
    "cpu": Profile(
        dtypes={
            "bfloat16": ("float32", "float32", "bfloat16"),
            "float16": ("float32",),
            "float32": ("float32", "float64"),
            "float64": ("float64", "float32"),
        },
        edges=(2, 7, 8, 9, 15, 16, 17, 33),
        block_edges=(127, 128, 129, 300),
        longest=40,
        heads=(1, 2, 3, 4, 6),
    ),
    "gpu": Profile(
        dtypes={"bfloat16": ("float32",), "float16": ("float32",)},
        edges=(
            *(2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129),
            *(159, 160, 161, 175, 176, 177, 191, 192, 193, 255, 256, 257, 383, 384, 385, 511, 513),
        ),
        block_edges=(128, 129, 300, 600, 1024, 1030, 1200),
        longest=600,
        heads=(1, 2, 3, 4, 6, 8, 12),
    ),
}


#: What is paged, k and v.
_PAGED = (*[(None, None)] * 4, (1, 1), (1, 1), (1, None), (None, 1))
_PAGE_SIZES = (1, 2, 4, 8, 16, 16, 32, 64, 64, 128, 256, 1024)

_MAX, _SUM = "score_max", "score_sum_exp"
_ROW_OUTPUTS: tuple[tuple[str, ...], ...] = ((), (), (), (_MAX,), (_SUM,), (_MAX, _SUM))


_RAGGED = (
    (*RAGGED_Q, *RAGGED_KV),
    (*RAGGED_Q, *RAGGED_KV),
    ("q", "o", "dO", "dQ", *RAGGED_KV),
    RAGGED_Q,
    RAGGED_KV,
)


def cases(profile: str = "cpu", **fixed: Any) -> st.SearchStrategy[Case]:
    """Any case of a profile; ``fixed`` pins fields."""
    return families(profile, 1).map(lambda family: replace(family[0], **fixed))


@st.composite
def families(draw: st.DrawFn, profile: str = "cpu", size: int = 4) -> tuple[Case, ...]:
    """Up to ``size`` cases that share all that changes a kernel's code, so that one compilation
    serves them."""
    kind = draw(_kinds(PROFILES[profile]))
    aligned = draw(st.sampled_from((True, True, False)))
    members = st.lists(_members(PROFILES[profile], kind, aligned), min_size=1, max_size=size)
    return tuple(draw(members))


@st.composite
def _kinds(draw: st.DrawFn, profile: Profile) -> Case:
    """A case whose fields that change code are drawn; numbers are only present or absent."""
    head_dim_qk = draw(st.sampled_from(HEAD_DIMS))
    scale_as = draw(st.sampled_from(("value", "value", "value", "host", "device")))
    dtype = draw(st.sampled_from(tuple(profile.dtypes)))
    page_k, page_v = draw(st.sampled_from(_PAGED))
    bias = draw(st.sampled_from((*[None] * 6, *BIAS_DTYPES)))
    scales = [1.0, -0.5, 0.0, head_dim_qk**-0.5, head_dim_qk**-0.5]
    return Case(
        dtype=dtype,
        head_dim_qk=head_dim_qk,
        head_dim_v=draw(st.just(head_dim_qk) | st.sampled_from(HEAD_DIMS)),
        scale=draw(st.sampled_from(scales if scale_as != "value" else [None, *scales])),
        scale_as=scale_as,
        softcap=draw(st.sampled_from((None, None, 1.0))),
        alibi=draw(st.sampled_from((None, None, None, "cudnn", "H"))),
        bias=bias,
        d_bias=draw(st.sampled_from((None, *_FLOATS))) if bias in _FLOATS else None,
        bias_layout=draw(st.sampled_from(("keys", "keys", "queries"))),
        blocks=draw(st.sampled_from((*[None] * 5, 0.5))),
        left=draw(st.sampled_from((None, None, 1))),
        right=draw(st.sampled_from((None, 0))),
        page_k=page_k,
        page_v=page_v,
        stats=draw(st.sampled_from((*profile.dtypes[dtype] * 3, None))),
        row_outputs=draw(st.sampled_from(_ROW_OUTPUTS)),
        ragged=draw(st.sampled_from(((), (), _RAGGED[0]))),
        sink=draw(st.sampled_from((None, None, 0.0))),
        deterministic=draw(st.sampled_from((False, False, True))),
        dropout=draw(st.sampled_from((*[None] * 6, 0.0, 0.1, 0.1, 0.1, *BIAS_DTYPES))),
        dropout_layout=draw(st.sampled_from(("keys", "keys", "queries"))),
    )


@st.composite
def _members(draw: st.DrawFn, profile: Profile, kind: Case, aligned: bool) -> Case:
    """A case of the given kind."""
    batch = draw(st.integers(1, 3))
    heads_q = draw(st.sampled_from(profile.heads))
    divisors = st.sampled_from([h for h in range(1, heads_q + 1) if heads_q % h == 0])
    size = st.sampled_from(profile.edges) | st.integers(1, profile.longest)
    if kind.blocks is not None:
        size = st.sampled_from(profile.block_edges) | size
    seq_q, seq_kv = draw(size), draw(size)
    padded = draw(st.sampled_from(("none", "none", "both", "both", "q", "kv")))
    if kind.page_k or kind.page_v:
        padded = "both"
    page = st.sampled_from(_PAGE_SIZES)
    layouts = st.sampled_from(ALIGNED_LAYOUTS if aligned else (*ALIGNED_LAYOUTS, "odd", "odd"))
    bound = st.integers(0, max(seq_q, seq_kv) + 1) | st.just(0)
    # Stats of bfloat16 are off by more than 1 among large logits, and gradients then meaningless.
    exact_stats = kind.stats != "bfloat16"
    logits = (1.0, 1.0, 1.0, 0.01, 10.0, 10.0, *([100.0, 1000.0] * exact_stats))
    offsets = (0.0, 0.0, 0.0, *([-120.0, 120.0] * exact_stats))
    len_dtype = st.sampled_from(("int32", "int32", "int64"))
    chosen_logits, offset = draw(st.sampled_from(logits)), draw(st.sampled_from(offsets))
    sinks = (0.0, -3.0, offset, offset + chosen_logits)
    axes = st.sampled_from(("bhqk", "bhqk", "hqk", "qk", "bk", "bq", "k", ""))
    probability = st.sampled_from((0.1, 0.1, 0.5, 0.9, 1e-5)) if kind.dropout else st.just(0.0)
    return replace(
        kind,
        batch=batch,
        heads_q=heads_q,
        heads_k=draw(divisors),
        heads_v=draw(divisors),
        seq_q=seq_q,
        seq_kv=seq_kv,
        softcap=None if kind.softcap is None else draw(st.sampled_from((0.5, 3.0, 30.0, 50.0))),
        alibi=draw(st.sampled_from(("H", "BH", "BH11"))) if kind.alibi == "H" else kind.alibi,
        bias_axes=draw(axes) if kind.bias else "bhqk",
        blocks=None if kind.blocks is None else draw(st.sampled_from((0.1, 0.5, 0.9))),
        blocks_axes=draw(st.sampled_from(("bh", "bh", "b", "h", ""))) if kind.blocks else "bh",
        blocks_layout=draw(st.sampled_from(("keys", "queries"))) if kind.blocks else "keys",
        left=None if kind.left is None else 1 + draw(bound),
        right=None if kind.right is None else draw(bound),
        bottom_right=draw(st.booleans()),
        len_q=draw(_lengths(batch, seq_q)) if padded in ("both", "q") else None,
        len_kv=draw(_lengths(batch, seq_kv)) if padded in ("both", "kv") else None,
        len_dtypes=draw(st.tuples(len_dtype, len_dtype)),
        page_k=kind.page_k and draw(page),
        page_v=kind.page_v and draw(page),
        packed_tables=draw(st.booleans()),
        ragged=draw(_ragged(kind)) if kind.ragged else (),
        gaps=draw(st.booleans()),
        lengths_as=draw(st.sampled_from(("tensors", "offsets"))),
        offset_dtype=draw(len_dtype),
        bounded=draw(st.booleans()),
        layouts=tuple(
            (role, layout) for role in ROLES if (layout := draw(layouts)) != ALIGNED_LAYOUTS[0]
        ),
        wild_strides=draw(st.booleans()),
        sink=None if kind.sink is None else draw(st.sampled_from(sinks)),
        dropout=draw(probability) if kind.is_random else kind.dropout,
        dropout_as=draw(st.sampled_from(("device", "device", "host", "value"))),
        dropout_dtypes=draw(st.tuples(len_dtype, len_dtype)),
        dropout_axes=draw(axes) if kind.dropout and not kind.is_random else "bhqk",
        rng_dump=kind.dropout is not None and draw(st.booleans()),
        logits=chosen_logits,
        offset=offset,
        tails=draw(st.sampled_from(("nan", "inf", "huge"))),
        seed=draw(st.integers(0, 2**16)),
    )


def _ragged(kind: Case) -> st.SearchStrategy[tuple[str, ...]]:
    """Some roles, of what is not paged; at least one."""
    some = st.sets(st.sampled_from(_RAGGED[0]), min_size=1)
    chosen = st.sampled_from(_RAGGED) | some.map(lambda roles: tuple(sorted(roles)))
    return chosen.map(lambda roles: tuple(r for r in roles if not kind.page(r)) or RAGGED_Q)


def _lengths(batch: int, longest: int) -> st.SearchStrategy[tuple[int, ...]]:
    length = st.sampled_from((longest, 0, longest)) | st.integers(1, longest)
    return st.tuples(*[length] * batch)
