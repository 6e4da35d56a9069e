"""One attention call, as data: every feature of dlattn has a field."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tests.score_mods import TENSORS, names_in

#: Roles of tensors that may be ragged, by the lengths that their entries have.
RAGGED_Q = ("q", "o", "stats", "score_max", "score_sum_exp", "dO", "dQ")
RAGGED_KV = ("k", "v", "dK", "dV")


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
        bias_layout: ``"keys"`` if keys are its last axis in memory, ``"queries"`` if queries are,
            ``"aligned"`` if keys are and each row begins at 16 bytes (of 16-bit elements).
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
        dropout_algorithm: how Philox is used; ``None`` leaves the argument out, which is
            ``"philox"``.
        dropout_as: how seed and offset, or the mask's scales, are given: ``"value"`` (Python
            numbers), ``"host"`` (tensors passed by value) or ``"device"``.
        dropout_dtypes: integer types of seed and offset.
        dropout_axes, dropout_layout: of the mask, as of the bias.
        rng_dump: forward and backward write the mask.
        debug_softmax: the forward writes signed probabilities, if it writes stats.
        score_mod: a function of scores, and what it masks, as trees of :mod:`tests.score_mods`, the
            second perhaps ``None``; or ``None``.
        d_mods: element type of the gradients of the floats that the function reads; ``None`` for
            none.
        logits: about the standard deviation of the scaled scores.
        offset: what is added to every scaled score, through the first column of q and k.
        numbers: what q, k, v, dO and the bias hold: ``"normal"`` ones, or ``"sparse"`` ones: small
            integers, most of them 0, of which those of q and k are multiplied by a power of 2.
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
    dropout_algorithm: str | None = None
    dropout_as: str = "device"
    dropout_dtypes: tuple[str, str] = ("int64", "int64")
    dropout_axes: str = "bhqk"
    dropout_layout: str = "keys"
    rng_dump: bool = False
    debug_softmax: bool = False
    score_mod: tuple[Any, Any] | None = None
    d_mods: str | None = None
    logits: float = 1.0
    offset: float = 0.0
    numbers: str = "normal"
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
    def looks_inside(self) -> bool:
        """Whether ``debug_softmax`` is written."""
        return self.debug_softmax and self.stats is not None

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

    @property
    def probability(self) -> float:
        """To drop, as the algorithm computes with it."""
        assert isinstance(self.dropout, float)
        flash = self.dropout_algorithm == "flash"
        return float(np.float32(self.dropout)) if flash else self.dropout

    def dropout_scale(self) -> float:
        """What kept probabilities are multiplied by: any number if none is; of a mask, float32 has
        its inverse exactly."""
        if isinstance(self.dropout, float) and self.dropout_algorithm == "flash":
            return 1 / float(1 - np.float32(self.dropout))
        if isinstance(self.dropout, float):
            return 1 / (1 - self.dropout) if self.dropout < 1 else 1.0
        return 1.0 if self.dropout is None else 2.0

    def mod_dims(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that the function of scores reads, by name."""
        if self.score_mod is None:
            return {}
        names = set().union(*map(names_in, self.score_mod))
        return {name: self._broadcast_dim(TENSORS[name][0]) for name in sorted(names)}

    def mod_gradients(self) -> tuple[str, ...]:
        """The names of those of which gradients are written."""
        floats = (name for name in self.mod_dims() if "float" in TENSORS[name][1])
        return tuple(floats) if self.d_mods else ()

    def added_axes(self) -> dict[str, str]:
        """Gradients of what is added to or read by scores -> axes that are not of size 1."""
        found = {f"d_mod_{name}": TENSORS[name][0] for name in self.mod_gradients()}
        return found | ({"dBias": self.bias_axes} if self.d_bias else {})

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
            **{f"d_mod_{name}": self.mod_dims()[name] for name in self.mod_gradients()},
        }


def _gapped_stride(dim: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """With gaps after each head, or each row."""
    _, h, q, k = dim
    if layout == "aligned":
        row = -(-k // 16) * 16  # of booleans, 16 bytes
        return (h * q * row, q * row, row, 1)
    head = q * k + 3
    return (h * head, head, *((k, 1) if layout == "keys" else (1, q)))
