"""What of a ``score_mod`` are edits and masks that kernels have: those skip what is masked, and
compute the rest faster.

From the outside in: selections of scores, or else -inf, by comparisons of positions are lengths and
a diagonal band; a tensor of slopes times ``key - query``, added, is ALiBi. Innermost,
``c * tanh(score / c)`` is a soft cap. All else stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dlattn.dtypes import data_type
from dlattn.graph.nodes import AttentionNode, Diagonal
from dlattn.graph.pages import max_seq_kv
from dlattn.graph.primitives.positions import COL, ROW, Affine, Band, Predicate, band, comparison
from dlattn.graph.tensor import tensor
from dlattn.problem.expressions import Builder
from dlattn.problem.lines import Kind, Number, needed
from dlattn.problem.score import SOFTCAPS
from dlattn.records import dataclass

_COMPARISONS = ("cmp_ge", "cmp_gt", "cmp_le", "cmp_lt")
_LENGTHS = {"q": "seq_len_q", "kv": "seq_len_kv"}


@dataclass(frozen=True)
class Found:
    """A node that has what was recognised, and the result of what remains of the program.

    Attributes:
        slopes: what the program reads no more, because it is the slopes of the node.
    """

    node: AttentionNode
    result: int
    slopes: tensor | None


def recognised(
    node: AttentionNode,
    builder: Builder,
    result: int,
    reads: Sequence[tensor],
    masks_alone: bool,
    wanted: Sequence[tensor] = (),
) -> Found:
    """A node with as much of a program as it has arguments for.

    Args:
        result: the line that is the new score.
        reads: the tensors that reads are numbers of.
        masks_alone: leave what has a derivative of its own: the user gave that of the program.
        wanted: tensors of which gradients are wanted: slopes are left to the program if anything
            else of it reads them.
    """
    reader = _Reader(node, builder, reads, masks_alone, wanted)
    result = reader.peeled(result)
    if not masks_alone:
        result = reader.without_cap(result)
    return Found(reader.node, result, reader.slopes)


class _Reader:
    def __init__(
        self,
        node: AttentionNode,
        builder: Builder,
        reads: Sequence[tensor],
        masks_alone: bool,
        wanted: Sequence[tensor],
    ) -> None:
        self.node = node
        self.slopes: tensor | None = None
        self._builder = builder
        self._reads = reads
        self._masks_alone = masks_alone
        self._wanted = wanted
        self._lengths = self._known_lengths()
        self._conditions: tuple[Affine, ...] = ()

    # Masks ------------------------------------------------------------------------------------

    def peeled(self, line: int) -> int:
        """A program without what the node got of it."""
        it = self._builder.lines[line]
        if it.operation == "binary_select":
            x, y, mask = it.operands
            if self._builder.value(y) == -math.inf:
                return self._masked(x, mask, negated=False)
            if self._builder.value(x) == -math.inf:
                return self._masked(y, mask, negated=True)
        if it.operation in ("add", "sub") and not self._masks_alone:
            return self._without_slopes(line)
        return line

    def _masked(self, x: int, mask: int, negated: bool) -> int:
        rest = []
        for part, is_negated in self._conjuncts(mask, negated):
            if not self._takes(part, is_negated):
                part = self._builder.pointwise("logical_not", part) if is_negated else part
                rest.append(part)
        x = self.peeled(x)
        if not rest:
            return x
        kept = rest[0]
        for part in rest[1:]:
            kept = self._builder.pointwise("logical_and", kept, part)
        return self._builder.pointwise("binary_select", x, self._builder.constant(-math.inf), kept)

    def _conjuncts(self, line: int, negated: bool) -> list[tuple[int, bool]]:
        """What must all be true, or false."""
        it = self._builder.lines[line]
        if it.operation == "logical_not":
            return self._conjuncts(it.operands[0], not negated)
        if it.operation == ("logical_or" if negated else "logical_and"):
            return [part for x in it.operands for part in self._conjuncts(x, negated)]
        return [(line, negated)]

    def _takes(self, line: int, negated: bool) -> bool:
        """Whether the node has such a mask, which it then gets."""
        it = self._builder.lines[line]
        if it.operation not in _COMPARISONS:
            return False
        x, y = (self._affine(operand) for operand in it.operands)
        found = None if x is None or y is None else comparison(it.operation, x, y)
        if found is not None and negated:
            found = found.negated()
        if found is None or not isinstance(found, Predicate):
            return False
        conditions = (*self._conditions, *found.conditions)
        *_, seq_q, _ = self.node.inputs["q"].attributes.dim
        bounds = band((*self._lengths, *conditions), seq_q, max_seq_kv(self.node))
        node = None if bounds is None else self._with(bounds)
        if node is None:
            return False
        self.node, self._conditions = node, conditions
        return True

    def _known_lengths(self) -> tuple[Affine, ...]:
        """The node's own, as conditions: position < length."""
        first = {"q": Affine(row=-1, const=-1), "kv": Affine(col=-1, const=-1)}
        return tuple(
            condition.plus(Affine(lengths={self.node.inputs[_LENGTHS[side]]: 1}))
            for side, condition in first.items()
            if _LENGTHS[side] in self.node.inputs
        )

    def _with(self, bounds: Band) -> AttentionNode | None:
        """The node with masks, if it has room for them."""
        node = self.node
        inputs = dict(node.inputs)
        for role, t in (("seq_len_q", bounds.seq_len_q), ("seq_len_kv", bounds.seq_len_kv)):
            if t is not None and node.inputs.get(role) is not t:
                if not self._is_length(t) or self._follows(role):
                    return None
                inputs[role] = t
        padding = node.padding or bounds.seq_len_q is not None or bounds.seq_len_kv is not None
        diagonal = self._joined(
            Diagonal(bounds.left, bounds.right, bounds.bottom_right, bounds.corner_as_given)
        )
        # Of lengths that only offsets tell, nobody knows where the corner is.
        unknown = self._has_ragged and not {*_LENGTHS.values()} <= inputs.keys()
        if diagonal is None or (bounds.bottom_right and unknown):
            return None
        if bounds.corner_as_given and self._has_ragged:
            return None  # whose lengths kernels read as they have cut them
        return replace(node, inputs=inputs, padding=padding, diagonal=diagonal)

    def _follows(self, role: str) -> bool:
        """Whether another length would change more of the node than which positions are masked."""
        node, diagonal = self.node, self.node.diagonal
        bounded = diagonal.left is not None or diagonal.right is not None
        by_corner = diagonal.bottom_right and bounded
        by_steps = "alibi_slopes" in node.inputs and not node.alibi
        # Rows beyond their length have no statistics; those that attend to nothing, their sink's.
        by_rows = role == "seq_len_q" and "sink_token" in node.inputs
        return by_corner or by_steps or by_rows

    def _joined(self, found: Diagonal) -> Diagonal | None:
        """What both the node's diagonal and another one keep."""
        own = self.node.diagonal
        if found.left is None and found.right is None:
            return own
        if own.left is None and own.right is None:
            return found
        corners = {(x.bottom_right, x.corner_as_given) for x in (own, found)}
        if len(corners) > 1:
            return None
        left, right = (
            min((x for x in pair if x is not None), default=None)
            for pair in ((own.left, found.left), (own.right, found.right))
        )
        return replace(own, left=left, right=right)

    def _is_length(self, t: tensor) -> bool:
        """Whether a tensor may be an argument: nothing else tells lengths."""
        it, batch = t.attributes, self.node.inputs["q"].attributes.dim[0]
        told = self._has_ragged
        return (
            it.dim == (batch, 1, 1, 1)
            and (batch == 1 or it.stride[0] == 1)
            and it.dtype in (data_type.INT32, data_type.INT64)
            and not (it.is_pass_by_value or told or self.node.max_seq_kv)
        )

    @property
    def _has_ragged(self) -> bool:
        return any(map(self.node.is_ragged, ("q", "k", "v")))

    # Positions --------------------------------------------------------------------------------

    def _affine(self, line: int) -> Affine | None:
        """A sum of positions, lengths and whole numbers."""
        it, builder = self._builder.lines[line], self._builder
        if it.operation == "position" and it.number in (2, 3):
            return ROW if it.number == 2 else COL
        if it.operation == "constant":
            value = it.number
            assert value is not None
            return Affine(const=int(value)) if _is_whole(value) else None
        if it.operation == "read":
            assert it.number is not None
            t = self._reads[int(it.number)]
            known = t in (self.node.inputs.get(role) for role in _LENGTHS.values())
            return Affine(lengths={t: 1}) if known or self._is_length(t) else None
        if it.operation == "cast" and it.kind is not Kind.BOOLEAN:
            # A float that is rounded is no sum of positions.
            return self._affine(it.operands[0])
        if it.operation in ("add", "sub"):
            x, y = (self._affine(operand) for operand in it.operands)
            return None if x is None or y is None else x.plus(y, 1 if it.operation == "add" else -1)
        if it.operation == "neg":
            x = self._affine(it.operands[0])
            return None if x is None else Affine().plus(x, -1)
        if it.operation == "mul":
            x, factor = self._affine(it.operands[0]), builder.value(it.operands[1])
            if x is None or factor is None or not _is_whole(factor):
                return None
            return Affine().plus(x, int(factor))
        return None

    # ALiBi ------------------------------------------------------------------------------------

    def _without_slopes(self, line: int) -> int:
        it = self._builder.lines[line]
        ahead = COL.plus(ROW, -1)
        terms = [(0, 1, ahead), (1, 0, ahead)]
        if it.operation == "sub":
            terms = [(0, 1, ROW.plus(COL, -1))]
        for rest, added, distance in terms:
            slopes = self._slopes(it.operands[added], distance)
            if slopes is not None and not self._is_wanted_of(it.operands[rest], slopes):
                inputs = {**self.node.inputs, "alibi_slopes": slopes}
                self.node, self.slopes = replace(self.node, inputs=inputs, alibi=True), slopes
                return self.peeled(it.operands[rest])
        return line

    def _is_wanted_of(self, line: int, t: tensor) -> bool:
        """Whether a gradient has a part in what a line reads."""
        lines = self._builder.lines
        read = (lines[n].number for n in needed(lines, line) if lines[n].operation == "read")
        return t in self._wanted and any(self._reads[int(number or 0)] is t for number in read)

    def _slopes(self, line: int, distance: Affine) -> tensor | None:
        """The slopes that a line multiplies a distance by, if the node can have them."""
        it = self._builder.lines[line]
        if it.operation != "mul" or self.node.alibi or "alibi_slopes" in self.node.inputs:
            return None
        for slope, steps in (it.operands, it.operands[::-1]):
            read = self._builder.lines[slope]
            if read.operation != "read" or self._affine(steps) != distance:
                continue
            t = self._reads[int(read.number or 0)]
            batch, heads, *_ = self.node.inputs["q"].attributes.dim
            fits = t.attributes.dim in ((1, heads, 1, 1), (batch, heads, 1, 1))
            if fits and t.get_data_type() is data_type.FLOAT and not t.get_is_pass_by_value():
                return t
        return None

    # The soft cap -----------------------------------------------------------------------------

    def without_cap(self, result: int) -> int:
        """A program of the capped score, if it is one and the node can have the cap."""
        if self.node.softcap is not None:
            return result
        score = self._builder.score()
        for number, _ in enumerate(list(self._builder.lines)):
            cap = self._cap(number)
            if cap is None or not SOFTCAPS[0] <= cap <= SOFTCAPS[1]:
                continue
            if not self._reaches(result, score, number):
                self.node = replace(self.node, softcap=cap)
                return self._builder.substituted(result, {number: score})
        return result

    def _cap(self, line: int) -> float | None:
        """c, if a line is c * tanh(score / c)."""
        it, builder = self._builder.lines[line], self._builder
        if it.operation != "mul" or builder.value(it.operands[1]) is None:
            return None
        tanh = builder.lines[it.operands[0]]
        inner = builder.lines[tanh.operands[0]] if tanh.operation == "tanh" else None
        if inner is None or inner.operation != "mul" or inner.operands[0] != builder.score():
            return None
        cap, inverse = (builder.value(x.operands[1]) for x in (it, inner))
        if cap is None or inverse is None or not math.isclose(cap * inverse, 1, rel_tol=1e-6):
            return None
        return float(cap)

    def _reaches(self, line: int, leaf: int, around: int) -> bool:
        """Whether a line depends on a leaf other than through another line."""
        pending, seen = [line], {around}
        while pending:
            number = pending.pop()
            if number == leaf and number not in seen:
                return True
            if number not in seen:
                seen.add(number)
                pending.extend(self._builder.lines[number].operands)
        return False


def _is_whole(value: Number) -> bool:
    """Whether sums of positions, and of lengths, may have it."""
    return math.isfinite(value) and value == int(value) and abs(value) < 2**30
