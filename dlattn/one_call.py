"""``attention``: the whole operation as one call, everything but q, k and v optional."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from dlattn.calls.arguments import (
    Argument,
    admit,
    integer,
    number,
    plain_spec,
    same_type,
)
from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call, Output
from dlattn.calls.request import CPU_TYPES, KERNEL_TYPES, Request
from dlattn.calls.sizes import CU_SEQLENS, Sizes, check_shared, packed_sizes, plain_sizes
from dlattn.dtypes import data_type, itemsize
from dlattn.errors import InvalidArgumentError
from dlattn.problem import Bias, Direction, Philox, TensorSpec
from dlattn.problem.layout import bias_edit, canonical_stride

_LAYOUTS = ("bshd", "bhsd", "sbhd", "thd")
_ALIGNMENTS = ("bottom_right", "top_left")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    lengths: Any = None,
    cu_seqlens: Any = None,
    max_seqlens: int | tuple[int, int] | None = None,
    dropout: tuple[float, Any, Any] | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """``softmax(scale * q k^T + bias) v``, on tensors of any framework; the forward alone.

    Heads of k and of v divide those of q, each on its own: query head h reads head
    ``h // (H / Hk)`` of k. The first call of a kind compiles a kernel, unless the cache on disk has
    it; calls whose tensors look like those of an earlier one look up its plan.

    Args:
        q, k, v: fp16 or bf16, on the CPU also fp32 and fp64, of any strides with 1 for the last
            dimension. The head dimensions D of q and k, and of v, may differ.
        layout: the order of dimensions of q, k, v and the output: ``"bshd"`` (batch, sequence,
            head, D), ``"bhsd"``, ``"sbhd"``; or ``"thd"``, (tokens, head, D) of sequences that are
            packed one behind the other, which ``cu_seqlens`` divides.
        causal: queries attend to no key behind their own position.
        window: how many keys to the left and to the right of its position a query attends to;
            ``None`` (or -1) is any number.
        alignment: where the positions of queries and keys meet: the last ones of a sequence at
            ``"bottom_right"``, as in FlashAttention, or the first ones at ``"top_left"``, as in
            PyTorch's ``is_causal`` and cuDNN. The same if there are as many queries as keys.
        scale: ``1 / sqrt(D)`` unless given.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before anything is added.
        bias: added to scores; broadcasts to (B, H, S_q, S_kv). Of booleans or uint8: a mask, true
            where a query attends.
        alibi_slopes: (H) or (B, H), fp32; of slope m, ``m * distance`` is subtracted.
        sinks: (H), fp32: one more score of each row, without a value.
        lengths: how much of each sequence is used: (B), int32 or int64, of q, k and v alike, or a
            pair of such tensors, of q and of k and v, where ``None`` is all.
        cu_seqlens: of ``"thd"``, where sequences begin and end: (B + 1), int32, of q, k and v
            alike, or a pair of such tensors.
        max_seqlens: of ``"thd"``, a bound of the lengths, or a pair of them, of queries and of
            keys: the number of tokens unless given, which costs some speed.
        dropout: ``(p, seed, offset)``, the mask of :func:`dlattn.philox_dropout_mask`; seed and
            offset are integers, or int32 or int64 tensors of one element.
        return_lse: return the log-sum-exp, too.
        out: memory for the output.

    Returns:
        The output, in the layout, type and framework of q, or ``out``; with ``return_lse`` a pair
        of it and the natural logarithm of each row's sum of exponentials, fp32 (of fp64 tensors
        fp64), (B, H, S_q), or (H, tokens) of ``"thd"``: what :func:`dlattn.merge_states` takes.
        Rows that attend to nothing are 0, and -inf. What lies past the lengths is 0 and -inf; of
        ``"thd"`` it is not written.

    Raises:
        InvalidArgumentError: tensors or arguments contradict each other (a ``RuntimeError``).
        cudnnGraphNotSupportedError: no plan runs it; the message has each one's reason.
    """
    lengths_q, lengths_kv = _pair(lengths)
    cu_q, cu_kv = _pair(cu_seqlens)
    p, seed, offset = _dropout(dropout)
    hosts = [np.array(_wrapped(x), np.int64) for x in (seed, offset) if isinstance(x, int)]
    tensors = (
        *(q, k, v, out, bias, alibi_slopes, sinks, lengths_q, lengths_kv, cu_q, cu_kv),
        *(None if isinstance(x, int) else x for x in (seed, offset)),
    )
    most = max_seqlens if isinstance(max_seqlens, tuple) else (max_seqlens, max_seqlens)
    shared = tuple(x is not None and not isinstance(x, tuple) for x in (lengths, cu_seqlens))
    options = (layout, causal, window, alignment, scale, softcap, most, p, return_lse, shared)
    call, addresses = _CALLS.find(tensors, options)
    results = call((*tensors, *hosts), [*addresses, *(x.ctypes.data for x in hosts)])
    return tuple(results) if return_lse else results[0]


#: Arguments, in the order of the tensors, after which come numbers in host memory.
_NAMES = (
    *("q", "k", "v", "out", "bias", "alibi_slopes", "sinks"),
    *("lengths of q", "lengths of k and v", "cu_seqlens of q", "cu_seqlens of k and v"),
    *("dropout's seed", "dropout's offset"),
)


def _prepare(*given: Any) -> Call:
    values, options = given[: len(_NAMES)], given[len(_NAMES) :]
    layout, causal, window, alignment, scale, softcap, most, p, return_lse, shared = options
    there = admit(**dict(zip(_NAMES, values, strict=True)))
    for name, value, known in (("layout", layout, _LAYOUTS), ("alignment", alignment, _ALIGNMENTS)):
        if value not in known:
            raise InvalidArgumentError(
                f"{name}: expected one of {list(known)}, got {value!r:.100}."
            )
    q = there["q"]
    types = CPU_TYPES if q.seen.device[0] == "cpu" else KERNEL_TYPES
    dtype = same_type([there[x] for x in ("q", "k", "v", "out") if x in there], types)
    sizes = packed_sizes(there, most) if layout == "thd" else plain_sizes(there, layout, most)
    check_shared(shared, sizes)
    o = Output("o", sizes.shape(layout, sizes.columns_v), dtype, there.get("out"))
    if "out" in there:
        there["out"].expect_shape(o.shape, "that of the output")
        there["out"].expect_output()
    for name in ("q", "k", "v", "out"):
        if name in there:
            there[name].expect_rows()
    outputs = [o]
    if return_lse:
        wide = data_type.DOUBLE if dtype is data_type.DOUBLE else data_type.FLOAT
        outputs.append(Output("stats", sizes.lse(layout), wide))
    if sizes.is_empty:
        return Call(values, q.seen.device, {}, _filled(outputs, there.get("sinks")), None)

    tensors = {role: sizes.spec(role, there[role], layout) for role in ("q", "k", "v")}
    tensors |= {str(it.role): sizes.spec(str(it.role), it, layout) for it in outputs}
    inputs = {role: there[role].position for role in tensors if role in there}
    bias = None
    if "bias" in there:
        tensors["bias"], bias = _bias(there["bias"], sizes)
        inputs["bias"] = there["bias"].position
    for role, (name, spec) in _row_tensors(there, sizes).items():
        tensors[role] = spec
        inputs[role] = there[name].position
    if p:
        at = len(values)
        for role in ("dropout_seed", "dropout_offset"):
            name = role.replace("dropout_", "dropout's ")
            tensors[role] = _number_spec(name, there.get(name))
            inputs[role] = there[name].position if name in there else at
            at += name not in there
        values = (*values, *[_HOST_NUMBER] * (at - len(values)))
    request = Request(
        Direction.FORWARD,
        tensors,
        attn_scale=q.shape[-1] ** -0.5 if scale is None else number("scale", scale),
        window=_window(causal, window, sizes, alignment),
        bottom_right=alignment == "bottom_right",
        softcap=_softcap(softcap),
        bias=bias,
        dropout=Philox() if p else None,
        numbers=Philox().numbers(p) if p else {},
        most_tokens_q=sizes.tokens_q,
        most_tokens_kv=sizes.tokens_kv,
        aligned=all(it.seen.ptr % 16 == 0 for name, it in there.items() if name in _ROWS),
    )
    return Call(values, q.seen.device, inputs, outputs, request)


_CALLS = CallCache(_prepare)

#: What a number in host memory looks like.
_HOST_NUMBER = np.array(0, np.int64)

#: Arguments whose rows are moved in wide accesses.
_ROWS = ("q", "k", "v", "out")


def _filled(outputs: list[Output], sinks: Argument | None) -> list[Output]:
    """Results of no key, or of no query."""
    fills = (0.0, -float("inf") if sinks is None else sinks)
    return [
        Output(None, it.shape, it.dtype, it.given, fill)
        for it, fill in zip(outputs, fills, strict=False)
    ]


def _row_tensors(there: Mapping[str, Argument], sizes: Sizes) -> dict[str, tuple[str, TensorSpec]]:
    """Slopes, sinks, lengths: role -> argument and spec."""
    specs = {}
    slopes, sinks = there.get("alibi_slopes"), there.get("sinks")
    if slopes is not None:
        slopes.expect_type(data_type.FLOAT)
        one = len(slopes.shape) == 1
        slopes.expect_shape((sizes.heads,) if one else (sizes.batch, sizes.heads), "(H) or (B, H)")
        specs["alibi_slopes"] = ("alibi_slopes", slopes.vector())
    if sinks is not None:
        sinks.expect_type(data_type.FLOAT)
        sinks.expect_shape((sizes.heads,), "(H)")
        specs["sink_token"] = ("sinks", plain_spec(sinks, "h"))
    for name, role in (("lengths of q", "seq_len_q"), ("lengths of k and v", "seq_len_kv")):
        if name in there:
            there[name].expect_type(data_type.INT32, data_type.INT64)
            there[name].expect_shape((sizes.batch,), "(B)")
            specs[role] = (name, there[name].vector())
    for name, role in CU_SEQLENS.items():
        if name in there:
            specs[role] = (name, there[name].vector())
    return specs


def _bias(it: Argument, sizes: Sizes) -> tuple[TensorSpec, Bias]:
    on_cpu = (data_type.DOUBLE,) if it.seen.device[0] == "cpu" else ()
    floats = (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT, *on_cpu)
    it.expect_type(*floats, data_type.BOOLEAN, data_type.UINT8)
    missing = max(0, 4 - len(it.shape))
    dim, stride = (1,) * missing + it.shape, (0,) * missing + it.stride
    full = (sizes.batch, sizes.heads, sizes.seq_q, sizes.seq_kv)
    if len(dim) > 4 or any(n not in (1, most) for n, most in zip(dim, full, strict=True)):
        raise InvalidArgumentError(
            f"bias: expected a shape that broadcasts to (B, H, S_q, S_kv) = {full}, got {it.shape}."
        )
    spec = TensorSpec(it.name, dim, canonical_stride(dim, stride), it.dtype)
    alignment = 16 if it.seen.ptr % 16 == 0 else itemsize(it.dtype)
    return spec, bias_edit(spec.dim, spec.stride, spec.dtype, alignment, sizes.seq_q)


def _number_spec(name: str, it: Argument | None) -> TensorSpec:
    """Of a number in host memory, which each call says, or of a tensor of one."""
    if it is None:
        return TensorSpec(name, (1,) * 4, (0, 0, 0, 1), data_type.INT64, by_value=True)
    it.expect_type(data_type.INT32, data_type.INT64)
    it.expect_shape((1,) * len(it.shape), "one element")
    return TensorSpec(name, (1,) * 4, (0, 0, 0, 1), it.dtype)


def _window(
    causal: Any, window: Any, sizes: Sizes, alignment: str
) -> tuple[int | None, int | None]:
    """How far before and behind its position a query sees; ``None`` if no query feels a bound."""
    if window is not None and (not isinstance(window, tuple) or len(window) != 2):
        raise InvalidArgumentError(f"window: expected a pair (left, right), got {window!r:.100}.")
    left, right = (
        None if bound in (None, -1) else integer("window", bound)
        for bound in window or (None, None)
    )
    if min(left or 0, right or 0) < 0:
        raise InvalidArgumentError(
            f"window: expected 0 or more, or None or -1 for no bound, got {window}."
        )
    if causal:
        right = 0
    before, behind = sizes.seq_kv - 1, sizes.seq_q - 1
    if alignment == "top_left":
        before, behind = behind, before
    return (
        None if left is None or left >= before else left,
        None if right is None or right >= behind else right,
    )


def _softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    bound = number("softcap", softcap)
    if bound < 0:
        raise InvalidArgumentError(f"softcap: expected more than 0, or None, got {bound}.")
    return bound or None


# What a call is before its tensors are looked at ----------------------------------------------


def _pair(given: Any) -> tuple[Any, Any]:
    """Of q, and of k and v."""
    return given if isinstance(given, tuple) and len(given) == 2 else (given, given)


def _dropout(given: Any) -> tuple[float, Any, Any]:
    if given is None:
        return 0.0, None, None
    if not isinstance(given, tuple) or len(given) != 3:
        raise InvalidArgumentError(f"dropout: expected (p, seed, offset), got {given!r:.100}.")
    p = number("dropout's p", given[0])
    if not 0 <= p < 1:
        raise InvalidArgumentError(f"dropout: expected p of at least 0 and below 1, got {p}.")
    if p == 0:
        return 0.0, None, None
    seed, offset = (operator.index(x) if isinstance(x, np.integer) else x for x in given[1:])
    if seed is None or offset is None:
        raise InvalidArgumentError("dropout: expected a seed and an offset, got None.")
    return p, seed, offset


def _wrapped(number: int) -> int:
    """As a signed integer of 64 bits with the same low bits."""
    return (number + 2**63) % 2**64 - 2**63
