"""Expressions of positions, and what comparisons of them mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dlattn.graph.tensor import tensor
from dlattn.records import dataclass


@dataclass(frozen=True)
class Affine:
    """``row * query + col * key + const``, and the sum of lengths, each times a factor."""

    row: int = 0
    col: int = 0
    const: int = 0
    lengths: Mapping[tensor, int] = field(default_factory=dict)

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """``self + times * other``."""
        lengths = dict(self.lengths)
        for t, factor in other.lengths.items():
            lengths[t] = lengths.get(t, 0) + times * factor
        return Affine(
            self.row + times * other.row,
            self.col + times * other.col,
            self.const + times * other.const,
            {t: factor for t, factor in lengths.items() if factor},
        )

    @property
    def is_const(self) -> bool:
        """Whether there is nothing but the constant."""
        return self.row == self.col == 0 and not self.lengths


ROW, COL = Affine(row=1), Affine(col=1)
_ONE = Affine(const=1)


@dataclass(frozen=True)
class Predicate:
    """Which positions are true.

    Attributes:
        conditions: expressions that are to be at least 0.
        masks: boolean tensors that are to be true.
        every: all of them must be; else any.
    """

    conditions: tuple[Affine, ...] = ()
    masks: tuple[tensor, ...] = ()
    every: bool = True

    @property
    def is_single(self) -> bool:
        """Whether it is no matter if all must be true or any."""
        return len(self.conditions) + len(self.masks) == 1

    def joined(self, other: Predicate, every: bool) -> Predicate | None:
        """Both (``every``) or either; ``None`` if that is neither all of a list nor any."""
        if any(x.every is not every and not x.is_single for x in (self, other)):
            return None
        return Predicate(self.conditions + other.conditions, self.masks + other.masks, every)

    def negated(self) -> Predicate | None:
        """Where it is false; ``None`` with masks, which are tensors."""
        if self.masks:
            return None
        negative = tuple(Affine(const=-1).plus(x, -1) for x in self.conditions)
        return Predicate(negative, (), not self.every)


def comparison(operation: str, x: Affine, y: Affine) -> Predicate | None:
    """``cmp_ge`` and the like of two expressions; ``None`` of ``cmp_eq`` and ``cmp_neq``."""
    if operation in ("cmp_le", "cmp_lt"):
        x, y = y, x
    if operation in ("cmp_ge", "cmp_le"):
        return Predicate((x.plus(y, -1),))
    if operation in ("cmp_gt", "cmp_lt"):
        return Predicate((x.plus(y, -1).plus(_ONE, -1),))
    return None


@dataclass(frozen=True)
class Band:
    """The masks of attention that conditions mean together, as arguments of ``sdpa``."""

    seq_len_q: tensor | None = None
    seq_len_kv: tensor | None = None
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    @property
    def corner_as_given(self) -> bool:
        """Whether the bottom right corner is measured from lengths of tensors: as they are, where
        arguments count no more than the rows that there are."""
        has_lengths = self.seq_len_q is not None or self.seq_len_kv is not None
        return self.bottom_right and has_lengths


def band(conditions: tuple[Affine, ...], seq_q: int, seq_kv: int) -> Band | None:
    """Lengths and diagonals; ``None`` if some condition is neither, or there are two of a kind."""
    of_kind: dict[tuple[int, int], Affine] = {}
    for condition in conditions:
        kind = condition.row, condition.col
        if of_kind.setdefault(kind, condition) != condition:
            return None
    lengths = {}
    for side, kind in (("q", (-1, 0)), ("kv", (0, -1))):
        # position < length is length - position - 1 >= 0.
        limit = of_kind.pop(kind, Affine())
        if limit != Affine():
            if limit.const != -1 or list(limit.lengths.values()) != [1]:
                return None
            (lengths[side],) = limit.lengths
    right, left = of_kind.pop((1, -1), None), of_kind.pop((-1, 1), None)
    if of_kind:
        return None
    q, kv = (
        Affine(lengths={lengths[side]: 1}) if side in lengths else Affine(const=size)
        for side, size in (("q", seq_q), ("kv", seq_kv))
    )
    for bottom_right, shift in ((False, Affine()), (True, kv.plus(q, -1))):
        # key <= query + shift + right, and key + left > query + shift.
        diagonal = ROW.plus(COL, -1).plus(shift)
        above = None if right is None else right.plus(diagonal, -1)
        below = None if left is None else left.plus(diagonal).plus(_ONE)
        bounds = [x for x in (above, below) if x is not None]
        fits = all(x.is_const for x in bounds)
        if fits and (above is None or above.const >= 0) and (below is None or below.const >= 1):
            return Band(
                lengths.get("q"),
                lengths.get("kv"),
                None if below is None else below.const,
                None if above is None else above.const,
                bottom_right,
            )
    return None
