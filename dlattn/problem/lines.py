"""Pointwise expressions of a score, its position, numbers and tensors, as lines.

A line is an operation on earlier lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from dlattn.records import dataclass

Number = float | int | bool


class Kind(Enum):
    """What a line is computed in; floats are of the problem's compute type."""

    FLOAT = "float"
    INT32 = "int"
    INT64 = "int64"
    BOOLEAN = "bool"

    @property
    def is_whole(self) -> bool:
        return self is not Kind.FLOAT


#: Lines without operands: the score, the gradient of the result, the position along an axis, a
#: number, an element of a tensor.
LEAVES = ("score", "gradient", "position", "constant", "read")


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        operation: one of :data:`LEAVES`, ``"cast"``, or of :data:`dlattn.problem.POINTWISE`.
        kind: of the result.
        operands: the numbers of earlier lines.
        number: of a constant, its value; of a position, the axis of (B, H, S_q, S_kv); of a read,
            which tensor.
    """

    operation: str
    kind: Kind
    operands: tuple[int, ...] = ()
    number: Number | None = None

    def holds(self, value: Number) -> bool:
        """Whether it is a constant of this value."""
        return self.operation == "constant" and self.number == value


def needed(lines: Sequence[Line], *results: int) -> list[int]:
    """The numbers of the lines that results depend on, in order."""
    wanted = set(results)
    for number in reversed(range(len(lines))):
        if number in wanted:
            wanted.update(lines[number].operands)
    return sorted(wanted)
