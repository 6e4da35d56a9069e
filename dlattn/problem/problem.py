"""What we know about one attention call.

A :class:`Problem` holds only what changes code, so that one compiled kernel serves every batch
size, head count, length, stride and scale. A :class:`Geometry` holds the run-time values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from enum import Enum
from math import gcd

from dlattn.dtypes import data_type
from dlattn.problem.dropout import Dropout
from dlattn.problem.mask import Band, BlockMask, Mask
from dlattn.problem.score import Alibi, Bias, Edit, SoftCap
from dlattn.problem.score_blocks import ScoreBlocks
from dlattn.problem.score_program import SCORE_MOD_ROLES, ScoreGradient, ScoreProgram
from dlattn.records import dataclass

#: Roles of one number each, on the device or the host.
SCALAR_ROLES = (
    *("attn_scale", "dropout_seed", "dropout_offset", "dropout_scale", "dropout_scale_inv"),
)

#: Roles that broadcast to (B, H, S_q, S_kv), with any strides.
BROADCAST_ROLES = ("bias", "dropout_mask", *SCORE_MOD_ROLES)
#: Whose rows may be paged -> the role of the table that says where the pages are.
PAGE_TABLES = {"k": "paged_attention_k_table", "v": "paged_attention_v_table"}

#: Roles of tensors with a row for each query of each head.
QUERY_ROLES = ("q", "o", "stats", "score_max", "score_sum_exp", "dO", "dStats", "dQ", "delta")

#: Roles of tensors that may be ragged.
RAGGED_ROLES = (*QUERY_ROLES, "k", "v", "dK", "dV")


#: Rows between one sequence's delta and the next one's, where offsets count tokens.
DELTA_GAP = 128


def cu_seqlens_role(role: str) -> str:
    """The role of the cumulative lengths that say where a ragged tensor's sequences begin."""
    return "cu_seqlens_q" if role in QUERY_ROLES else "cu_seqlens_kv"


