"""From primitive operations that are the backward of attention to the node of an
``sdpa_backward``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from dlattn.graph.lower import HostNumber
from dlattn.graph.nodes import sdpa_backward_node
from dlattn.graph.operations import Operations
from dlattn.graph.primitives import added
from dlattn.graph.primitives.backward_scales import scales
from dlattn.graph.primitives.fuse import (
    Attention,
    as_measured,
    as_rows,
    compute_type,
    host_number,
    is_opaque,
    mask_numbers,
    masks,
    plain,
)
from dlattn.graph.primitives.gradient_readers import meaning
from dlattn.graph.primitives.gradients import (
    LessStats,
    Meaning,
    OfBias,
    OfProbabilities,
    OfScores,
    Probabilities,
    Result,
    Signs,
    Stored,
    Written,
)
from dlattn.graph.primitives.match import needed, read
from dlattn.graph.primitives.meanings import Drawn, Given, Misfit, Scores
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.primitives.positions import Predicate
from dlattn.graph.tensor import Tensor


def is_backward(nodes: Sequence[PrimitiveNode]) -> bool:
    """Whether operations have more products than a forward, and so may be a backward only."""
    return sum(node.operation == "matmul" for node in needed(nodes)) > 2


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
    dump = outputs.get("rng_dump")
    if dump is not None and not _is_same_mask(dropped.mask, dump.means):
        raise Misfit(dump.node, f"writes {dump.tensor.get_name()}, by which nothing is dropped.")
    numbers: list[HostNumber] = mask_numbers(scores)
    d_bias = outputs["dBias"].tensor if "dBias" in outputs else None
    given: dict[str, Any] = {
        **_defaults(),
        "q": scores.q.tensor,
        "k": as_rows(scores.k),
        "v": as_rows(gradient.v),
        "dO": gradient.d_o.tensor,
        **masks(dq.node, scores, _lengths(gradient, dq, dk, dv)),
        **forward,
        "rng_dump": outputs["rng_dump"].tensor if "rng_dump" in outputs else None,
        "compute_data_type": compute_type(known, dq.node),
        **scales(scores, dropped, dv, of_scores, numbers),
    }
    numbers += _zeros(dropped, of_scores)
    is_argument = given["bias"] is not None
    bias = given["bias"] if is_argument else scores.bias
    _check_bias(bias, outputs, isinstance(dropped.of, Stored))
    given["dBias"] = d_bias if is_argument else None
    # What the forward has not left is made once more.
    lacks = [role for role in ("o", "stats") if given[role] is None]
    q = scores.q.tensor
    node = as_measured(sdpa_backward_node(dq.node.name, given | dict.fromkeys(lacks, q)))
    if not is_argument:
        node = added.with_function(node, scores, None if d_bias is None else plain(d_bias))
    graphs = {"k": scores.k.tensor, "v": gradient.v.tensor}
    inputs = {role: t for role, t in node.inputs.items() if role not in lacks}
    if isinstance(dropped.of, Stored):
        graphs |= dict.fromkeys({"bias", "dropout_mask"} & inputs.keys(), dropped.of.s)
    made = {
        role: outputs[role].tensor if role in outputs else t for role, t in node.outputs.items()
    }
    graphs |= {role: d_bias for role in made.keys() - outputs.keys() if d_bias is not None}
    own = {**inputs, **made}
    declared = {role: t for role, t in graphs.items() if t is not own[role]}
    unique = {(number.tensor, number.wanted): number for number in numbers}
    found = replace(node, inputs=inputs, outputs=made)
    return Attention(found, declared, tuple(unique.values()))


def _scores(dropped: Probabilities, dq: Written, dk: Written) -> Scores:
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


def _masked(dropped: Probabilities, output: Written) -> tuple[Predicate, ...]:
    """Where probabilities and gradients are set to 0, on the way to one output."""
    of, delta = output.of, output.of.centered.delta.of.factors
    within = [x.keep for x in delta if isinstance(x, (Probabilities, OfProbabilities))]
    return (dropped.keep, of.probabilities.keep, of.centered.gradient.keep, of.keep, *within)


def _defaults() -> dict[str, Any]:
    parameters = signature(Operations.sdpa_backward).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _outputs(known: Mapping[Any, tuple[PrimitiveNode, Meaning]]) -> dict[str, Written]:
    outputs: dict[str, Written] = {}
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
        outputs[role] = Written(t, node, means)
    return outputs


def _role(means: Meaning) -> str | None:
    if isinstance(means, Result):
        return means.role
    if isinstance(means, OfBias) or (isinstance(means, OfScores) and not means.transposed):
        return "dBias"
    return "rng_dump" if isinstance(means, Drawn) else None


def _check_operands(
    scores: Scores, gradient: OfProbabilities, dq: Written, dk: Written, dv: Written
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


def _forward(dropped: Probabilities, dq: Written) -> dict[str, Any]:
    """What the forward has left: o, of which delta is made with dO, and statistics; or S."""
    a, b = dq.of.centered.delta.of.factors
    gradient, of = dq.of.centered.gradient, dropped.of
    if isinstance(of, LessStats) and gradient.d_o.tensor in (a, b):
        return {"o": b if a is gradient.d_o.tensor else a, "stats": of.stats}
    if not (
        isinstance(a, Probabilities)
        and isinstance(b, OfProbabilities)
        and a.of == of
        and a.mask in (None, gradient.mask)
        and (b.d_o, b.v, b.mask) == (gradient.d_o, gradient.v, gradient.mask)
    ):
        raise Misfit(
            dq.node, "ends a backward whose sums of rows are not of dO times o, or P times dP."
        )
    if isinstance(of, LessStats):
        return {"o": None, "stats": of.stats}
    s = plain(of.s)
    return {"o": None, "stats": None, "bias": s}


def _lengths(gradient: OfProbabilities, *outputs: Written) -> tuple[tuple[str, Tensor], ...]:
    return (*gradient.lengths, *(x for output in outputs for x in output.means.lengths))


def _check_same(output: Written, dq: Written, dropped: Probabilities, keep: Predicate) -> None:
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


def _zeros(dropped: Probabilities, outputs: Sequence[Written]) -> list[HostNumber]:
    zeros = [*dropped.zeros]
    for of in (output.of for output in outputs):
        factors = of.centered.delta.of.factors
        for x in (of, of.probabilities, of.centered.gradient, *factors):
            zeros += [] if isinstance(x, Tensor) else x.zeros
    return [host_number(t, "0, for what is masked", lambda x: x == 0) for t in zeros]


def _check_bias(bias: Tensor | None, outputs: Mapping[str, Written], stored: bool) -> None:
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
