"""A case, an edit and a mask that several tests of the reference engine share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlattn.problem import Edit, Mask, Values, Where
from tests.cases import Case

CASE = Case(
    dtype="float64",
    stats="float64",
    scale=0.3,
    batch=2,
    heads_q=4,
    heads_k=2,
    heads_v=1,
    seq_q=5,
    seq_kv=9,
    head_dim_qk=16,
    head_dim_v=8,
)


@dataclass(frozen=True)
class Cube(Edit):
    """An edit the engine has never heard of; it reads every position."""

    @property
    def cpp(self) -> str:
        return "Cube"

    def apply(self, score: Any, where: Where, values: Values) -> Any:
        return score**3 / 9 + 0.1 * (where.head - where.batch) * (where.query - where.key)

    def backward(self, grad: Any, score: Any, where: Where, values: Values) -> Any:
        return grad * score**2 / 3


@dataclass(frozen=True)
class Weave(Mask):
    """A mask the engine has never heard of; it differs by batch entry and head."""

    @property
    def cpp(self) -> str:
        return "Weave"

    def keep(self, where: Where, values: Values) -> Any:
        return (where.batch + where.head + where.query + where.key) % 3 > 0
