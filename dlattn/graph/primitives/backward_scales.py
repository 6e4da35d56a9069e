"""What the products of a backward are scaled by, which must be what a gradient is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dlattn.graph.lower import HostNumber
from dlattn.graph.primitives.amounts import Amount, amount
from dlattn.graph.primitives.fuse import check_drawn, host_number, plain, scale
from dlattn.graph.primitives.gradients import (
    Delta,
    LessStats,
    OfProbabilities,
    Probabilities,
    Result,
    Signs,
    Stored,
    Written,
)
from dlattn.graph.primitives.meanings import Drawn, Factor, Given, Misfit, Scores
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.tensor import Tensor

#: How far a dropout's scale, rounded to 16 bits, may be from the inverse of what is kept.
_DROPOUT_ROUNDING = 1e-3


def scales(
    scores: Scores,
    dropped: Probabilities,
    dv: Written,
    of_scores: Sequence[Written],
    numbers: list[HostNumber],
) -> dict[str, Any]:
    """Dropout, as an argument of ``sdpa_backward``; all other scales must be those of a gradient.

    dV has probabilities times C. With dP times i and delta times d, C is i / d of random dropout,
    and what i / C is multiplied by then must be the scale of the scores, for dBias 1.
    """
    centered = of_scores[0].of.centered
    if isinstance(dropped.of, Stored):
        of_s = (*centered.delta.of.factors, *(output.of.probabilities for output in of_scores))
        for x in (dropped, *of_s):
            if isinstance(x, Probabilities):
                numbers += _positive(dv.node, x.scales)
    c = _amount(dv.node, (*dropped.scales, *dv.means.scales))
    i = _amount(dv.node, centered.gradient.scales)
    d: Amount | None = _amount(dv.node, _delta_scales(centered.delta))
    if isinstance(dropped.of, LessStats) and d and _is_of_probabilities(centered.delta):
        d = d.over(c)  # of dO times o, which has dropout's scale
    if d is None:
        raise Misfit(dv.node, "ends a backward whose dropout is scaled by 0.")
    dropout, known = _dropout(dv.node, dropped, centered.gradient.mask, scores, c, i, d, numbers)
    wanted = None
    if isinstance(dropped.of, LessStats):
        wanted = _amount(dv.node, scores.scales)
        dropout["attn_scale"] = scale(dv.node, scores.scales)
    for output in of_scores:
        u = _amount(output.node, output.scales)
        per_row = (u.times(i) or Amount(0)).over(c)
        found = per_row and per_row.where(known)
        if wanted is None and found is not None and isinstance(output.means, Result):
            wanted = found
            dropout["attn_scale"] = _entry(output.node, found)
        expected = wanted if isinstance(output.means, Result) else Amount()
        if found is None or expected is None or not found.is_as(expected):
            raise Misfit(
                output.node,
                "is not scaled as a gradient is: by the scale of the scores, dBias aside, and by "
                "that of dropout.",
            )
    return dropout


def _dropout(
    node: PrimitiveNode,
    dropped: Probabilities,
    gradient_mask: Any,
    scores: Scores,
    c: Amount,
    i: Amount,
    d: Amount,
    numbers: list[HostNumber],
) -> tuple[dict[str, Any], dict[Tensor, float]]:
    """The argument, and numbers in packs that have to be what it says."""
    mask = gradient_mask if isinstance(gradient_mask, Signs) else dropped.mask
    inverse = d.over(i)
    if inverse is None:
        raise Misfit(node, "ends a backward whose dP is scaled by 0.")
    if mask is None:
        if not (c.is_as(Amount()) and inverse.is_as(Amount())):
            raise Misfit(node, "ends a backward with scales of a dropout that it does not have.")
        return {}, {}
    if isinstance(mask, Signs):
        return {"dropout": (plain(mask.s), _entry(node, c), _entry(node, inverse))}, {}
    if isinstance(mask, Given):
        return {"dropout": (mask.tensor, _entry(node, c), _entry(node, inverse))}, {}
    assert isinstance(mask, Drawn)
    check_drawn(mask.node, scores)
    keep = mask.node.numbers["bernoulli_probability"]
    known: dict[Tensor, float] = {}
    for given, wanted in ((c, 1 / keep), (inverse, keep)):
        now = given.where(known)
        if now is not None and now.single is not None:
            t, power = now.single
            if abs(power) == 1 and t.get_is_pass_by_value():
                known[t] = wanted**power
                numbers.append(_dropout_number(t, known[t]))
                now = Amount(wanted)
        if now is None or not now.is_as(Amount(wanted), _DROPOUT_ROUNDING):
            raise Misfit(
                node,
                f"ends a backward whose dropout is not scaled by {1 / keep:g}, and delta by the "
                "inverse, as numbers that are known or passed by value.",
            )
    seed, offset = mask.node.inputs.values()
    return {"dropout": (1 - keep, seed, offset)}, known


def _is_of_probabilities(delta: Delta) -> bool:
    return any(isinstance(x, Probabilities) for x in delta.of.factors)


def _delta_scales(delta: Delta) -> tuple[Factor, ...]:
    of = (x.scales for x in delta.of.factors if isinstance(x, (Probabilities, OfProbabilities)))
    return (*delta.scales, *(factor for scales in of for factor in scales))


def _positive(node: PrimitiveNode, factors: Sequence[Factor]) -> list[HostNumber]:
    """That scales of S, which may be made absolute then, have no sign."""
    values = [factor.tensor.attributes.value for factor in factors]
    unknown = [x.tensor for x, value in zip(factors, values, strict=True) if value is None]
    known = all(value is None or value > 0 for value in values)
    if not known or not all(t.get_is_pass_by_value() for t in unknown):
        raise Misfit(
            node, "ends a backward whose S is not scaled by a positive number, known or by value."
        )
    return [host_number(t, "a number above 0", lambda x: x > 0) for t in unknown]


def _dropout_number(t: Tensor, wanted: float) -> HostNumber:
    said = f"{wanted:g}, by the probability to keep"
    return host_number(t, said, lambda x: math.isclose(x, wanted, rel_tol=_DROPOUT_ROUNDING))


def _entry(node: PrimitiveNode, given: Amount) -> Any:
    """A scale of dropout by a mask: a number, or a tensor."""
    if not given.powers:
        return given.number
    if given.single is None or given.single[1] != 1:
        raise Misfit(
            node,
            "ends a backward whose dropout is scaled by several numbers, or dP and not delta by "
            "one that is not known yet; scale delta by its inverse.",
        )
    return given.single[0]


def _amount(node: PrimitiveNode, factors: Sequence[Factor]) -> Amount:
    product = amount(factors)
    if product is None:
        raise Misfit(node, "ends a backward with a scale that is not finite.")
    return product
