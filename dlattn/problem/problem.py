"""What we know about one attention call.

A :class:`Problem` holds only what changes code, so that one compiled kernel serves every batch
size, head count, length, stride and scale. A :class:`Geometry` holds the run-time values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from dlattn.dtypes import data_type
from dlattn.problem.mask import Mask
from dlattn.problem.score import Alibi, Bias, Edit


class Direction(Enum):
    """Which pass a problem describes."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Problem:
    """Everything that changes the code of a kernel, and nothing else.

    Attributes:
        direction: forward, or backward.
        dtype: element type of q, k, v, o and their gradients.
        head_dim_qk: elements per head of q and k.
        head_dim_v: elements per head of v and o.
        edits: score edits, applied in order to each q.k product.
        masks: masks, all of which must keep a position for it to be attended.
        stats: element type of the log-sum-exp that the forward writes or the backward reads;
            ``None`` when a forward writes none.
        score_max, score_sum_exp: the forward writes them.
        sink: the forward's softmax has a sink; the backward writes its gradient (without that, the
            stats hold all that a backward needs of a sink).
        d_bias: element type of the bias's gradient, if the backward writes that.
        access_bytes: widest global-memory access that every tensor's strides and declared
            alignment allow (16), or 2 (one 16-bit element) when any does not.
        compute: type of the arithmetic, FLOAT or DOUBLE.
        deterministic: the same inputs give the same bits in every run; a forward always does.
    """

    direction: Direction
    dtype: data_type
    head_dim_qk: int
    head_dim_v: int
    edits: tuple[Edit, ...] = ()
    masks: tuple[Mask, ...] = ()
    stats: data_type | None = None
    score_max: bool = False
    score_sum_exp: bool = False
    sink: bool = False
    d_bias: data_type | None = None
    access_bytes: int = 16
    compute: data_type = data_type.FLOAT
    deterministic: bool = False

    @property
    def is_edited(self) -> bool:
        """Whether scores are more than scaled, which takes registers."""
        return len(self.edits) > 1

    @property
    def adds_to_scores(self) -> bool:
        """Whether what is added depends on positions, which takes registers."""
        return any(isinstance(edit, (Alibi, Bias)) for edit in self.edits)

    @property
    def has_bias(self) -> bool:
        """Whether an element of a bias is read for each score, which takes more registers."""
        return any(isinstance(edit, Bias) for edit in self.edits)

    @property
    def has_aligned_bias(self) -> bool:
        """Whether the copy engine can move tiles of the bias."""
        return any(isinstance(edit, Bias) and edit.aligned for edit in self.edits)

    @property
    def keeps_scores(self) -> bool:
        """Whether a backward needs scores beside probabilities, which takes registers."""
        return not all(edit.constant_derivative for edit in self.edits)


@dataclass(frozen=True)
class TensorSpec:
    """What the graph declared for one tensor, under the user's name for it.

    Attributes:
        name: the user's name, for messages.
        dim: shape.
        stride: strides in elements, one per dimension.
        dtype: element type.
        by_value: a host scalar, read at execute time.
    """

    name: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: data_type
    by_value: bool = False


@dataclass(frozen=True)
class Geometry:
    """The run-time values of a problem: sizes, strides, scale, window bounds.

    Attributes:
        tensors: role -> spec. Roles: ``q k v o stats score_max score_sum_exp dO dQ dK dV sink_token
            dSink_token attn_scale seq_len_q seq_len_kv bias dBias alibi_slopes``; an absent role is
            an absent feature.
        attn_scale: the scale when there is no ``attn_scale`` tensor.
        softcap: the bound of soft-capped scores, or None.
        band_left: cuDNN's left bound (keys with ``key + left > query + shift`` are kept), or None.
        band_right: cuDNN's right bound (keys with ``key <= query + shift + right``), or None.
        bottom_right: whether the diagonal ends in the bottom right corner:
            ``shift = seq_len_kv - seq_len_q``; else ``shift = 0``.
    """

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    attn_scale: float = 1.0
    band_left: int | None = None
    band_right: int | None = None
    bottom_right: bool = False
    softcap: float | None = None

    @property
    def batch(self) -> int:
        return self.tensors["q"].dim[0]

    @property
    def heads_q(self) -> int:
        return self.tensors["q"].dim[1]

    @property
    def heads_k(self) -> int:
        return self.tensors["k"].dim[1]

    @property
    def heads_v(self) -> int:
        return self.tensors["v"].dim[1]

    @property
    def seq_q(self) -> int:
        return self.tensors["q"].dim[2]

    @property
    def seq_kv(self) -> int:
        return self.tensors["k"].dim[2]
