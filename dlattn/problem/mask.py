"""Masks: which positions a query attends to.

A mask is the C++ type that kernels compose (``cuda_src/attn/mask.cuh``: the ranges of keys and
queries worth visiting, the range that needs no element test, and the element test itself) and its
NumPy twin, which is its definition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from dlattn.problem.score import Array, Values, Where
from dlattn.records import dataclass

#: Queries, and keys, of a block of a block mask.
BLOCK = 128


class Mask(ABC):
    """A predicate on (batch, head, query, key)."""

    @property
    @abstractmethod
    def cpp(self) -> str:
        """The C++ type in ``cuda_src/attn/mask.cuh``."""

    @abstractmethod
    def keep(self, where: Where, values: Values) -> Array:
        """True where a position is attended; broadcasts to (B, H, S_q, S_kv)."""


@dataclass(frozen=True)
class Padding(Mask):
    """Keeps positions inside the actual lengths; in every problem, because tiles overhang."""

    @property
    def cpp(self) -> str:
        return "Padding"

    def keep(self, where: Where, values: Values) -> Array:
        return (where.query < values.len_q) & (where.key < values.len_kv)


@dataclass(frozen=True)
class Band(Mask):
    """Keeps a diagonal band (cuDNN's ``diagonal_band_*_bound``): causal masks, sliding windows.

    Attributes:
        left: there is a left bound.
        right: there is a right bound.
        corner_as_given: the bottom right corner is that of lengths as they were given, which may be
            more than there are rows; else of actual lengths.
    """

    left: bool
    right: bool
    corner_as_given: bool = False

    @property
    def cpp(self) -> str:
        return f"Band<{str(self.left).lower()}, {str(self.right).lower()}>"

    def keep(self, where: Where, values: Values) -> Array:
        shift: Array | int = values.len_kv - values.len_q if values.bottom_right else 0
        if self.corner_as_given:
            assert values.given_shift is not None
            shift = values.given_shift.reshape(-1)[where.batch]
        diagonal = where.query + shift
        kept = where.key == where.key
        if self.left:
            assert values.band_left is not None
            kept = kept & (where.key + values.band_left > diagonal)
        if self.right:
            assert values.band_right is not None
            kept = kept & (where.key <= diagonal + values.band_right)
        return kept


@dataclass(frozen=True)
class BlockMask(Mask):
    """Keeps blocks of 128 queries and 128 keys (cuDNN's ``block_mask``): a bit each, of a byte the
    lowest first."""

    @property
    def cpp(self) -> str:
        return "BlockMask"

    def keep(self, where: Where, values: Values) -> Array:
        mask = values.block_mask
        assert mask is not None
        batch, heads = mask.shape[:2]
        block = where.key // BLOCK
        byte = mask[where.batch % batch, where.head % heads, where.query // BLOCK, block // 8]
        kept: Array = (byte >> (block % 8)) % 2 == 1
        return kept
