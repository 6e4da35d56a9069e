"""From primitive operations that are attention to the node of an ``sdpa``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from dlattn.dtypes import data_type
from dlattn.graph.lower import HostNumber, Lowered, lower, spec_of
from dlattn.graph.nodes import AttentionNode, sdpa_node
from dlattn.graph.operations import Operations
from dlattn.graph.primitives import added
from dlattn.graph.primitives.match import read
from dlattn.graph.primitives.meanings import (
    Drawn,
    Factor,
    Given,
    Meaning,
    Misfit,
    OfScores,
    Output,
    Scores,
    Weights,
)
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.primitives.positions import band
from dlattn.graph.primitives.readers import MASKED
from dlattn.graph.tensor import Tensor
from dlattn.graph.vocabulary import diagonal_alignment, tensor_reordering
from dlattn.problem import Bias, GivenMask, Problem, Stored, StoredSigns
from dlattn.records import dataclass
from dlattn.runtime.target import Target

#: What of a softmax can be an output -> the output of ``sdpa`` that it is.
_STATISTICS = {"max": "score_max", "sum": "score_sum_exp", "stats": "stats"}


@dataclass(frozen=True)
class Attention:
    """An attention found among primitive operations.

    Attributes:
        node: the same as an ``sdpa`` or ``sdpa_backward`` node. Of a k or v that is given
            transposed, of S, and of the dBias of a bias that a function reads, it has a tensor of
            its own, in place of the graph's. A backward may have no o; that of S has S as its bias,
            and as its keep mask, and no statistics.
        declared: role -> the graph's tensor, of those.
        numbers: as in :class:`dlattn.graph.lower.Lowered`.
    """

    node: AttentionNode
    declared: Mapping[str, Tensor]
    numbers: tuple[HostNumber, ...]

    @property
    def reads_s(self) -> bool:
        """Whether it is a backward of S."""
        return "dQ" in self.node.outputs and "stats" not in self.node.inputs

    def lower(self, target: Target, compute: data_type) -> Lowered:
        """See :func:`dlattn.graph.lower.lower`."""
        lowered = lower(self.node, target, compute)
        problem = lowered.problem
        if isinstance(problem, Problem) and self.reads_s:
            problem = of_stored(problem)
        return replace(
            lowered,
            problem=problem,
            tensors={**lowered.tensors, **self.declared},
            transposed=frozenset(self.declared) & {"k", "v"},
            numbers=self.numbers,
        )


def of_stored(problem: Problem) -> Problem:
    """A problem whose bias is S, and whose keep mask is that of its signs."""
    edits = (Stored(**vars(edit)) if isinstance(edit, Bias) else edit for edit in problem.edits)
    mask = problem.dropout
    return replace(
        problem,
        edits=tuple(edits),
        dropout=StoredSigns(**vars(mask)) if isinstance(mask, GivenMask) else mask,
    )


def plain(t: Tensor) -> Tensor:
    """A tensor of the graph, of which nothing is left to infer, and which anybody may read."""
    unordered = replace(t.attributes, reordering_type=tensor_reordering.NONE, inferred=frozenset())
    return Tensor(unordered)


def is_opaque(t: Tensor) -> bool:
    """Whether only attention may read a tensor: S, or dP."""
    return t.get_reordering_type() is tensor_reordering.F16x16


def attention(nodes: Sequence[PrimitiveNode]) -> Attention:
    """The attention that completed nodes (see :mod:`dlattn.graph.primitives.infer`) are.

    Raises:
        Misfit: they are none; which is the first node that does not fit, and why.
    """
    known = read(nodes)
    results = {t: found for t, found in known.items() if not t.get_is_virtual()}
    outputs: dict[str, tuple[Tensor, PrimitiveNode, Meaning]] = {}
    for t, (node, means) in results.items():
        role = _role(means, t)
        if role is None or role in outputs:
            raise Misfit(
                node,
                f"writes {t.get_name()} to memory, which fused kernels keep on the chip; call "
                "set_output(False) on it.",
            )
        outputs[role] = t, node, means
    if "o" not in outputs:
        node = next(reversed(known.values()))[0]
        raise Misfit(node, "is the last, and no product of a softmax with v; attention ends so.")
    o, node, means = outputs["o"]
    assert isinstance(means, Output)
    for t, other, meaning in outputs.values():
        if _scores_of(meaning) not in (None, means.weights.scores):
            raise Misfit(other, f"writes {t.get_name()}, which is of other scores.")
        if isinstance(meaning, Drawn) and means.weights.mask is not meaning:
            raise Misfit(other, f"writes {t.get_name()}, by which nothing is dropped.")
        if isinstance(meaning, Weights) and meaning != replace(means.weights, scales=()):
            raise Misfit(other, f"writes {t.get_name()}, which is not what is left by dropout.")
        if isinstance(meaning, OfScores):
            if t.get_data_type() is not data_type.FLOAT:
                raise Misfit(other, f"writes {t.get_name()} as {t.get_data_type()}, not FLOAT.")
    compute = compute_type(known, node)
    return _attention(node, means, {role: t for role, (t, _, _) in outputs.items()}, compute)


def compute_type(known: Mapping[Any, tuple[PrimitiveNode, Any]], last: PrimitiveNode) -> data_type:
    """DOUBLE if any node asks for that, else what the last asks for."""
    asked = {node.compute_data_type for node, _ in known.values()}
    return data_type.DOUBLE if data_type.DOUBLE in asked else last.compute_data_type


def _role(means: Meaning, t: Tensor) -> str | None:
    if isinstance(means, Output):
        return "o"
    if isinstance(means, Drawn):
        return "rng_dump"
    if isinstance(means, Weights):
        return "debug_softmax" if is_opaque(t) and not means.scales else None
    return _STATISTICS.get(means.what) if isinstance(means, OfScores) else None


def _scores_of(means: Meaning) -> Scores | None:
    return means.scores if isinstance(means, OfScores) else None


def _attention(
    node: PrimitiveNode, found: Output, outputs: dict[str, Tensor], compute: data_type
) -> Attention:
    weights, scores = found.weights, found.weights.scores
    numbers = mask_numbers(scores)
    q, k = scores.q.tensor, scores.k.tensor
    seen = as_rows(scores.k)
    given: dict[str, Any] = {
        **{name: p.default for name, p in signature(Operations.sdpa).parameters.items()},
        "q": q,
        "k": seen,
        "v": found.v.tensor,
        "generate_stats": "stats" in outputs,
        "attn_scale": scale(node, scores.scales),
        **masks(node, scores, found.lengths),
        "score_max": outputs.get("score_max"),
        "score_sum_exp": outputs.get("score_sum_exp"),
        "rng_dump": outputs.get("rng_dump"),
        "compute_data_type": compute,
        **_dropout(node, weights, numbers),
    }
    found_node = added.with_function(as_measured(sdpa_node(node.name, given)), scores)
    made = {role: plain(t) if is_opaque(t) else t for role, t in sorted(outputs.items())}
    declared = {role: t for role, t in outputs.items() if is_opaque(t)}
    return Attention(
        replace(found_node, outputs=made),
        declared if seen is k else {**declared, "k": k},
        tuple(numbers),
    )


def mask_numbers(scores: Scores) -> list[HostNumber]:
    """What masked scores are set to, of numbers that packs hold."""
    wanted = f"a number of at most {MASKED:g}, for masked scores"
    return [host_number(t, wanted, lambda x: x <= MASKED) for t in scores.fills]


def as_rows(given: Given) -> Tensor:
    """A k or v that a product takes transposed, (B, H, Skv, D): what the user declared, or a tensor
    like it whose last two axes are swapped."""
    if given.transposed:
        return given.tensor
    it = given.tensor.attributes
    dim, stride = ((*x[:2], x[3], x[2]) for x in (it.dim, it.stride))
    return Tensor(replace(it, dim=dim, stride=stride, inferred=frozenset()))


def scale(node: PrimitiveNode, factors: tuple[Factor, ...]) -> Any:
    """What scores are multiplied by: a number, or a tensor."""
    constants = [x for x in factors if x.tensor.attributes.value is not None]
    tensors = [x.tensor for x in factors if x.tensor.attributes.value is None]
    if tensors and (constants or len(tensors) > 1):
        raise Misfit(node, "ends an attention with several scales, of which one is a tensor.")
    if tensors:
        return tensors[0]
    return _constant(node, factors)


def _constant(node: PrimitiveNode, factors: tuple[Factor, ...]) -> float:
    product = 1.0
    for factor in factors:
        value = factor.tensor.attributes.value
        assert value is not None
        if factor.inverse and value == 0:
            raise Misfit(node, "ends an attention whose scores are divided by 0.")
        product = product / value if factor.inverse else product * value
    if not math.isfinite(product):
        raise Misfit(node, f"ends an attention with a scale of {product}.")
    return product


def masks(
    node: PrimitiveNode, scores: Scores, lengths: tuple[tuple[str, Tensor], ...]
) -> dict[str, Any]:
    """The bias, lengths and diagonals, as arguments of ``sdpa``."""
    batch, _, seq_q, seq_kv = scores.dim
    found = band(scores.keep.conditions, seq_q, seq_kv)
    if found is None:
        raise Misfit(
            node, "ends an attention whose masks are neither lengths nor one diagonal band."
        )
    for t in (found.seq_len_q, found.seq_len_kv):
        if t is not None and t.attributes.dim[0] != batch:
            raise Misfit(node, f"ends an attention with {t.get_name()}, not a length per batch.")
    masked = {"q": found.seq_len_q, "kv": found.seq_len_kv}
    for side, length in (*scores.lengths, *lengths):
        if masked[side] is not length:
            raise Misfit(
                node,
                f"ends an attention of which a product has the length {length.get_name()}, but no "
                "padding mask has; mask positions beyond it.",
            )
    return {
        "bias": added.bias(node, scores),
        "use_padding_mask": found.seq_len_q is not None or found.seq_len_kv is not None,
        "seq_len_q": found.seq_len_q,
        "seq_len_kv": found.seq_len_kv,
        "diagonal_band_left_bound": found.left,
        "diagonal_band_right_bound": found.right,
        "diagonal_alignment": diagonal_alignment(int(found.bottom_right)),
    }


def as_measured(node: AttentionNode) -> AttentionNode:
    """The node of :func:`masks`: operations measure a corner from lengths as they are."""
    if not node.diagonal.bottom_right or node.inputs.keys().isdisjoint(("seq_len_q", "seq_len_kv")):
        return node
    return replace(node, diagonal=replace(node.diagonal, corner_as_given=True))


def _dropout(node: PrimitiveNode, weights: Weights, numbers: list[HostNumber]) -> dict[str, Any]:
    mask = weights.mask
    if mask is None:
        return {}
    if isinstance(mask, Given):
        return {"dropout": (mask.tensor, scale(node, weights.scales))}
    keep = mask.node.numbers["bernoulli_probability"]
    check_drawn(mask.node, weights.scores)
    unknown = [x.tensor for x in weights.scales if x.tensor.attributes.value is None]
    known = tuple(x for x in weights.scales if x.tensor.attributes.value is not None)
    if known and (unknown or not math.isclose(_constant(node, known), 1 / keep, rel_tol=1e-3)):
        raise Misfit(node, f"ends an attention whose dropout is not scaled by {1 / keep:g}.")
    if len(unknown) + bool(known) != 1 or not all(t.get_is_pass_by_value() for t in unknown):
        raise Misfit(
            node,
            f"ends an attention whose dropout is not scaled by {1 / keep:g}, as one number that is "
            "known or passed by value.",
        )
    for t in unknown:
        wanted = f"{1 / keep:g}, the inverse of the probability to keep"
        numbers.append(host_number(t, wanted, lambda x: math.isclose(x, 1 / keep, rel_tol=1e-3)))
    seed, offset = mask.node.inputs.values()
    return {"dropout": (1 - keep, seed, offset)}


def check_drawn(rng: PrimitiveNode, scores: Scores) -> None:
    (drawn,) = (t.attributes.dim for t in rng.outputs.values())
    if drawn != scores.dim:
        raise Misfit(rng, f"draws {drawn}; expected {scores.dim}, as scores are.")


def host_number(t: Tensor, wanted: str, accepts: Any) -> HostNumber:
    return HostNumber(t, spec_of(t.get_name() or "a number", t.attributes), wanted, accepts)
