"""Partial attention states, and the attention over the union of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from dlattn.dtypes import data_type, itemsize
from dlattn.errors import InvalidVariantPackError, cudnnGraphNotSupportedError
from dlattn.plans.merge import STATE_TYPES, MergeStates
from dlattn.problem import TensorSpec
from dlattn.runtime.protocols import TensorView, compact_strides
from dlattn.runtime.streams import current_stream
from dlattn.runtime.target import CPU, cuda_target
from dlattn.runtime.tensors import allocate, order_before, to_caller, view


def overlaps(dim: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """TODO: problem/layout.py"""
    reach = 0
    for step, size in sorted((s, d) for d, s in zip(dim, stride, strict=True) if d > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


#: Layout -> axes of tokens and of heads in an output, from its end.
_AXES = {"bshd": (-3, -2), "bhsd": (-2, -3), "thd": (-3, -2)}


def merge_states(
    o1: Any,
    lse1: Any,
    o2: Any = None,
    lse2: Any = None,
    *,
    layout: str = "bshd",
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Attention over a union of disjoint sets of keys, from the attention over each.

    ``o = sum_i exp(lse_i - lse) o_i`` with ``lse = log(sum_i exp(lse_i))``: what ring attention
    (arXiv 2310.01889), prefix sharing and split keys need. Exact up to rounding, associative and
    commutative. A state without keys, of which ``lse`` is -inf (or +inf, as FlashAttention-2 says
    it), adds nothing, whatever its ``o`` holds; where no state has keys, ``o`` is 0 and ``lse``
    that of the first state.

    Args:
        o1, o2: outputs, fp16, bf16 or fp32 (on the CPU also fp64), each its own; of any strides, 1
            for the last dimension.
        lse1, lse2: natural logarithms of the sums of exponentials, fp32 (on the CPU also fp64).
        layout: ``"bshd"``, FlashAttention's: ``o`` is (..., S, H, D) and ``lse`` (..., H, S).
            ``"bhsd"``, cuDNN's: ``o`` is (..., H, S, D) and ``lse`` (..., H, S). ``"thd"``, packed
            sequences: ``o`` is (T, H, D) and ``lse`` (H, T). Any number of dimensions may lead, and
            ``lse`` may have a 1 as one more last dimension, as in graphs' statistics.
        out: memory for the results; may be that of a state, whose ``o`` has the result's type.

    Without ``o2`` and ``lse2``, the first dimension of ``o1`` and ``lse1`` counts states.

    Returns:
        ``o`` in the type of ``o1`` and ``lse``, in ``o1``'s framework, contiguous, or ``out``.

    Raises:
        InvalidVariantPackError: a tensor is not of the shape, type or device that the others imply
            (a ``ValueError``).
        cudnnGraphNotSupportedError: dimensions that lead are not evenly spaced in memory.
    """
    given = {"o_first": o1, "lse_first": lse1}
    if (o2 is None) != (lse2 is None):
        raise InvalidVariantPackError("o2 and lse2 are given together, or neither is.")
    if o2 is not None:
        given |= {"o_other": o2, "lse_other": lse2}
    if out is not None:
        if not isinstance(out, Sequence) or len(out) != 2:
            raise InvalidVariantPackError(f"out: expected the pair (o, lse), got {out!r:.100}.")
        given |= {"o": out[0], "lse": out[1]}
    views = {role: _view(role, tensor) for role, tensor in given.items()}
    pointers = {role: seen.ptr for role, seen in views.items()}
    aligned = not any(pointers[role] % 16 for role in pointers if _kind(role) == "o")
    call = _prepare(layout, aligned, tuple((role, seen[1:]) for role, seen in views.items()))
    made = {role: allocate(o1, it.dim, it.stride, it.dtype) for role, it in call.results.items()}
    pointers |= {role: view(tensor).ptr for role, tensor in made.items()}
    pointers |= {role: pointers[first] + nbytes for role, (first, nbytes) in call.inside.items()}
    inputs = [tensor for role, tensor in given.items() if role not in _RESULTS]
    target, stream = call.plan.target, 0
    if target.kind == "cuda":
        stream = current_stream(inputs, target.index)
    order_before(inputs, stream)
    call.plan.execute(pointers, stream)
    if out is not None:
        return out[0], out[1]
    return to_caller(made["o"], o1), to_caller(made["lse"], o1)


#: Role -> what the user calls it.
_LABELS = {
    "o_first": "o1", "lse_first": "lse1", "o_other": "o2", "lse_other": "lse2",
    "o": "out[0]", "lse": "out[1]",
}  # fmt: skip
_RESULTS = ("o", "lse")


def _kind(role: str) -> str:
    """``"o"`` or ``"lse"``."""
    return role.partition("_")[0]


def _view(role: str, tensor: Any) -> TensorView:
    try:
        return view(tensor)
    except InvalidVariantPackError as error:
        raise InvalidVariantPackError(f"{_LABELS[role]}: {error}") from error


class _Call(NamedTuple):
    """What is the same for all calls whose tensors look alike.

    Attributes:
        results: the results that the call allocates.
        inside: role of a tensor that is part of another -> that one's, and how many bytes into it.
    """

    plan: MergeStates
    results: dict[str, TensorSpec]
    inside: dict[str, tuple[str, int]]


