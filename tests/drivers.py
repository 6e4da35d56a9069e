"""Ways to run a case, through a plan or through graphs, and the check of what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import dlattn as cudnn
from dlattn.dtypes import from_any
from dlattn.problem import (
    PAGE_TABLES,
    SCORE_GRADIENT_ROLES,
    SCORE_MOD_ROLES,
    Alibi,
    Band,
    Bias,
    BlockMask,
    Direction,
    Dropout,
    Edit,
    FlashDropout,
    Geometry,
    GivenMask,
    Mask,
    Padding,
    Philox,
    Problem,
    Scale,
    SoftCap,
    Values,
    alibi_slopes,
    offset_role,
)
from tests import oracle, tally
from tests.builders import Guarded, check_poison_intact, make_tensors
from tests.cases import Case
from tests.libraries import Library
from tests.libraries import gpu_library as gpu_library
from tests.pages import by_sequence, check_page_ends
from tests.score_mods import callback

Tensors = Mapping[str, Guarded]

#: Bytes before and after the workspace.
_MARGIN = 4096

#: Tensors that a case may have, and that forward and backward read.
OPTIONS = (
    *("attn_scale", "bias", "alibi_slopes", "block_mask", "seq_len_q", "seq_len_kv", "sink_token"),
    *("dropout_seed", "dropout_offset", "dropout_mask", "dropout_scale", "dropout_scale_inv"),
    *PAGE_TABLES.values(),
)

#: Tensors of a forward, and of a backward.
_BOTH = ("q", "k", "v", "o", "stats", *OPTIONS, "rng_dump")
FORWARD = (*_BOTH, "score_max", "score_sum_exp", "debug_softmax")
BACKWARD = (*_BOTH, "dO", "dQ", "dK", "dV", "dSink_token", "dBias")


def check(case: Case, library: Library, run: Callable[[Case, Tensors], None]) -> None:
    """Fails unless every output of the case is right, and nothing else was written.

    Args:
        run: runs the forward and, if the case has stats, the backward that reads its results.

    Whatever fails, the line to repeat it with is printed.
    """
    tally.count("calls")
    try:
        tensors = make_tensors(case, library)
        run(case, tensors)
        check_poison_intact(tensors)
        arrays = {role: t.padded() for role, t in tensors.items()}
        if case.stats:
            check_page_ends(case, arrays)
        arrays = by_sequence(case, arrays)
        skipped = () if case.stats else ("dQ", "dK", "dV", "dSink_token", *case.added_axes())
        outputs = [role for role, t in tensors.items() if t.written and role not in skipped]
        for role, assert_right in oracle.OF_SCORES.items():
            if role in outputs:
                outputs.remove(role)
                assert_right(case, arrays, arrays[role])
        oracle.assert_close(case, arrays, {role: arrays[role] for role in outputs})
    except BaseException:
        print(f'pytest tests/test_repro.py --repro "{case!r}"')
        raise


@dataclass(frozen=True)
class Roles:
    """The tensors of a graph: those it reads, those it makes, and those it is given to write."""

    inputs: tuple[str, ...]
    made: tuple[str, ...]
    written: tuple[str, ...]


#: A built graph, its tensors and numbers by role, and other arguments of ``execute``.
Ready = tuple[cudnn.pygraph, dict[str, Any], dict[str, Any]]
Source = Callable[[Case, Tensors, Roles], Ready]


def built(case: Case, tensors: Tensors, roles: Roles) -> Ready:
    """The graph of a case."""
    graph, given = declare_graph(case, tensors, roles)
    graph.build()
    return graph, given, {}


def passes(case: Case, tensors: Tensors) -> Iterator[Roles]:
    """The forward, and where it has statistics the backward."""
    made = ("o", "stats") if case.stats else ("o",)
    dump = ("rng_dump",) * case.rng_dump
    debug = ("debug_softmax",) * case.looks_inside
    yield Roles(("q", "k", "v"), made, (*case.row_outputs, *dump, *debug))
    if case.stats:
        inputs = ("q", "k", "v", "o", "dO", "stats")
        made = ("dQ", "dK", "dV", *(f"d_mod_{name}" for name in case.mod_gradients()))
        written = (*(role for role in ("dSink_token", "dBias") if role in tensors), *dump)
        yield Roles(inputs, made, written)


def run_graph(case: Case, tensors: Tensors, source: Source = built) -> None:
    """Runs a forward and a backward graph on the device of the tensors."""
    forward, *backward = passes(case, tensors)
    _run_graph_of(case, tensors, forward, source)
    for roles in backward:
        try:
            _run_graph_of(case, tensors, roles, source)
        except cudnn.cudnnGraphNotSupportedError as refusal:
            # Not every kernel has an order of additions; none leaves the wish out of its reasons.
            if not (case.deterministic and "use_deterministic_algorithm" in str(refusal)):
                raise
            _run_graph_of(replace(case, deterministic=False), tensors, roles, source)


def problem_of(case: Case, direction: Direction, ragged: bool = False) -> Problem:
    """The problem that a graph of the case lowers to."""
    numpy = Library()
    return Problem(
        direction=direction,
        dtype=from_any(numpy.dtype(case.dtype)),
        head_dim_qk=case.head_dim_qk,
        head_dim_v=case.head_dim_v,
        edits=edits_of(case),
        masks=masks_of(case),
        stats=from_any(numpy.dtype(case.stats)) if case.stats else None,
        score_max="score_max" in case.row_outputs and direction is Direction.FORWARD,
        score_sum_exp="score_sum_exp" in case.row_outputs and direction is Direction.FORWARD,
        sink=case.sink is not None,
        dropout=dropout_of(case),
        paged_k=case.page_k is not None,
        paged_v=case.page_v is not None,
        ragged=ragged,
        deterministic=case.deterministic and direction is Direction.BACKWARD,
        d_bias=from_any(numpy.dtype(case.d_bias))
        if case.d_bias and direction is Direction.BACKWARD
        else None,
    )


def edits_of(case: Case) -> tuple[Edit, ...]:
    scale = Scale(positive=case.scale_as == "value" and case.scale_value > 0)
    edits: list[Edit] = [scale]
    if case.softcap:
        edits.append(SoftCap())
    if case.bias:
        contiguous = case.bias_dim()[3] > 1 and case.bias_stride()[3] == 1
        one_row = case.bias_dim()[2] < case.seq_q
        aligned = _has_aligned_bias(case)
        dtype = from_any(Library().dtype(case.bias))
        edits.append(Bias(dtype, contiguous, aligned, one_row=aligned and one_row))
    if case.alibi:
        edits.append(Alibi(symmetric=case.alibi != "cudnn"))
    return tuple(edits)


def _has_aligned_bias(case: Case) -> bool:
    """Whether the copy engine can move tiles of the bias."""
    dim, stride = case.bias_dim(), case.bias_stride()
    gaps = [step for size, step in zip(dim[:3], stride, strict=False) if size > 1]
    return (
        case.bias != "float32"
        and (dim[3] > 1, stride[3]) == (True, 1)
        and all(step * Library().dtype(case.bias).itemsize % 16 == 0 for step in gaps)
    )


def dropout_of(case: Case) -> Dropout | None:
    if not case.drops:
        return None
    if case.is_random:
        return FlashDropout() if case.dropout_algorithm == "flash" else Philox()
    contiguous = case.mask_dim()[3] > 1 and case.mask_stride()[3] == 1
    return GivenMask(from_any(Library().dtype(str(case.dropout))), contiguous)


def dropout_numbers(case: Case) -> dict[str, Any]:
    """What a geometry, or values, know of dropout besides tensors."""
    scale = case.dropout_scale()
    numbers: dict[str, Any] = {"dropout_scale": scale, "dropout_scale_inv": 1 / scale}
    if isinstance(case.dropout, float):
        seed, offset = case.philox()
        numbers |= {"dropout_p": case.probability, "dropout_seed": seed, "dropout_offset": offset}
    return numbers


def masks_of(case: Case) -> tuple[Mask, ...]:
    masks: list[Mask] = [Padding()]
    if case.left is not None or case.right is not None:
        masks.append(Band(left=case.left is not None, right=case.right is not None))
    if case.blocks is not None:
        masks.append(BlockMask())
    return tuple(masks)


def geometry_of(case: Case, tensors: Tensors) -> Geometry:
    modified = [f"mod_{name}" for name in case.mod_dims()]
    roles = dict(zip(modified, SCORE_MOD_ROLES, strict=False))
    gradients = (f"d_{name}" for name in modified)
    roles |= dict(zip(gradients, SCORE_GRADIENT_ROLES, strict=False))
    return Geometry(
        tensors={roles.get(role, role): t.spec for role, t in tensors.items()},
        attn_scale=case.scale_value,
        softcap=case.softcap,
        band_left=case.left,
        band_right=case.right,
        bottom_right=case.bottom_right,
        **dropout_numbers(case),
        max_seq_kv=case.seq_kv if case.page_k or case.page_v else None,
    )


def values_of(case: Case, arrays: Mapping[str, Any]) -> Values:
    given = case.slopes_dim() is not None
    slopes = arrays["alibi_slopes"] if given else alibi_slopes(case.heads_q)
    return Values(
        attn_scale=case.scale_value,
        softcap=case.softcap,
        bias=arrays["bias"] if case.bias else None,
        block_mask=arrays.get("block_mask"),
        alibi_slopes=slopes.reshape(-1, case.heads_q, 1, 1),
        len_q=np.reshape(case.lengths_q(), (-1, 1, 1, 1)),
        len_kv=np.reshape(case.lengths_kv(), (-1, 1, 1, 1)),
        band_left=case.left,
        band_right=case.right,
        bottom_right=case.bottom_right,
        heads_q=case.heads_q,
        dropout_mask=arrays.get("dropout_mask"),
        **dropout_numbers(case),
    )


def declare_graph(
    case: Case, tensors: Tensors, roles: Roles, **options: Any
) -> tuple[cudnn.pygraph, dict[str, Any]]:
    """The graph of a case, and its tensors and numbers by role."""
    graph = cudnn.pygraph(
        io_data_type=from_any(Library().dtype(case.dtype)),
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **options,
    )
    backward = "dO" in roles.inputs
    optional = [role for role in OPTIONS if role in tensors]
    if not backward and "dropout_scale_inv" in optional:
        optional.remove("dropout_scale_inv")
    fed = [*roles.inputs, *optional, *roles.written]
    given: dict[str, Any] = {role: declare(graph, role, tensors) for role in fed}
    if case.scale_as == "value" and case.scale is not None:
        given["attn_scale"] = case.scale
    if case.page_k or case.page_v:
        given["paged_attention_max_seq_len_kv"] = case.seq_kv
    named = {role: t for role, t in given.items() if not role.startswith("dropout_")}
    mods = {name: declare(graph, f"mod_{name}", tensors) for name in case.mod_dims()}
    if case.score_mod is not None:
        named["score_mod"] = callback(case.score_mod, mods)
    given |= {f"mod_{name}": t for name, t in mods.items()}
    arguments = {**named, **edit_arguments(case), **_mask_arguments(case)}
    arguments["dropout"] = dropout_argument(case, given, backward=backward)
    arguments["dropout_algorithm"] = case.dropout_algorithm if case.is_random else None
    arguments["use_padding_mask"] = "seq_len_q" in given or "seq_len_kv" in given
    if case.bounded and backward and {*fed, *roles.made} & set(case.ragged):
        arguments["max_total_seq_len_q"] = max(1, sum(case.lengths_q()))
        arguments["max_total_seq_len_kv"] = max(1, sum(case.lengths_kv()))
    if backward:
        arguments["use_deterministic_algorithm"] = case.deterministic
        arguments["score_mod_gradients"] = [mods[name] for name in case.mod_gradients()]
        results = graph.sdpa_backward(**arguments)
    else:
        results = graph.sdpa(**arguments, generate_stats=case.stats is not None)
    for role, t in zip(roles.made, results, strict=False):
        spec = tensors[role].spec
        t.set_output(True).set_dim(spec.dim).set_stride(spec.stride).set_data_type(spec.dtype)
        if case.layout(role) == "odd":
            t.set_alignment(tensors[role].tensor.itemsize)
        given[role] = set_offset(graph, role, t, tensors)
    return graph, given


def _run_graph_of(case: Case, tensors: Tensors, roles: Roles, source: Source) -> None:
    forget_dump(tensors)
    graph, given, overrides = source(case, tensors, roles)
    tally.count(graph.get_plan_name_at_index(0))
    known = {role: t for role, t in given.items() if isinstance(t, cudnn.tensor)}
    pack = {t: tensors[role].tensor for role, t in known.items()}
    for role, t in known.items():
        if offset_role(role) in tensors:
            pack[t.attributes.ragged_offset] = tensors[offset_role(role)].tensor
    size = graph.get_workspace_size(**overrides)
    guarded = tensors["q"].library.full(size + 2 * _MARGIN, 0x7F, "uint8")
    workspace = guarded[_MARGIN : _MARGIN + size] if size else None
    graph.execute(pack, workspace, **overrides)
    if case.deterministic:
        first = {role: t.library.copy(t.bits) for role, t in tensors.items()}
        graph.execute(pack, workspace, **overrides)
        for role, bits in first.items():
            assert bool((tensors[role].bits == bits).all()), f"{role} differs in a second run"
    outside = int((guarded[:_MARGIN] != 0x7F).sum() + (guarded[_MARGIN + size :] != 0x7F).sum())
    assert outside == 0, f"{outside} bytes written outside the workspace of {size}"


def dropout_argument(case: Case, given: Mapping[str, Any], backward: bool) -> Any:
    """``dropout``: of the graph's tensors, and of numbers where the case has no tensors."""
    if case.dropout is None:
        return None
    numbers = dropout_numbers(case)
    roles = ["dropout_seed", "dropout_offset"]
    if not case.is_random:
        roles = ["dropout_scale", *["dropout_scale_inv"] * backward]
    first = case.dropout if case.is_random else given["dropout_mask"]
    return (first, *(given.get(role, numbers.get(role)) for role in roles))


