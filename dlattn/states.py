"""Partial attention states, and the attention over the union of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dlattn.calls.apart import apart
from dlattn.calls.arguments import Argument, Laid, admit, choice
from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call, Output, prepared
from dlattn.dtypes import data_type, itemsize
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.opaque import opaque
from dlattn.plans.merge import STATE_TYPES, MergeStates
from dlattn.problem import TensorSpec
from dlattn.runtime.target import CPU, cuda_target

#: Layout -> axes of tokens and of heads in an output, from its end.
_AXES = {"bshd": (-3, -2), "bhsd": (-2, -3), "thd": (-3, -2)}


@opaque
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
        o1, o2: outputs, fp16, bf16 or fp32 (on the CPU also fp64), each its own; of any strides but
            negative ones, 1 for the last dimension.
        lse1, lse2: natural logarithms of the sums of exponentials, fp32 (on the CPU also fp64).
        layout: ``"bshd"``, FlashAttention's: ``o`` is (..., S, H, D) and ``lse`` (..., H, S).
            ``"bhsd"``, cuDNN's: ``o`` is (..., H, S, D) and ``lse`` (..., H, S). ``"thd"``, packed
            sequences: ``o`` is (T, H, D) and ``lse`` (H, T). Any number of dimensions may lead, and
            ``lse`` may have a 1 as one more last dimension, as in graphs' statistics.
        out: memory for the results; may be that of a state itself (the same elements in the same
            order), whose ``o`` has the result's type.

    Without ``o2`` and ``lse2``, the first dimension of ``o1`` and ``lse1`` counts states.

    Returns:
        ``o`` in the type of ``o1`` and ``lse``, in ``o1``'s framework, contiguous, or ``out``.

    Raises:
        InvalidArgumentError: a tensor is not of the shape, type or device that the others imply.
        cudnnGraphNotSupportedError: dimensions that lead are not evenly spaced in memory.
    """
    if (o2 is None) != (lse2 is None):
        raise InvalidArgumentError("o2 and lse2 are given together, or neither is.")
    if out is not None and (not isinstance(out, Sequence) or len(out) != 2):
        raise InvalidArgumentError(f"out: expected the pair (o, lse), got {out!r:.100}.")
    tensors = (o1, lse1, o2, lse2, *(out or (None, None)))
    call, addresses = _CALLS.find(tensors, (layout,))
    o, lse = call(tensors, addresses)
    return o, lse


