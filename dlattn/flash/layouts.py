"""How FlashAttention lays tensors out: one shape for all sequences of a batch, or packed."""

from __future__ import annotations

from dataclasses import dataclass

from dlattn.calls.arguments import Laid, packed_spec, plain_spec
from dlattn.problem import QUERY_ROLES, TensorSpec
from dlattn.problem.problem import DELTA_GAP

#: Roles of tensors without columns.
_ROW_ROLES = ("stats", "delta")


@dataclass(frozen=True)
class Layout:
    """The sizes of a call.

    Attributes:
        batch: sequences.
        heads, heads_k: of q, and of k and v.
        seqlen_q, seqlen_k: the longest sequences.
        tokens_q, tokens_k: with packed sequences, the rows of q and of k that there are in all;
            of keys in pages ``None``.
        packed: sequences follow each other, as cumulative lengths say.
        paged: k and v lie in pages.
    """

    batch: int
    heads: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    tokens_q: int | None = None
    tokens_k: int | None = None
    packed: bool = False
    paged: bool = False

    def spec(self, role: str, it: Laid) -> TensorSpec:
        """A tensor of the call as its problem sees it."""
        if self.paged and role in ("k", "v"):
            return plain_spec(it, "bshd")
        if role == "debug_softmax":
            return plain_spec(it, "bhsd")
        letters = "hs" if role in _ROW_ROLES else "shd"
        if not self.packed:
            spec = plain_spec(it, "bhs" if role in _ROW_ROLES else "bshd")
            return _cut(spec, self.seqlen_q) if role == "delta" else spec
        longest = self.seqlen_q if role in QUERY_ROLES else self.seqlen_k
        # A bound beyond all tokens would cost scratch memory.
        tokens = self.tokens_q if role in QUERY_ROLES else self.tokens_k
        return packed_spec(it, letters, self.batch, min(longest, tokens or 0))

    def queries(self, columns: int) -> tuple[int, ...]:
        """The shape of q, out, and what is like them."""
        if self.packed:
            return (self.tokens_q or 0, self.heads, columns)
        return (self.batch, self.seqlen_q, self.heads, columns)

    def keys(self, columns: int) -> tuple[int, ...]:
        """The shape of k, v, and their gradients."""
        if self.packed:
            return (self.tokens_k or 0, self.heads_k, columns)
        return (self.batch, self.seqlen_k, self.heads_k, columns)

    @property
    def lse(self) -> tuple[int, ...]:
        """The shape of softmax_lse."""
        if self.packed:
            return (self.heads, self.tokens_q or 0)
        return (self.batch, self.heads, self.seqlen_q)

    @property
    def softmax_d(self) -> tuple[int, ...]:
        """The shape of softmax_d: of each sequence, up to 128 rows more."""
        if self.packed:
            return (self.heads, (self.tokens_q or 0) + DELTA_GAP * self.batch)
        return (self.batch, self.heads, -(-self.seqlen_q // DELTA_GAP) * DELTA_GAP)

    @property
    def debug_softmax(self) -> tuple[int, ...]:
        """The shape of debug_softmax: sequences up to multiples of 128 rows."""
        rows, columns = (-(-n // 128) * 128 for n in (self.seqlen_q, self.seqlen_k))
        return (self.batch, self.heads, rows, columns)

    @property
    def most_tokens_k(self) -> int | None:
        """What cumulative lengths of keys must not exceed."""
        return 2**31 - 1 if self.paged else self.tokens_k

    @property
    def is_empty(self) -> bool:
        """Whether there is no query, or no key."""
        queries = self.batch * self.heads * self.seqlen_q
        return 0 in (queries, self.tokens_q) or not self.has_keys

    @property
    def has_keys(self) -> bool:
        """Whether a sequence may have one."""
        return 0 not in (self.tokens_k, self.seqlen_k)

    def window(self, is_causal: bool, left: int, right: int) -> tuple[int | None, int | None]:
        """FlashAttention-2's window: how far before and after the diagonal keys may be.

        In its order: sizes from the longest sequence of keys on are no bound; a causal mask is a
        right size of 0; where one side alone is bounded, the other's size is the longest sequence
        of keys (which bounds queries that come long before the first key). ``None`` is a bound that
        no query feels.
        """
        left = -1 if left >= self.seqlen_k else left
        right = -1 if right >= self.seqlen_k else right
        right = 0 if is_causal else right
        if left < 0 and right < 0:
            return None, None
        right = self.seqlen_k if right < 0 else right
        return (
            None if not 0 <= left < self.seqlen_k - 1 else left,
            None if right >= self.seqlen_q - 1 else right,
        )


def _cut(spec: TensorSpec, rows: int) -> TensorSpec:
    """The first rows of a tensor that has more."""
    batch, heads, _, columns = spec.dim
    return TensorSpec(spec.name, (batch, heads, rows, columns), spec.stride, spec.dtype)