def forget_dump(tensors: Tensors) -> None:
    """So that the backward's dump is seen to be its own."""
    if "rng_dump" in tensors:
        tensors["rng_dump"].tensor[...] = float("nan")


def declare(graph: cudnn.pygraph, role: str, tensors: Tensors, prefix: str = "") -> cudnn.tensor:
    """The graph tensor of an input; a ragged or packed one has another shape than its memory."""
    it = tensors[role]
    if not (it.spec.ragged or it.spec.packed):
        return graph.tensor_like(it.tensor, name=prefix + role)
    declared = graph.tensor(it.spec.dim, it.spec.stride, it.spec.dtype, name=prefix + role)
    is_aligned = it.start * it.tensor.itemsize % 16 == 0
    declared.set_alignment(16 if is_aligned else it.tensor.itemsize)
    return set_offset(graph, role, declared, tensors, prefix)


def set_offset(
    graph: cudnn.pygraph, role: str, declared: cudnn.tensor, tensors: Tensors, prefix: str = ""
) -> cudnn.tensor:
    """Gives a graph tensor its offsets, if it has any."""
    name = offset_role(role)
    if name not in tensors:
        return declared
    return declared.set_ragged_offset(graph.tensor_like(tensors[name].tensor, name=prefix + name))


def edit_arguments(case: Case) -> dict[str, Any]:
    """The edits that are no tensors, as arguments of ``sdpa``."""
    return {"softcap": case.softcap, "use_alibi_mask": case.alibi == "cudnn"}


def _mask_arguments(case: Case) -> dict[str, Any]:
    """The shorthand flags where there is one for the band, the bounds otherwise."""
    if case.left is None and case.right == 0:
        name = "use_causal_mask_bottom_right" if case.bottom_right else "use_causal_mask"
        return {name: True}
    corner = cudnn.diagonal_alignment
    return {
        "diagonal_alignment": corner.BOTTOM_RIGHT if case.bottom_right else corner.TOP_LEFT,
        "diagonal_band_left_bound": case.left,
        "diagonal_band_right_bound": case.right,
    }
