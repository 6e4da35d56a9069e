"""What a function asks for, in words that all functions share, and the problem that it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlattn.dtypes import data_type, itemsize
from dlattn.problem import (
    PAGE_TABLES,
    Alibi,
    Band,
    Bias,
    Direction,
    Dropout,
    Edit,
    Geometry,
    Mask,
    Padding,
    Problem,
    Scale,
    SoftCap,
    TensorSpec,
)
from dlattn.problem.layout import FARTHEST, IO_ROLES, WIDEST_ACCESS, is_wide


@dataclass(frozen=True)
class Request:
    """One call of attention.

    Attributes:
        direction: forward, or backward.
        tensors: role -> spec, as of a :class:`dlattn.problem.Geometry`.
        attn_scale: of the scores.
        window: how far before and after the diagonal keys may be, both included; ``None`` is any
            distance.
        bottom_right: the diagonal ends in the bottom right corner.
        softcap: bound of the scores; ``None`` is none.
        bias: how the bias lies in memory, if there is one.
        dropout: how probabilities are dropped; ``None`` when none is.
        numbers: what else a geometry has of dropout, such as ``dropout_p``.
        flash_stats, deterministic: as of a :class:`dlattn.problem.Problem`.
        max_seq_kv, most_tokens_q, most_tokens_kv: as of a :class:`dlattn.problem.Geometry`.
        aligned: every address is a multiple of 16 bytes.
    """

    direction: Direction
    tensors: Mapping[str, TensorSpec]
    attn_scale: float
    window: tuple[int | None, int | None] = (None, None)
    bottom_right: bool = True
    softcap: float | None = None
    bias: Bias | None = None
    dropout: Dropout | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    flash_stats: bool = False
    deterministic: bool = False
    max_seq_kv: int | None = None
    most_tokens_q: int | None = None
    most_tokens_kv: int | None = None
    aligned: bool = True

    @property
    def problem(self) -> Problem:
        """What changes code."""
        tensors = self.tensors
        q, v, stats = tensors["q"], tensors["v"], tensors.get("stats")
        backward = self.direction is Direction.BACKWARD
        return Problem(
            direction=self.direction,
            dtype=q.dtype,
            head_dim_qk=q.dim[3],
            head_dim_v=v.dim[3],
            edits=self._edits,
            masks=self._masks,
            stats=None if stats is None else stats.dtype,
            sink=("dSink_token" if backward else "sink_token") in tensors,
            dropout=self.dropout,
            paged_k=PAGE_TABLES["k"] in tensors,
            paged_v=PAGE_TABLES["v"] in tensors,
            d_bias=tensors["dBias"].dtype if "dBias" in tensors else None,
            access_bytes=self._access_bytes,
            deterministic=self.deterministic,
            ragged=any(spec.ragged for spec in tensors.values()),
            flash_stats=self.flash_stats and not backward,
            delta="delta" in tensors,
            d_stats="dStats" in tensors,
        )

    @property
    def geometry(self) -> Geometry:
        """What does not."""
        left, right = self._bounds
        return Geometry(
            tensors=self.tensors,
            attn_scale=self.attn_scale,
            # cuDNN's left bound is the first distance that is too far.
            band_left=None if left is None else left + 1,
            band_right=right,
            bottom_right=self.bottom_right,
            softcap=self.softcap,
            max_seq_kv=self.max_seq_kv,
            most_tokens_q=self.most_tokens_q,
            most_tokens_kv=self.most_tokens_kv,
            **self.numbers,
        )

    @property
    def _bounds(self) -> tuple[int | None, int | None]:
        left, right = (None if size is None else min(size, FARTHEST) for size in self.window)
        return left, right

    @property
    def _edits(self) -> tuple[Edit, ...]:
        edits: list[Edit] = [Scale.by(self.attn_scale)]
        if self.softcap is not None:
            edits.append(SoftCap())
        if self.bias is not None:
            edits.append(self.bias)
        if "alibi_slopes" in self.tensors:
            edits.append(Alibi(symmetric=True))
        return tuple(edits)

    @property
    def _masks(self) -> tuple[Mask, ...]:
        left, right = (bound is not None for bound in self._bounds)
        return (Padding(), Band(left, right)) if left or right else (Padding(),)

    @property
    def _access_bytes(self) -> int:
        io = [self.tensors[role] for role in IO_ROLES if role in self.tensors]
        alignment = WIDEST_ACCESS if self.aligned else itemsize(io[0].dtype)
        wide = all(_has_wide_rows(spec, alignment) for spec in io)
        return WIDEST_ACCESS if wide else itemsize(io[0].dtype)


def _has_wide_rows(spec: TensorSpec, alignment: int) -> bool:
    # Sequences begin at any token, even where none has two.
    tokens = spec.stride[2] * itemsize(spec.dtype) if spec.ragged else 0
    wide = is_wide(spec.dim, spec.stride, spec.dtype, alignment, spec.ragged)
    return wide and tokens % WIDEST_ACCESS == 0


#: Element types of q, k and v: those of the kernels, and those that the CPU has beside them.
KERNEL_TYPES = (data_type.HALF, data_type.BFLOAT16)
CPU_TYPES = (*KERNEL_TYPES, data_type.FLOAT, data_type.DOUBLE)