def offset_role(role: str) -> str:
    """The role of a tensor's ragged offset."""
    return f"{role}_offset"


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
        flash_stats: the stats of a row that attends to nothing are +inf, as in FlashAttention-2,
            and not -inf, as in cuDNN; backwards read both as that.
        score_max, score_sum_exp: the forward writes them.
        delta: the backward writes ``rowsum(dO * O)``, in fp32, over what kept probabilities are
            multiplied by.
        d_stats: the backward reads the gradient of the stats, in fp32: what they are used for
            beside their own backward.
        sink: the forward's softmax has a sink; the backward writes its gradient (without that, the
            stats hold all that a backward needs of a sink).
        dropout: how probabilities are dropped after the softmax; ``None`` when none is.
        paged_k, paged_v: the rows of k, of v, and of their gradients lie in pages.
        d_bias: element type of the bias's gradient, if the backward writes that.
        score_gradients: those that the backward writes, of tensors that a user's function reads.
        access_bytes: widest global-memory access that every tensor's strides and declared
            alignment allow (16), or 2 (one 16-bit element) when any does not.
        compute: type of the arithmetic, FLOAT or DOUBLE.
        deterministic: the same inputs give the same bits in every run; a forward always does.
        ragged: some tensor is ragged; which ones, only the device asks.
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
    dropout: Dropout | None = None
    paged_k: bool = False
    paged_v: bool = False
    d_bias: data_type | None = None
    score_gradients: tuple[ScoreGradient, ...] = ()
    access_bytes: int = 16
    compute: data_type = data_type.FLOAT
    deterministic: bool = False
    ragged: bool = False
    flash_stats: bool = False
    delta: bool = False
    d_stats: bool = False

    @property
    def is_edited(self) -> bool:
        """Whether scores are more than scaled, which takes registers."""
        return len(self.edits) > 1

    @property
    def adds_to_scores(self) -> bool:
        """Whether what is added depends on positions, which takes registers."""
        return any(isinstance(edit, (Alibi, Bias, ScoreProgram)) for edit in self.edits)

    @property
    def has_bias(self) -> bool:
        """Whether an element of a bias, or what a user's function reads and computes, is at hand
        for each score, which takes more registers."""
        return any(isinstance(edit, (Bias, ScoreProgram)) for edit in self.edits)

    @property
    def bias(self) -> Bias | None:
        """What is added to scores, or drops some of them."""
        return next((edit for edit in self.edits if isinstance(edit, Bias)), None)

    @property
    def has_aligned_bias(self) -> bool:
        """Whether the copy engine can move tiles of the bias."""
        return self.bias is not None and self.bias.aligned

    @property
    def has_aligned_rows(self) -> bool:
        """The same, and each query has a row of its own."""
        return self.bias is not None and self.bias.aligned and not self.bias.one_row

    @property
    def bands(self) -> tuple[Band, ...]:
        """The masks that keep a diagonal band."""
        return tuple(mask for mask in self.masks if isinstance(mask, Band))

    @property
    def corner_as_given(self) -> bool:
        """Whether a band is measured from lengths as they were given: kernels then know one more
        number, and have other source text."""
        return any(band.corner_as_given for band in self.bands)

    @property
    def has_blocks(self) -> bool:
        """Whether a mask drops whole blocks, which tiles must divide."""
        return any(isinstance(mask, BlockMask) for mask in self.masks)

    @property
    def score_blocks(self) -> ScoreBlocks | None:
        """What drops blocks that a user's function masks."""
        return next((mask for mask in self.masks if isinstance(mask, ScoreBlocks)), None)

    @property
    def without_score_blocks(self) -> Problem:
        """The same attention with no block dropped for a user's function."""
        if self.score_blocks is None:
            return self
        masks = tuple(mask for mask in self.masks if not isinstance(mask, ScoreBlocks))
        return replace(self, edits=self.masked_by_edits.edits, masks=masks)

    @property
    def masked_apart(self) -> Problem:
        """The same attention where what a user's function masks is a mask, and no edit."""
        blocks = self.score_blocks
        if blocks is None or blocks.elements or not blocks.conditions:
            return self
        rest = () if blocks.rest is None else (blocks.rest,)
        at = self.edits.index(blocks.program)
        return self._with_program((*self.edits[:at], *rest, *self.edits[at + 1 :]), blocks, True)

    @property
    def masked_by_edits(self) -> Problem:
        """The same attention where an edit is all that a user's function says."""
        blocks = self.score_blocks
        if blocks is None or not blocks.elements:
            return self
        others = tuple(edit for edit in self.edits if not isinstance(edit, ScoreProgram))
        at = 1 + sum(isinstance(edit, SoftCap) for edit in others)
        return self._with_program((*others[:at], blocks.program, *others[at:]), blocks, False)

    def _with_program(
        self, edits: tuple[Edit, ...], blocks: ScoreBlocks, elements: bool
    ) -> Problem:
        new = replace(blocks, elements=elements)
        masks = tuple(new if mask is blocks else mask for mask in self.masks)
        return replace(self, edits=edits, masks=masks)

    @property
    def keeps_scores(self) -> bool:
        """Whether a backward needs scores beside probabilities, which takes registers."""
        return not all(edit.constant_derivative for edit in self.edits)

    @property
    def has_program(self) -> bool:
        """Whether a user's function makes something of scores."""
        return any(isinstance(edit, ScoreProgram) for edit in self.edits)

    @property
    def gathers(self) -> bool:
        """Whether a user's function reads elements of its own for queries or keys."""
        return any(isinstance(edit, ScoreProgram) and edit.gathers for edit in self.edits)

    @property
    def reads_tables(self) -> bool:
        """Whether a user's function reads tensors of both queries and keys."""
        programs = (edit for edit in self.edits if isinstance(edit, ScoreProgram))
        return any(read.by_query and read.by_key for it in programs for read in it.reads)

    @property
    def bends_scores(self) -> bool:
        """Whether the derivative of the edits may be negative: signs of weights then tell nothing
        of dropout."""
        return any(
            isinstance(edit, ScoreProgram) and not edit.constant_derivative for edit in self.edits
        )

    @property
    def steepest(self) -> float:
        """What a user's function multiplies a gradient by at most; infinite if nothing tells."""
        programs = (edit for edit in self.edits if isinstance(edit, ScoreProgram))
        return max((edit.steepest for edit in programs), default=1.0)


@dataclass(frozen=True)
class TensorSpec:
    """What the graph declared for one tensor, under the user's name for it.

    Attributes:
        name: the user's name, for messages.
        dim: shape.
        stride: strides in elements, one per dimension.
        dtype: element type.
        by_value: a host scalar, read at execute time.
        ragged: batch entry b begins at element ``offset[b]``, of the tensor whose role is
            :func:`offset_role`, or if there is none at row ``cu_seqlens[b]``, of
            :func:`cu_seqlens_role` (delta's: :data:`DELTA_GAP` rows later for each entry before;
            with cumulative lengths, no tensor of that side may have offsets), and holds as many
            rows as its length; its batch stride is 0 here.
        packed: the same of a page table, whose entries are as many as the sequence has pages.
    """

    name: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: data_type
    by_value: bool = False
    ragged: bool = False
    packed: bool = False


