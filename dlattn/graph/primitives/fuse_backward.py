"""From primitive operations that are the backward of attention to the node of an
``sdpa_backward``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from dlattn.graph.lower import HostNumber
from dlattn.graph.nodes import sdpa_backward_node
from dlattn.graph.operations import Operations
from dlattn.graph.primitives.amounts import Amount, amount
from dlattn.graph.primitives.fuse import (
    Attention,
    as_rows,
    check_drawn,
    compute_type,
    host_number,
    is_opaque,
    mask_numbers,
    masks,
    plain,
    scale,
)
from dlattn.graph.primitives.gradient_readers import meaning
from dlattn.graph.primitives.gradients import (
    Delta,
    LessStats,
    Meaning,
    OfBias,
    OfProbabilities,
    OfScores,
    Probabilities,
    Result,
    Signs,
    Stored,
)
from dlattn.graph.primitives.match import needed, read
from dlattn.graph.primitives.meanings import Drawn, Factor, Given, Misfit, Scores
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.primitives.positions import Predicate
from dlattn.graph.tensor import Tensor

#: How far a dropout's scale, rounded to 16 bits, may be from the inverse of what is kept.
_DROPOUT_ROUNDING = 1e-3


def is_backward(nodes: Sequence[PrimitiveNode]) -> bool:
    """Whether operations have more products than a forward, and so may be a backward only."""
    return sum(node.operation == "matmul" for node in needed(nodes)) > 2


@dataclass(frozen=True)
class _Output:
    """A tensor with memory, the node that makes it, and what it means."""

    tensor: Tensor
    node: PrimitiveNode
    means: Any

    @property
    def scales(self) -> tuple[Factor, ...]:
        """What the gradient of scores, of which it is made, is multiplied by."""
        of, means = self.of, self.means
        own = (*means.scales, *means.b.scales) if isinstance(means, Result) else ()
        return (*of.probabilities.scales, *of.centered.scales, *of.scales, *own)

    @property
    def of(self) -> OfScores:
        """That gradient."""
        of = self.means
        if isinstance(of, Result):
            of = of.a
        if isinstance(of, OfBias):
            of = of.of
        assert isinstance(of, OfScores)
        return of


def backward(nodes: Sequence[PrimitiveNode]) -> Attention:
    """The backward of attention that completed nodes are.

    Raises:
        Misfit: they are none; which is the first node that does not fit, and why.
    """
    known = read(nodes, meaning)
    outputs = _outputs(known)
    last = next(reversed(known.values()))[0]
    for role, product in (("dV", "of probabilities and dO"), ("dQ", "with k"), ("dK", "with q")):
        if role not in outputs:
            raise Misfit(last, f"is the last, and nothing before is {role}, the product {product}.")
    dq, dk, dv = (outputs[role] for role in ("dQ", "dK", "dV"))
    dropped, gradient = dv.means.a, dq.of.centered.gradient
    scores = _scores(dropped, dq, dk)
    _check_operands(scores, gradient, dq, dk, dv)
    forward = _forward(dropped, dq)
    of_scores = [output for role, output in outputs.items() if role in ("dQ", "dK", "dBias")]
    for output in of_scores:
        _check_same(output, dq, dropped, scores.keep)
    numbers: list[HostNumber] = mask_numbers(scores)
    given: dict[str, Any] = {
        **_defaults(),
        "q": scores.q.tensor,
        "k": as_rows(scores.k),
        "v": as_rows(gradient.v),
        "dO": gradient.d_o.tensor,
        **masks(dq.node, scores, _lengths(gradient, dq, dk, dv)),
        **forward,
        "dBias": outputs["dBias"].tensor if "dBias" in outputs else None,
        "rng_dump": outputs["rng_dump"].tensor if "rng_dump" in outputs else None,
        "compute_data_type": compute_type(known, dq.node),
        **_scales(scores, dropped, dv, of_scores, numbers),
    }
    numbers += _zeros(dropped, dq)
    _check_bias(given["bias"], outputs, isinstance(dropped.of, Stored))
    node = sdpa_backward_node(dq.node.name, given)
    graphs = {"k": scores.k.tensor, "v": gradient.v.tensor}
    inputs = dict(node.inputs)
    if isinstance(dropped.of, Stored):
        graphs |= dict.fromkeys({"bias", "dropout_mask"} & inputs.keys(), dropped.of.s)
        del inputs["o"], inputs["stats"]
    made = {role: outputs[role].tensor for role in node.outputs}
    declared = {role: t for role, t in graphs.items() if t is not inputs[role]}
    unique = {number.tensor: number for number in numbers}
    found = replace(node, inputs=inputs, outputs=made)
    return Attention(found, declared, tuple(unique.values()))


def _scores(dropped: Probabilities, dq: _Output, dk: _Output) -> Scores:
    """The scores that probabilities are made of; of S, the operands that they had, and the masks of
    the gradient."""
    if isinstance(dropped.of, LessStats):
        return dropped.of.scores
    it: Given = dq.means.b
    keep = Predicate()
    for part in _masked(dropped, dq):
        joined = keep.joined(part, every=True)
        assert joined is not None
        keep = joined
    if keep.masks:
        raise Misfit(
            dq.node, "ends a backward masked by a tensor; S is 0 there, so leave the mask out."
        )
    conditions = [x for i, x in enumerate(keep.conditions) if x not in keep.conditions[:i]]
    k = replace(it, transposed=not it.transposed, scales=())
    scores = Scores(replace(dk.means.b, scales=()), k, keep=Predicate(tuple(conditions)))
    if scores.dim != dropped.of.dim:
        raise Misfit(dq.node, f"ends a backward of {scores.dim} whose S is {dropped.of.dim}.")
    return scores


def _masked(dropped: Probabilities, output: _Output) -> tuple[Predicate, ...]:
    """Where probabilities and gradients are set to 0, on the way to one output."""
    of, delta = output.of, output.of.centered.delta.of.factors
    within = [x.keep for x in delta if isinstance(x, (Probabilities, OfProbabilities))]
    return (dropped.keep, of.probabilities.keep, of.centered.gradient.keep, of.keep, *within)


def _defaults() -> dict[str, Any]:
    parameters = signature(Operations.sdpa_backward).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _outputs(known: Mapping[Any, tuple[PrimitiveNode, Meaning]]) -> dict[str, _Output]:
    outputs: dict[str, _Output] = {}
    for t, (node, means) in known.items():
        if t.get_is_virtual() or (isinstance(means, OfScores) and is_opaque(t)):
            continue  # dP is nobody else's to read
        role = _role(means)
        if role is None or role in outputs:
            raise Misfit(
                node,
                f"writes {t.get_name()} to memory, which fused kernels keep on the chip; call "
                "set_output(False) on it.",
            )
        outputs[role] = _Output(t, node, means)
    return outputs


def _role(means: Meaning) -> str | None:
    if isinstance(means, Result):
        return means.role
    if isinstance(means, OfBias) or (isinstance(means, OfScores) and not means.transposed):
        return "dBias"
    return "rng_dump" if isinstance(means, Drawn) else None


def _check_operands(
    scores: Scores, gradient: OfProbabilities, dq: _Output, dk: _Output, dv: _Output
) -> None:
    """The products of gradients are with the operands of the products before."""
    k, v = scores.k, gradient.v
    it: Given = dq.means.b
    if it.tensor is not k.tensor or it.transposed == k.transposed:
        raise Misfit(dq.node, "multiplies by something else than k; transpose the tensor of it.")
    it = dk.means.b
    if it.tensor is not scores.q.tensor or it.transposed:
        raise Misfit(dk.node, "multiplies by something else than q, of which scores are made.")
    if dv.means.b != gradient.d_o or not gradient.d_o.is_plain:
        raise Misfit(dv.node, "multiplies by something else than dO, of which dP is made.")
    if v.scales:
        raise Misfit(dv.node, "ends a backward whose v is scaled; give v as it is.")
    rows_k, rows_v = (as_rows(x).attributes.dim for x in (k, v))
    for output, dim in ((dq, scores.q.tensor.attributes.dim), (dk, rows_k), (dv, rows_v)):
        found = output.tensor.attributes.dim
        if found != dim:
            raise Misfit(
                output.node, f"makes {output.means.role} of {found}; expected {dim}: sum its heads."
            )


def _forward(dropped: Probabilities, dq: _Output) -> dict[str, Any]:
    """What the forward has left: o, of which delta is made with dO, and statistics; or S."""
    a, b = dq.of.centered.delta.of.factors
    gradient = dq.of.centered.gradient
    if isinstance(dropped.of, LessStats):
        if gradient.d_o.tensor not in (a, b):
            raise Misfit(dq.node, "ends a backward whose sums of rows are not of dO times o.")
        return {"o": b if a is gradient.d_o.tensor else a, "stats": dropped.of.stats}
    assert isinstance(dropped.of, Stored)
    if not (
        isinstance(a, Probabilities)
        and isinstance(b, OfProbabilities)
        and a.of == dropped.of
        and a.mask in (None, gradient.mask)
        and (b.d_o, b.v, b.mask) == (gradient.d_o, gradient.v, gradient.mask)
    ):
        raise Misfit(dq.node, "ends a backward whose sums of rows are not of S times dP.")
    s = plain(dropped.of.s)
    return {"o": s, "stats": s, "bias": s}


def _lengths(gradient: OfProbabilities, *outputs: _Output) -> tuple[tuple[str, Tensor], ...]:
    return (*gradient.lengths, *(x for output in outputs for x in output.means.lengths))


def _check_same(output: _Output, dq: _Output, dropped: Probabilities, keep: Predicate) -> None:
    """All gradients are of the same probabilities, and drop the same."""
    of, centered = output.of, output.of.centered
    wanted = dq.of.centered
    if (centered.gradient, centered.delta) != (wanted.gradient, wanted.delta):
        raise Misfit(output.node, "is of another gradient of scores than dQ is.")
    if of.probabilities.of != dropped.of or of.probabilities.mask is not None:
        raise Misfit(output.node, "is of other probabilities than dV is, or of dropped ones.")
    is_absolute = isinstance(dropped.of, Stored) and dropped.mask is None
    if not is_absolute and not _is_same_mask(dropped.mask, centered.gradient.mask):
        raise Misfit(output.node, "drops something else than dV does.")
    if isinstance(centered.gradient.mask, Signs):
        if dropped.of != Stored(centered.gradient.mask.s):
            raise Misfit(output.node, "drops by the signs of another tensor than S.")
        if dropped.signed or of.probabilities.signed:
            raise Misfit(output.node, "is of an S whose signs are a mask; take abs of it.")
    for part in _masked(dropped, output):
        if not _is_part(part, keep):
            raise Misfit(output.node, "is masked where scores are not; mask scores.")


def _is_part(keep: Predicate, of: Predicate) -> bool:
    """Whether one mask keeps whatever another keeps."""
    return all(x in of.conditions for x in keep.conditions) and all(
        any(x is y for y in of.masks) for x in keep.masks
    )


def _is_same_mask(a: Any, b: Any) -> bool:
    if isinstance(a, Drawn) and isinstance(b, Drawn):
        first, second = a.node, b.node
        seeds = zip(first.inputs.values(), second.inputs.values(), strict=True)
        dims = (x.result.attributes.dim for x in (first, second))
        return all(x is y for x, y in seeds) and (
            first.numbers == second.numbers and len(set(dims)) == 1
        )
    return bool(a == b)


def _zeros(dropped: Probabilities, dq: _Output) -> list[HostNumber]:
    of = dq.of
    zeros = (*dropped.zeros, *of.zeros, *of.probabilities.zeros, *of.centered.gradient.zeros)
    for x in of.centered.delta.of.factors:
        if isinstance(x, (Probabilities, OfProbabilities)):
            zeros = (*zeros, *x.zeros)
    return [host_number(t, "0, for what is masked", lambda x: x == 0) for t in zeros]


def _check_bias(bias: Tensor | None, outputs: Mapping[str, _Output], stored: bool) -> None:
    """dBias has the shape of the bias; of S, whose bias is not known, one that broadcasts."""
    if "dBias" not in outputs:
        return
    node, t = outputs["dBias"].node, outputs["dBias"].tensor
    if bias is None:
        raise Misfit(
            node,
            f"writes {t.get_name()} to memory, the gradient of a bias that scores do not have; "
            "call set_output(False) on it.",
        )
    whole, dim = bias.attributes.dim, t.attributes.dim
    if stored:
        if any(size not in (1, most) for size, most in zip(dim, whole, strict=True)):
            raise Misfit(node, f"makes dBias of {dim}; expected {whole}, with 1 for any size.")
        return
    if whole != dim:
        raise Misfit(node, f"makes dBias of {dim}; the bias has {whole}.")


def _scales(
    scores: Scores,
    dropped: Probabilities,
    dv: _Output,
    of_scores: Sequence[_Output],
    numbers: list[HostNumber],
) -> dict[str, Any]:
    """Dropout, as an argument of ``sdpa_backward``; all other scales must be those of a gradient.

    dV has probabilities times C. With dP times i and delta times d, C is i / d of random dropout,
    and what i / C is multiplied by then must be the scale of the scores, for dBias 1.
    """
    centered = of_scores[0].of.centered
    c = _amount(dv.node, (*dropped.scales, *dv.means.scales))
    i = _amount(dv.node, centered.gradient.scales)
    d = _amount(dv.node, _delta_scales(centered.delta))
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
        numbers += _positive(node, c)
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


def _delta_scales(delta: Delta) -> tuple[Factor, ...]:
    of = (x.scales for x in delta.of.factors if isinstance(x, (Probabilities, OfProbabilities)))
    return (*delta.scales, *(factor for scales in of for factor in scales))


def _positive(node: PrimitiveNode, scale: Amount) -> list[HostNumber]:
    """That the scale of what is then made absolute, or 0, has no sign."""
    if scale.number <= 0 or not all(t.get_is_pass_by_value() for t in scale.powers):
        raise Misfit(
            node, "ends a backward whose S is not scaled by a positive number, known or by value."
        )
    return [host_number(t, "a number above 0", lambda x: x > 0) for t in scale.powers]


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
