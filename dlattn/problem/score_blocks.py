"""Blocks that a user's function of scores masks whole, told by interval arithmetic.

Where the last selections of a program set scores to -inf, their conditions are computed of the
least and greatest that is read in each block of queries and of keys. Causal masks, windows and
documents are masks of blocks, but for some elements.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dlattn.problem.lines import Kind, Line, needed
from dlattn.problem.mask import BLOCK, BlockMask
from dlattn.problem.score import Array, Values, Where
from dlattn.problem.score_program import ScoreProgram, masked_last
from dlattn.records import dataclass

if TYPE_CHECKING:
    from dlattn.problem.ranges import Known, Truth


@dataclass(frozen=True)
class ScoreBlocks(BlockMask):
    """Drops blocks of which a program provably masks every element; most often there are others of
    which it masks none.

    Rows are what they are without it: what it drops, the program has set to -inf.

    Attributes:
        program: the program.
        double: floats are computed in float64.
        elements: it drops, too, elements that :attr:`conditions` are not true of; the edit is
            what the program makes of the others.
    """

    program: ScoreProgram
    double: bool = False
    elements: bool = False

    @property
    def conditions(self) -> list[tuple[int, bool]]:
        """Those lines of :func:`masked_last` that something of the query and something of the key
        decide, whatever the score and tables of both."""
        return [it for it in masked_last(self.program)[1] if not self._is_of_elements(it)]

    @property
    def rest(self) -> ScoreProgram | None:
        """What the program makes of elements that the conditions keep; ``None`` if nothing."""
        lines, (result, conditions) = list(self.program.lines), masked_last(self.program)
        for mask, wanted in filter(self._is_of_elements, conditions):
            lines.append(Line("constant", Kind.FLOAT, number=-np.inf))
            chosen = (result, len(lines) - 1) if wanted else (len(lines) - 1, result)
            lines.append(Line("binary_select", Kind.FLOAT, (*chosen, mask)))
            result = len(lines) - 1
        if lines[result].operation == "score":
            return None
        return replace(self.program, lines=tuple(lines), result=result)

    def _is_of_elements(self, condition: tuple[int, bool]) -> bool:
        used = (self.program.lines[number] for number in needed(self.program.lines, condition[0]))
        return any(
            line.operation == "score"
            or (line.operation == "read" and not is_summed_up(self.program, line))
            for line in used
        )

    def keep(self, where: Where, values: Values) -> Array:
        kept = self.truth(int(where.batch.item()), values).maybe
        head = where.head if kept.shape[1] > 1 else np.zeros_like(where.head)
        return kept[0, head, where.query // BLOCK, where.key // BLOCK]

    def truth(self, entry: int, values: Values) -> Truth:
        """Of a batch entry's blocks, (1, H or 1, blocks of queries, blocks of keys): whether some
        elements may be kept, and all surely are."""
        from dlattn.problem.ranges import Truth, number_range, ranges, unknown

        lengths = [int(n.reshape(-1)[entry % n.size]) for n in (values.len_q, values.len_kv)]
        floats = np.float64 if self.double else np.float32
        blocks = [np.arange(0, length, BLOCK) for length in lengths]
        if 0 in lengths:
            return Truth(*2 * [np.zeros((1, 1, len(blocks[0]), len(blocks[1])), bool)])
        kept = Truth(np.asarray(True), np.asarray(True))
        _, conditions = masked_last(self.program)

        def leaf(line: Line) -> Known:
            number = int(line.number or 0)
            if line.operation == "position" and number in (2, 3):
                first, length = blocks[number - 2], lengths[number - 2]
                shape = (1, 1, -1, 1) if number == 2 else (1, 1, 1, -1)
                last = np.minimum(first + BLOCK, length) - 1
                return number_range(first.reshape(shape), last.reshape(shape), line.kind, floats)
            if line.operation == "position":
                at = np.asarray(entry) if number == 0 else np.arange(values.heads_q)
                return number_range(*(at.reshape(1, -1, 1, 1),) * 2, line.kind, floats)
            if line.operation != "read" or not is_summed_up(self.program, line):
                return unknown(line.kind, floats)
            tensor = values.score_tensors[number]
            tensor = tensor[entry % len(tensor)][None]
            low = high = tensor
            for axis in (2, 3):
                if tensor.shape[axis] > 1:
                    rows = np.arange(lengths[axis - 2])
                    low, high = (
                        least_of.reduceat(x.take(rows, axis), blocks[axis - 2], axis)
                        for least_of, x in ((np.minimum, low), (np.maximum, high))
                    )
            return number_range(low, high, line.kind, floats)

        for condition, wanted in conditions:
            one = ranges(self.program.lines, condition, leaf, floats)
            assert isinstance(one, Truth)
            one = one if wanted else Truth(~one.surely, ~one.maybe)
            kept = Truth(kept.maybe & one.maybe, kept.surely & one.surely)
        shape = (1, 1, len(blocks[0]), len(blocks[1]))
        whole = np.broadcast_shapes(shape, np.shape(kept.maybe))
        return Truth(*(np.broadcast_to(x, whole) for x in kept))


def is_summed_up(program: ScoreProgram, line: Line) -> bool:
    """Whether a read has an element for each query, or each key, or neither, and not for both."""
    read = program.reads[int(line.number or 0)]
    return not (read.by_query and read.by_key)


def skipped_blocks(program: ScoreProgram, double: bool = False) -> ScoreBlocks | None:
    """What drops blocks for a program, if anything of where it masks can be known."""
    from dlattn.problem.ranges import known_lines

    known = known_lines(
        program.lines,
        lambda line: (
            line.operation == "position"
            or (line.operation == "read" and is_summed_up(program, line))
        ),
    )
    _, conditions = masked_last(program)
    return ScoreBlocks(program, double) if any(line in known for line, _ in conditions) else None