@dataclass(frozen=True)
class Geometry:
    """The run-time values of a problem: sizes, strides, scale, window bounds.

    Attributes:
        tensors: role -> spec. Roles: ``q k v o stats score_max score_sum_exp dO dStats dQ dK dV
            sink_token dSink_token attn_scale seq_len_q seq_len_kv bias dBias alibi_slopes
            block_mask paged_attention_k_table paged_attention_v_table dropout_seed dropout_offset
            dropout_mask dropout_scale dropout_scale_inv rng_dump debug_softmax delta cu_seqlens_q
            cu_seqlens_kv``, those of :data:`SCORE_MOD_ROLES` and
            :data:`dlattn.problem.SCORE_GRADIENT_ROLES`, and the :func:`offset_role` of each ragged
            tensor and packed table; an absent role is an absent feature. ``cu_seqlens_kv`` tells
            lengths of paged keys, too.
        attn_scale: the scale when there is no ``attn_scale`` tensor.
        softcap: the bound of soft-capped scores, or None.
        band_left: cuDNN's left bound (keys with ``key + left > query + shift`` are kept), or None.
        band_right: cuDNN's right bound (keys with ``key <= query + shift + right``), or None.
        bottom_right: whether the diagonal ends in the bottom right corner:
            ``shift = seq_len_kv - seq_len_q``; else ``shift = 0``.
        dropout_p: the probability to drop, of Philox.
        dropout_seed, dropout_offset, dropout_scale, dropout_scale_inv: what they are when there is
            no tensor of that name; see :class:`dlattn.problem.Values`.
        max_seq_kv: the longest sequence of keys where k, or v, is paged, and so does not say it.
        most_tokens_q, most_tokens_kv: bounds of the sums of all lengths, or None; with cumulative
            lengths, the rows that tensors have in all, none of which may be left.
    """

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    attn_scale: float = 1.0
    band_left: int | None = None
    band_right: int | None = None
    bottom_right: bool = False
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    dropout_offset: int = 0
    dropout_scale: float = 1.0
    dropout_scale_inv: float = 1.0
    max_seq_kv: int | None = None
    most_tokens_q: int | None = None
    most_tokens_kv: int | None = None

    @property
    def has_ragged(self) -> bool:
        """Whether some tensor is ragged."""
        return any(spec.ragged for spec in self.tensors.values())

    @property
    def has_lengths(self) -> bool:
        """Whether a tensor says how long sequences are."""
        return not {"seq_len_q", "seq_len_kv"}.isdisjoint(self.tensors)

    def by_tokens(self, role: str) -> bool:
        """Whether the tensor is there, and ragged by cumulative lengths."""
        return self.is_ragged(role) and offset_role(role) not in self.tensors

    def is_ragged(self, role: str) -> bool:
        """Whether the tensor is there, and ragged."""
        return role in self.tensors and self.tensors[role].ragged

    def most_tokens(self, role: str) -> int | None:
        """A bound of the sum of all lengths of a tensor, or None."""
        return self.most_tokens_q if role in QUERY_ROLES else self.most_tokens_kv

    @property
    def batch(self) -> int:
        return self.tensors["q"].dim[0]

    @property
    def heads_together(self) -> int:
        """Query heads that share both a head of K and one of V."""
        return gcd(self.heads_q // self.heads_k, self.heads_q // self.heads_v)

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
        return self.tensors["k"].dim[2] if self.max_seq_kv is None else self.max_seq_kv

    def page_size(self, role: str) -> int | None:
        """Rows of a page of k or of v, whose container is (pages, heads, rows of a page, head
        dim); ``None`` where it is not paged."""
        return self.tensors[role].dim[2] if PAGE_TABLES[role] in self.tensors else None

    @property
    def rows_kv(self) -> int:
        """Rows of dK and dV that a sequence may have: of whole pages."""
        pages = (self.page_size(role) or 1 for role in PAGE_TABLES)
        return max(-(-self.seq_kv // page) * page for page in pages)