@lru_cache(maxsize=1024)
def _prepare(layout: str, aligned: bool, seen: tuple[tuple[str, tuple[Any, ...]], ...]) -> _Call:
    """Checks the tensors, whose views without addresses these are, and builds the plan."""
    views = {role: TensorView(0, *facts) for role, facts in seen}
    if layout not in _AXES:
        raise InvalidVariantPackError(f"layout: expected one of {list(_AXES)}, got {layout!r}.")
    stacked = "o_other" not in views
    first, first_lse = views["o_first"], views["lse_first"]
    least = 3 + stacked
    if len(first.shape) < least or (layout == "thd" and len(first.shape) > least):
        raise InvalidVariantPackError(
            f"o1: expected {'states first, then ' if stacked else ''}the dimensions of layout "
            f"{layout!r}, got shape {first.shape}."
        )
    if stacked and first.shape[0] == 0:
        raise InvalidVariantPackError(f"o1: expected one state or more, got shape {first.shape}.")
    o_shape = first.shape[stacked:]
    tokens, heads = (o_shape[axis] for axis in _AXES[layout])
    lse_shape = (*o_shape[:-3], heads, tokens)
    if len(first_lse.shape) - stacked == len(o_shape):
        lse_shape = (*lse_shape, 1)
    shapes = {"o": o_shape, "lse": lse_shape}
    results = {}
    for role in _RESULTS:
        like, shape = views[f"{role}_first"], shapes[role]
        if role not in views:
            stride = compact_strides(shape)
            results[role] = TensorSpec(role, shape, stride, like.dtype)
            views[role] = TensorView(0, shape, stride, like.dtype, first.device, True)
        elif views[role].dtype is not like.dtype:
            raise InvalidVariantPackError(
                f"{_LABELS[role]}: expected elements of {like.dtype}, as {role}1 has, got "
                f"{views[role].dtype}."
            )
    specs, inside = {}, {}
    for role, it in views.items():
        states = first.shape[:1] if stacked and role.endswith("first") else ()
        _check(role, it, first, (*states, *shapes[_kind(role)]))
        axes = len(states)
        rows = it._replace(shape=it.shape[axes:], stride=it.stride[axes:])
        specs[role] = _rows(role, rows, layout, len(o_shape))
    for role in ("o_other", "lse_other"):
        count, step = 1, 0
        if stacked:
            alone = role.replace("other", "first")
            specs[role] = specs[alone]
            count, step = first.shape[0] - 1, views[alone].stride[0]
            inside[role] = (alone, step * itemsize(views[alone].dtype))
        one = specs[role]
        specs[role] = replace(one, dim=(count, *one.dim), stride=(step, *one.stride))
    aligned = aligned and inside.get("o_other", ("", 0))[1] % 16 == 0
    target = CPU if first.device[0] == "cpu" else cuda_target(first.device[1])
    reason = MergeStates.refusal(specs["o"], target)
    if reason is not None:
        raise cudnnGraphNotSupportedError(f"merge_states: {reason}")
    plan = MergeStates(specs, target, aligned)
    plan.build()
    return _Call(plan, results, inside)


def _check(role: str, it: TensorView, first: TensorView, shape: tuple[int, ...]) -> None:
    types = STATE_TYPES if _kind(role) == "o" else (data_type.FLOAT,)
    if first.device[0] == "cpu":
        types = (*types, data_type.DOUBLE)
    complaint = None
    if it.device[0] not in ("cpu", "cuda"):
        complaint = f"expected memory of a CPU or a CUDA device, got {it.device}"
    elif it.device != first.device:
        complaint = f"expected memory on {first.device}, where o1 is, got {it.device}"
    elif it.dtype not in types:
        complaint = f"expected {' or '.join(t.name for t in types)}, got {it.dtype}"
    elif it.shape != shape:
        complaint = f"expected shape {shape}, got {it.shape}"
    elif _kind(role) == "o" and it.shape[-1] > 1 and it.stride[-1] != 1:
        complaint = f"expected 1 as the stride of the last dimension, got {it.stride}"
    elif min(it.stride) < 0:
        complaint = f"expected no negative strides, got {it.stride}"
    elif role in _RESULTS and not it.writable:
        complaint = "it is written to, but its framework made it read-only"
    elif role in _RESULTS and overlaps(it.shape, it.stride):
        complaint = f"it is written to, but with strides {it.stride} elements share memory"
    if complaint is not None:
        raise InvalidVariantPackError(f"{_LABELS[role]}: {complaint}.")


def _rows(role: str, it: TensorView, layout: str, rank: int) -> TensorSpec:
    """One state as (batch, outer, inner), of outputs also D."""
    lead = rank - 3
    axes = [lead, lead + 1, rank - 1]
    if _kind(role) == "lse":
        axes = [lead, lead + 1] if layout == "bhsd" else [lead + 1, lead]
    size, step = _joined(role, it.shape[:lead], it.stride[:lead])
    return TensorSpec(
        _LABELS[role],
        (size, *(it.shape[axis] for axis in axes)),
        (step, *(it.stride[axis] for axis in axes)),
        it.dtype,
    )


def _joined(role: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, int]:
    """Size and stride of one dimension in the place of several."""
    size, step = 1, 0
    for extent, own in zip(reversed(shape), reversed(stride), strict=True):
        if extent == 1:
            continue
        if size == 1:
            step = own
        elif own != size * step:
            raise cudnnGraphNotSupportedError(
                f"{_LABELS[role]}: the dimensions that lead, of sizes {shape} and strides {stride},"
                " are not evenly spaced in memory; pass a contiguous copy."
            )
        size *= extent
    return size, step
