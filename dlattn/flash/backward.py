"""``mha_bwd`` and ``mha_varlen_bwd``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlattn.calls.apart import Check, apart
from dlattn.calls.arguments import Argument, Laid, are_aligned, flag, soft_cap
from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call, Output, prepared
from dlattn.calls.request import Request
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError
from dlattn.flash.dropout import dropout_of, drops, state_roles
from dlattn.flash.layouts import Layout
from dlattn.flash.options import (
    Options,
    check_output,
    cut,
    dense_layout,
    element_type,
    named,
    packed_layout,
    padded_size,
    role_options,
    roomy,
    scale_of,
    window_of,
)
from dlattn.opaque import opaque
from dlattn.problem import Direction
from dlattn.runtime.tensors import padded, settle, view

Results = tuple[Any, Any, Any, Any]

#: The tensors of each function, in the order of its calls.
_DENSE = (
    *("q", "k", "v", "dout", "out", "softmax_lse", "dq_", "dk_", "dv_"),
    *("alibi_slopes_", "seqused_q", "seqused_k", "philox_seed", "philox_offset"),
)
_PACKED = (*_DENSE, "cu_seqlens_q", "cu_seqlens_k")


@opaque
def mha_bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq_: Any = None,
    dk_: Any = None,
    dv_: Any = None,
    alibi_slopes_: Any = None,
    p_dropout: float = 0.0,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    philox_seed: Any = None,
    philox_offset: Any = None,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
) -> Results:
    """The gradients of :func:`dlattn.flash.mha_fwd` (PyTorch's ``flash_api.h``).

    Arguments that are not listed are those of the forward.

    Args:
        dout: the output's gradient, of the head size before padding, and its type.
        q, k, v: as given to the forward; or as it returned them, if v has q's head size, because
            from a padded v gradients are as wide as dout.
        out, softmax_lse: as the forward returned them; out may be padded like v. Rows without keys
            may have an lse of +inf or of -inf.
        dq_, dk_, dv_: memory for the gradients, each its own, of which no input is a part; ``None``
            makes it.
        deterministic: the same bits in every run; on CUDA only Hopper can.
        philox_seed, philox_offset: of dropout: the state that the forward returned, and anything;
            or seed and offset, one integer in each.

    Returns:
        dq, dk, dv, like q, k and v, of dout's head size; softmax_d, fp32, (batch_size, num_heads,
        seqlen_q up to a multiple of 128): ``(1 - p_dropout) * rowsum(dout * out)``, 0 in the rows
        that are too many. (The gradient of a head's sink s is, without dropout,
        ``-sum(exp(s - softmax_lse) * softmax_d)``.)

    Raises:
        InvalidArgumentError: an argument is wrong, or contradicts another.
        cudnnGraphNotSupportedError: no plan can do it; the message has each one's reason.
    """
    state = (philox_seed, philox_offset) if drops(p_dropout) else (None, None)
    tensors = (
        q, k, v, dout, out, softmax_lse, dq_, dk_, dv_, alibi_slopes_, seqused_q, seqused_k, *state,
    )  # fmt: skip
    options = (
        p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        False, 0, 0, 0, False, deterministic,
    )  # fmt: skip
    return _run(_dense_calls, tensors, options)


@opaque
def mha_varlen_bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq_: Any,
    dk_: Any,
    dv_: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    alibi_slopes_: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float = 0.0,
    softmax_scale: float | None = None,
    zero_tensors: bool = False,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    philox_seed: Any = None,
    philox_offset: Any = None,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
) -> Results:
    """The gradients of :func:`dlattn.flash.mha_varlen_fwd` of packed keys.

    Arguments that are not listed are those of the forward, and of :func:`mha_bwd`.

    Args:
        zero_tensors: what belongs to no sequence, or lies past its used rows, is 0 in all results,
            and not whatever was there.

    Returns:
        As :func:`mha_bwd`, softmax_d as (num_heads, total_q + 128 * batch_size): that of sequence i
        begins at ``cu_seqlens_q[i] + 128 * i``.

    Raises:
        InvalidArgumentError: as of :func:`mha_bwd`; in host memory also if cu_seqlens fall, or
            leave the tensors. (On a device, no sequence leaves the tensors.)
        cudnnGraphNotSupportedError: as of :func:`mha_bwd`.
    """
    state = (philox_seed, philox_offset) if drops(p_dropout) else (None, None)
    tensors = (
        q, k, v, dout, out, softmax_lse, dq_, dk_, dv_, alibi_slopes_, seqused_q, seqused_k, *state,
        cu_seqlens_q, cu_seqlens_k,
    )  # fmt: skip
    options = (
        p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        False, 0, max_seqlen_q, max_seqlen_k, zero_tensors, deterministic,
    )  # fmt: skip
    return _run(_packed_calls, tensors, options)


@dataclass(frozen=True)
class Backward:
    """What a backward does for all calls that look alike.

    Attributes:
        call: gives the results; ``None`` if tensors must be padded first.
        apart: of those, refuses memory for gradients that is another tensor's.
    """

    call: Call | None
    apart: Check | None = None


def _run(calls: CallCache[Backward], tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Results:
    backward, addresses = calls.find(tensors, options)
    if backward.call is None:
        if backward.apart is not None:
            backward.apart(addresses)
        return _run_padded(calls, tensors, options)
    dq, dk, dv, softmax_d = backward.call(tensors, addresses)
    return dq, dk, dv, softmax_d


def _run_padded(
    calls: CallCache[Backward], tensors: tuple[Any, ...], options: tuple[Any, ...]
) -> Results:
    """The same of head sizes that are multiples of 8; the gradients are cut."""
    q, k, v, dout, out, softmax_lse, dq_, dk_, dv_, *more = tensors
    p_dropout, softmax_scale, *others = options
    columns = _result_columns(*(view(x).shape[-1] for x in (q, v, dout)))
    wide = [_padded(x) for x in (q, k, v, dout, out)]
    scale = scale_of(softmax_scale, columns[0])
    *made, softmax_d = _run(
        calls,
        (*wide, softmax_lse, *(roomy(x) for x in (dq_, dk_, dv_)), *more),
        (p_dropout, scale, *others),
    )
    settle(q)
    dq, dk, dv = (cut(x, *it) for x, *it in zip(made, columns, (dq_, dk_, dv_), strict=True))
    return dq, dk, dv, softmax_d


def _padded(x: Any) -> Any:
    columns = view(x).shape[-1]
    wide = padded_size(columns)
    return x if columns == wide else padded(x, wide)


def _result_columns(head_size: int, head_size_v: int, of_dout: int) -> tuple[int, int, int]:
    """Head sizes of dq, dk and dv: where q was padded as v was, that of dout, too."""
    like_v = head_size == head_size_v == padded_size(of_dout)
    return (of_dout if like_v else head_size,) * 2 + (of_dout,)


def _prepare_dense(*given: Any) -> Backward:
    *tensors, options = given
    arguments, options = named(_DENSE, tensors), Options(*options)
    return _prepare(dense_layout(arguments), tensors, arguments, options)


def _prepare_packed(*given: Any) -> Backward:
    *tensors, options = given
    arguments, options = named(_PACKED, tensors), Options(*options)
    return _prepare(packed_layout(arguments, options), tensors, arguments, options)


def _prepare(
    layout: Layout, tensors: Sequence[Any], given: Mapping[str, Argument], options: Options
) -> Backward:
    q, k, v, dout, out = (given[name] for name in ("q", "k", "v", "dout", "out"))
    dtype = element_type(given, *_DENSE[:5], *_DENSE[6:9])
    columns = _result_columns(q.shape[-1], v.shape[-1], dout.shape[-1])
    _check_values(layout, v, dout, out)
    lse = given["softmax_lse"]
    lse.expect_type(data_type.FLOAT)
    lse.expect_shape(layout.lse, "that of the forward's")
    shapes = (layout.queries(columns[0]), layout.keys(columns[1]), layout.keys(columns[2]))
    for name, shape in zip(("dq_", "dk_", "dv_"), shapes, strict=True):
        check_output(given.get(name), shape, f"the gradient of {name[1]} of the original head size")
    memory = apart(given, ("dq_", "dk_", "dv_"))
    roles, positions = role_options(given, layout)
    dropout, numbers = dropout_of(options.p_dropout)
    offsets: dict[str, int] = {}
    if dropout is not None:
        states, places, offsets = state_roles(given)
        roles, positions = {**roles, **states}, {**positions, **places}
    window, softcap = window_of(layout, options), soft_cap(options.softcap)
    scale = scale_of(options.softmax_scale, q.shape[-1])
    if any(it.shape[-1] != padded_size(dout.shape[-1]) for it in (v, dout, out)) or (
        q.shape[-1] != padded_size(q.shape[-1])
    ):
        return Backward(None, memory)
    zero = 0.0 if flag("zero_tensors", options.zero_tensors) or layout.is_empty else None
    d_q, d_k, d_v = (
        Output(role, shape, dtype, given.get(name), zero, order=given[name[1]])
        for role, name, shape in zip(("dQ", "dK", "dV"), ("dq_", "dk_", "dv_"), shapes, strict=True)
    )
    has_more_rows = not layout.packed and layout.softmax_d[-1] != layout.seqlen_q
    delta = Output("delta", layout.softmax_d, data_type.FLOAT, None, 0.0 if has_more_rows else zero)
    inputs = {"q": q, "k": k, "v": v, "o": out, "dO": dout, "stats": lse}
    laid: dict[str, Laid] = {**inputs, "dQ": d_q, "dK": d_k, "dV": d_v, "delta": delta}
    request = Request(
        Direction.BACKWARD,
        {**{role: layout.spec(role, it) for role, it in laid.items()}, **roles},
        attn_scale=scale,
        window=window,
        softcap=softcap,
        dropout=dropout,
        numbers=numbers,
        deterministic=flag("deterministic", options.deterministic),
        most_tokens_q=layout.tokens_q,
        most_tokens_kv=layout.most_tokens_k,
        aligned=are_aligned(given.values()),
    )
    positions |= {role: it.position for role, it in inputs.items()}
    outputs, idle = (d_q, d_k, d_v, delta), layout.is_empty
    return Backward(
        prepared(tensors, q.seen.device, positions, outputs, request, offsets, memory, idle)
    )


def _check_values(layout: Layout, v: Argument, dout: Argument, out: Argument) -> None:
    """dout has the head size before padding; v and out that one, or the padded one."""
    head_size = dout.shape[-1] if dout.shape else 0
    dout.expect_shape(layout.queries(head_size), "that of out")
    sizes = (head_size, padded_size(head_size))
    for it, shape in ((v, layout.keys), (out, layout.queries)):
        if not it.shape or it.shape != shape(it.shape[-1]) or it.shape[-1] not in sizes:
            wanted = " or ".join(str(shape(size)) for size in dict.fromkeys(sizes))
            raise InvalidArgumentError(
                f"{it.name}: expected shape {wanted}, as dout's head size is {head_size}, got "
                f"{it.shape}."
            )


_dense_calls = CallCache(_prepare_dense)
_packed_calls = CallCache(_prepare_packed)