def _prepare(o1: Any, lse1: Any, o2: Any, lse2: Any, o: Any, lse: Any, said: tuple[Any]) -> Call:
    (layout,) = said
    values = (o1, lse1, o2, lse2, o, lse)
    names = ("o1", "lse1", "o2", "lse2", "out[0]", "out[1]")
    given = admit(("o1", "lse1"), dict(zip(names, values, strict=True)))
    choice("layout", layout, _AXES)
    states = given["o1"].shape[:1] if o2 is None else ()
    rank, least = len(given["o1"].shape) - len(states), 3
    if 0 in states or rank < least or (layout == "thd" and rank > least):
        raise InvalidArgumentError(
            f"o1: expected {'one state or more, and ' if o2 is None else ''}the dimensions of "
            f"layout {layout!r}, got shape {given['o1'].shape}."
        )
    o_shape = given["o1"].shape[len(states) :]
    tokens, heads = (o_shape[axis] for axis in _AXES[layout])
    lse_shape = (*o_shape[:-3], heads, tokens)
    if len(given["lse1"].shape) == len(states) + rank:
        lse_shape = (*lse_shape, 1)
    for name, argument in given.items():
        _check(argument, states if name in ("o1", "lse1") else (), o_shape, lse_shape)
    for name, like in (("out[0]", "o1"), ("out[1]", "lse1")):
        if name in given:
            given[name].expect_type(given[like].dtype)
    results = [
        Output("o", o_shape, given["o1"].dtype, given.get("out[0]")),
        Output("lse", lse_shape, given["lse1"].dtype, given.get("out[1]")),
    ]
    specs = {
        "o_first": _rows(given["o1"], "o", layout, rank, len(states)),
        "lse_first": _rows(given["lse1"], "lse", layout, rank, len(states)),
        "o": _rows(results[0], "o", layout, rank),
        "lse": _rows(results[1], "lse", layout, rank),
    }
    inputs, inside = {"o_first": 0, "lse_first": 1}, {}
    for kind, first, second in (("o", "o1", "o2"), ("lse", "lse1", "lse2")):
        one, role, count, step = specs[f"{kind}_first"], f"{kind}_other", 1, 0
        if states:
            count, step = states[0] - 1, given[first].stride[0]
            inside[role] = step * itemsize(one.dtype)
        else:
            one = _rows(given[second], kind, layout, rank)
        inputs[role] = given[first if states else second].position
        specs[role] = replace(one, dim=(count, *one.dim), stride=(step, *one.stride))
    device = given["o1"].seen.device
    target = CPU if device[0] == "cpu" else cuda_target(device[1])
    reason = MergeStates.refusal(specs["o"], target)
    if reason is not None:
        raise cudnnGraphNotSupportedError(f"merge_states: {reason}")
    begins = [given[name].seen.ptr for name in ("o1", "o2", "out[0]") if name in given]
    wide = not any(begin % 16 for begin in (*begins, inside.get("o_other", 0)))
    plan = MergeStates(specs, target, wide)
    # Results may lie where a state does, but not where the other one does.
    two: dict[str, Argument] = {it: given[it] for it in ("out[0]", "out[1]") if it in given}
    return prepared(values, device, inputs, results, plan, inside, apart(two, two))


_CALLS = CallCache(_prepare, drops=range(4))


def _check(
    it: Argument, states: tuple[int, ...], o_shape: tuple[int, ...], lse_shape: tuple[int, ...]
) -> None:
    is_lse = it.name in ("lse1", "lse2", "out[1]")
    on_cpu = (data_type.DOUBLE,) if it.seen.device[0] == "cpu" else ()
    it.expect_type(*((data_type.FLOAT,) if is_lse else STATE_TYPES), *on_cpu)
    shape = (*states, *(lse_shape if is_lse else o_shape))
    it.expect_shape(shape, "which follows from o1 and the layout")
    if not is_lse:
        it.expect_rows()
    if it.name.startswith("out"):
        it.expect_output()


def _rows(it: Laid, kind: str, layout: str, rank: int, states: int = 0) -> TensorSpec:
    """One state as (batch, outer, inner), of outputs also D.

    Args:
        kind: ``"o"`` or ``"lse"``.
        rank: dimensions of an output.
        states: dimensions before, which count states: 1 or 0.
    """
    shape, stride = it.shape[states:], it.stride[states:]
    lead = rank - 3
    axes = [lead, lead + 1, rank - 1]
    if kind == "lse":
        axes = [lead, lead + 1] if layout == "bhsd" else [lead + 1, lead]
    size, step = _joined(it.name, shape[:lead], stride[:lead])
    return TensorSpec(
        it.name,
        (size, *(shape[axis] for axis in axes)),
        (step, *(stride[axis] for axis in axes)),
        it.dtype,
    )


def _joined(name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, int]:
    """Size and stride of one dimension in the place of several."""
    if 0 in shape:
        return 0, 0
    size, step = 1, 0
    for extent, own in zip(reversed(shape), reversed(stride), strict=True):
        if extent == 1:
            continue
        if size == 1:
            step = own
        elif own != size * step:
            raise cudnnGraphNotSupportedError(
                f"{name}: the dimensions that lead, of sizes {shape} and strides {stride}, are not "
                "evenly spaced in memory; pass a contiguous copy."
            )
        size *= extent
    return size, step
