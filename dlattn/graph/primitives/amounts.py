"""Products of numbers, of which some are known only when a graph is executed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field

from dlattn.graph.primitives.meanings import Factor
from dlattn.graph.tensor import Tensor
from dlattn.records import dataclass

#: How far two numbers may be apart that a graph gives in float32, once or twice.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Amount:
    """A number, times tensors of one element to whole powers."""

    number: float = 1.0
    powers: Mapping[Tensor, int] = field(default_factory=dict)

    def times(self, other: Amount, power: int = 1) -> Amount | None:
        """``self * other ** power``; ``None`` of a quotient by 0, or of what is not finite."""
        if power < 0 and other.number == 0:
            return None
        number = self.number * other.number**power
        powers = dict(self.powers)
        for t, count in other.powers.items():
            powers[t] = powers.get(t, 0) + power * count
        if not math.isfinite(number):
            return None
        return Amount(number, {t: count for t, count in powers.items() if count})

    def over(self, other: Amount) -> Amount | None:
        """``self / other``; ``None`` where that is no number."""
        return self.times(other, -1)

    def where(self, known: Mapping[Tensor, float]) -> Amount | None:
        """The same, of tensors that are known by now."""
        found: Amount | None = self
        for t, number in known.items():
            count = self.powers.get(t, 0)
            without = found and Amount(
                found.number, {x: n for x, n in found.powers.items() if x is not t}
            )
            found = without and without.times(Amount(number), count)
        return found

    def is_as(self, other: Amount, tolerance: float = _ROUNDING) -> bool:
        """Whether they are the same, whatever tensors hold."""
        return self.powers == other.powers and math.isclose(
            self.number, other.number, rel_tol=tolerance
        )

    @property
    def single(self) -> tuple[Tensor, int] | None:
        """The only tensor, and its power, if the number is 1."""
        if self.number != 1 or len(self.powers) != 1:
            return None
        (found,) = self.powers.items()
        return found


def amount(factors: Iterable[Factor]) -> Amount | None:
    """The product of factors; ``None`` where that is no number."""
    product: Amount | None = Amount()
    for factor in factors:
        value = factor.tensor.attributes.value
        given = Amount(powers={factor.tensor: 1}) if value is None else Amount(float(value))
        product = product and product.times(given, -1 if factor.inverse else 1)
    return product
