"""``flash_attn_with_kvcache``: attention over a cache, to which new tokens are appended first."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from dlattn.calls.apart import apart
from dlattn.calls.arguments import (
    Argument,
    admit,
    are_aligned,
    flag,
    integer,
    plain_spec,
    soft_cap,
)
from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call, Output, built, prepared
from dlattn.calls.request import Request
from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.flash.caches import CacheLayout, cache_layout
from dlattn.flash.layouts import Layout
from dlattn.flash.options import (
    Options,
    check_output,
    element_type,
    role_options,
    scale_of,
    window_of,
)
from dlattn.opaque import opaque
from dlattn.plans.append import Append, Rotation
from dlattn.plans.cached import CachedAttention
from dlattn.problem import Direction, TensorSpec
from dlattn.problem.layout import canonical_stride
from dlattn.runtime.target import CPU, cuda_target

_NAMES = (
    *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
    *("cache_batch_idx", "cache_leftpad", "block_table", "alibi_slopes", "sinks", "out"),
)


@opaque
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Any = None,
    out: Any = None,
) -> Any:
    """Attention of new queries over a cache of keys and values (FlashAttention-2's function).

    With ``k`` and ``v``, writes them into the cache in place, behind what is there, and attends to
    them, too: one call for each step of a decoder. ``cache_seqlens`` stays what it was.

    Args:
        q: (batch_size, seqlen, num_heads, head_size), fp16 or bf16, in host memory fp32 and fp64
            too.
        k_cache: (batch_size_cache, seqlen_cache, num_heads_k, head_size), or with a
            ``block_table`` pages, (num_blocks, page_block_size, num_heads_k, head_size), of any
            size from 1; of any strides but negative ones, 1 for the last dimension.
        v_cache: the same, maybe with a head_size of its own. May share memory with k_cache if
            nothing is appended; if something is, q, k and v share none with either.
        k, v: (batch_size, seqlen_new, num_heads_k, head_size): what is appended; both or neither,
            and neither beside caches of JAX's, which cannot be written to.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2), contiguous, of q's type or fp32,
            with a row for each position of the cache: k and q are rotated, k by its position in the
            cache. Only with k. A query at a position without a row, past the cache's end, is NaN.
        cache_seqlens: (batch_size,), int32 or int64, or a number for all: tokens in the cache
            before the call, those of ``cache_leftpad`` included; more than it has room for count as
            that. Without it, the cache is full.
        cache_batch_idx: (batch_size,), int32: which entry of the cache a sequence has. No two
            sequences that append may have the same: in host memory, those that would write the same
            row are refused; on a device, either's tokens are there, or some of each. Not with a
            ``block_table``.
        cache_leftpad: (batch_size,), int32: rows before the first token, which are not attended
            to. Not with a ``block_table``.
        block_table: (batch_size, max_num_blocks_per_seq), int32: the pages of each sequence. Two
            may share pages, but not those that they append to.
        softmax_scale: ``1 / sqrt(head_size)`` unless given.
        causal: the last query is at the last token of the cache, new ones included.
        window_size: how many keys to the left and right of its position a query attends to; -1 is
            any number. As in FlashAttention-2, a size from the rows that the cache has for a
            sequence on is any number, too, and with a left size alone the right one is those rows.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is none.
        rotary_interleaved: pairs are columns 0 and 1, 2 and 3, ... (GPT-J), or else column i of the
            first and of the second half of rotary_dim (GPT-NeoX). If causal or in a window, query i
            is rotated as position ``cache_seqlens + i``; else all are, as ``cache_seqlens``.
        alibi_slopes: (num_heads,) or (batch_size, num_heads), fp32.
        num_splits: a hint, which changes no result; dlattn decides itself.
        return_softmax_lse: return the log-sum-exp, too.
        sinks: (num_heads,), fp32, dlattn's own: one more score of each row, without a value;
            finite, or -inf, which is none.
        out: dlattn's own: memory for the output, of which no input is a part.

    Returns:
        The output, like q (of v_cache's head_size), or with ``return_softmax_lse`` a pair of it and
        softmax_lse, (batch_size, num_heads, seqlen), fp32, +inf where nothing is attended.

    On a GPU nothing waits for lengths and tables, so that the call can be captured in a CUDA graph.
    A token that the cache has no row or page for is not written there; in host memory, it is
    refused.

    Raises:
        InvalidArgumentError: an argument is wrong, or contradicts another; in host memory, a
            length is negative.
        InvalidVariantPackError: in host memory, new tokens do not fit, or fall on those of another
            sequence, or a page, or an entry of the cache, does not exist; nothing was written.
        cudnnGraphNotSupportedError: no plan can do it; the message has each one's reason.
    """
    # A number that changes with every step makes no new plan.
    is_number = isinstance(cache_seqlens, numbers.Integral)
    hosts = (np.array(_length(cache_seqlens), np.int32),) if is_number else ()
    tensors = (
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin),
        *(None if is_number else cache_seqlens, cache_batch_idx, cache_leftpad, block_table),
        *(alibi_slopes, sinks, out),
    )
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise InvalidArgumentError(
            f"window_size: expected (left, right), got {window_size!r:.100}."
        )
    options = (
        *(is_number, softmax_scale, causal, *window_size, softcap, rotary_interleaved, num_splits),
        return_softmax_lse,
    )
    call, addresses = _calls.find(tensors, options)
    results = call((*tensors, *hosts), [*addresses, *(x.ctypes.data for x in hosts)])
    return tuple(results) if return_softmax_lse else results[0]


def _length(value: Any) -> int:
    length = int(value)
    if length < 0:
        raise InvalidArgumentError(f"cache_seqlens: expected 0 or more tokens, got {length}.")
    return min(length, 2**31 - 1)  # more than any cache has room for


def _prepare(*given: Any) -> Call:
    values, options = given[:-1], given[-1]
    is_number, softmax_scale, causal, *window, softcap, interleaved, splits, wants_lse = options
    there = admit(_NAMES[:3], dict(zip(_NAMES, values, strict=True)))
    dtype = element_type(there, "q", "k_cache", "v_cache", "k", "v", "out")
    q = there["q"]
    q.expect_shape((None,) * 4, "(batch_size, seqlen, num_heads, head_size)")
    cache, columns = cache_layout(there), there["v_cache"].shape[-1]
    sizes = Layout(
        q.shape[0], q.shape[2], there["k_cache"].shape[2], q.shape[1], cache.cache.capacity
    )
    _check(there, sizes, is_number)
    left, right = (integer("window_size", side) for side in window)
    causal = flag("causal", causal)
    if integer("num_splits", splits) < 0:
        raise InvalidArgumentError(f"num_splits: expected 0 or more, got {splits}.")
    interleaved = flag("rotary_interleaved", interleaved)
    check_output(there.get("out"), sizes.queries(columns), "that of q, of v_cache's head_size")
    appends = "k" in there and 0 not in there["k"].shape
    # What is written is read by no other part of the call.
    caches = ("k_cache", "v_cache")
    besides = [caches, *product(("q", "k", "v"), caches)] if appends else []
    memory = apart(there, ("out",), besides)
    outputs = [Output("o", sizes.queries(columns), dtype, there.get("out"), order=q)]
    if flag("return_softmax_lse", wants_lse):
        outputs.append(Output("stats", sizes.lse, data_type.FLOAT))

    append = _append_specs(there, cache, is_number)
    attended, between, read = _connected(append, cache, sizes)
    attended.setdefault("q", sizes.spec("q", q))
    attended |= {str(it.role): sizes.spec(str(it.role), it) for it in outputs}
    attended |= role_options(_rows(there), sizes)[0]
    request = Request(
        Direction.FORWARD,
        attended,
        attn_scale=scale_of(softmax_scale, q.shape[3]),
        window=window_of(sizes, Options(0.0, softmax_scale, causal, left, right, softcap)),
        softcap=soft_cap(softcap),
        flash_stats=True,
        max_seq_kv=cache.cache.capacity if cache.is_paged else None,
        aligned=are_aligned(there.values()) and cache.is_aligned,
    )
    roles = {**_ROLES, "pages": "block_table" if "block_table" in there else "cache_batch_idx"}
    inputs = {role: there[name].position for role, name in roles.items() if name in there}
    inputs |= {"cached_tokens": len(values)} if is_number else {}
    values = (*values, *[_HOST_NUMBER] * is_number)
    device = q.seen.device
    target = CPU if device[0] == "cpu" else cuda_target(device[1])
    attention = built(request, target)
    if not between and target is not CPU:  # in host memory, it looks at what tensors say
        # Positions of what the caller's tensors are to the attention plan.
        alone = {role: inputs[read.get(role, role)] for role in attended if role not in _RESULTS}
        return prepared(values, device, alone, outputs, attention, apart=memory)
    rotation = Rotation(interleaved, _queries_move(causal, (left, right), sizes))
    writes = Append(
        {**append, **between},
        target,
        all(it.seen.ptr % 16 == 0 for name, it in there.items() if name in _WIDE),
        batch=sizes.batch,
        cache=cache.cache,
        rotation=rotation if "cos" in append else None,
    )
    reason = writes.refusal()
    if between and reason is not None:
        raise cudnnGraphNotSupportedError(f"flash_attn_with_kvcache: {reason}")
    plan = CachedAttention(writes, attention, between, read)
    written = [there[name].position for name in ("k_cache", "v_cache") if appends]
    return prepared(values, device, inputs, outputs, plan, apart=memory, written=written)


#: What may be learned.
_LEARNED = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "sinks")
_calls = CallCache(_prepare, drops=[_NAMES.index(it) for it in _LEARNED])

#: What a number in host memory looks like.
_HOST_NUMBER = np.array(0, np.int32)

#: The append plan's and the attention plan's roles -> arguments.
_ROLES = {
    **{"q": "q", "k_cache": "k_cache", "v_cache": "v_cache", "k_new": "k", "v_new": "v"},
    **{"cos": "rotary_cos", "sin": "rotary_sin", "cache_seqlens": "cache_seqlens"},
    **{"leftpad": "cache_leftpad", "alibi_slopes": "alibi_slopes", "sink_token": "sinks"},
}
_RESULTS = ("o", "stats")

#: Arguments whose rows are moved in wide accesses.
_WIDE = ("q", "k_cache", "v_cache", "k", "v")


def _append_specs(
    there: Mapping[str, Argument], cache: CacheLayout, is_number: bool
) -> dict[str, TensorSpec]:
    """The append plan's tensors that are arguments, and what q becomes."""
    specs = dict(cache.appended)
    for role, name in (("k_new", "k"), ("v_new", "v")):
        if name in there:
            specs[role] = plain_spec(there[name], "bshd")
    for role, name in (("cache_seqlens", "cache_seqlens"), ("leftpad", "cache_leftpad")):
        if name in there:
            specs[role] = there[name].vector()
    if is_number:
        name = "cache_seqlens"
        specs["cached_tokens"] = TensorSpec(name, (1,), (1,), data_type.INT32, by_value=True)
    if "rotary_cos" in there:
        specs["cos"], specs["sin"] = there["rotary_cos"].vector(), there["rotary_sin"].vector()
        specs["q"] = plain_spec(there["q"], "bshd")
        batch, heads, seqlen, columns = specs["q"].dim
        stride = canonical_stride(
            specs["q"].dim, (heads * seqlen * columns, columns, heads * columns, 1)
        )
        specs["q_rotated"] = replace(specs["q"], stride=stride)
    return specs


def _connected(
    append: Mapping[str, TensorSpec], cache: CacheLayout, sizes: Layout
) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec], dict[str, str]]:
    """What attention reads of the append plan's tensors: its specs, those that only the two plans
    know, and by which roles it reads them."""
    attended, between, read = dict(cache.attended), dict(cache.between), dict(cache.read)
    if append.keys() & {"k_new", "cached_tokens", "leftpad"} or cache.is_ragged:
        lengths = TensorSpec("lengths", (sizes.batch,), (1,), data_type.INT32)
        attended["seq_len_kv"] = between["seq_len_kv"] = lengths
    elif "cache_seqlens" in append:
        attended["seq_len_kv"], read["seq_len_kv"] = append["cache_seqlens"], "cache_seqlens"
    if "q_rotated" in append:
        attended["q"] = between["q_rotated"] = append["q_rotated"]
        read["q"] = "q_rotated"
    return attended, between, read


def _rows(there: Mapping[str, Argument]) -> dict[str, Argument]:
    """Slopes and sinks under the names of the four functions."""
    names = {"alibi_slopes": "alibi_slopes_", "sinks": "sinks"}
    return {names[name]: it for name, it in there.items() if name in names}


def _queries_move(causal: bool, window: Iterable[int], sizes: Layout) -> bool:
    """Whether queries have positions of their own, as FlashAttention-2 says it."""
    return causal or any(0 <= side < sizes.seqlen_k for side in window)


def _check(there: Mapping[str, Argument], sizes: Layout, is_number: bool) -> None:
    """Refuse tensors that contradict each other, besides the cache's.

    Raises:
        InvalidArgumentError: they do.
    """
    q, k_cache, v_cache = (there[name] for name in ("q", "k_cache", "v_cache"))
    if 0 in q.shape:
        raise InvalidArgumentError(
            f"q: expected one query or more, with heads and columns, got shape {q.shape}."
        )
    if v_cache.shape[3] == 0:
        raise InvalidArgumentError(
            f"v_cache: expected a head_size of at least 1, got shape {v_cache.shape}."
        )
    if sizes.heads_k == 0 or sizes.heads % sizes.heads_k:
        raise InvalidArgumentError(
            f"k_cache: expected a number of heads that divides the {sizes.heads} of q, got "
            f"{sizes.heads_k}."
        )
    if "cache_seqlens" in there:
        there["cache_seqlens"].expect_type(data_type.INT32, data_type.INT64)
        there["cache_seqlens"].expect_shape((sizes.batch,), "(batch_size,)")
    if "cache_leftpad" in there:
        there["cache_leftpad"].expect_type(data_type.INT32, data_type.INT64)
        there["cache_leftpad"].expect_shape((sizes.batch,), "(batch_size,)")
    for one, other in (("k", "v"), ("v", "k"), ("rotary_cos", "rotary_sin")):
        if (one in there) != (other in there):
            raise InvalidArgumentError(f"{one} and {other} are given together, or neither is.")
    if "k" in there:
        meaning = "(batch_size, seqlen_new, num_heads_k, head_size)"
        there["k"].expect_shape((sizes.batch, None, sizes.heads_k, q.shape[3]), meaning)
        there["v"].expect_shape((*there["k"].shape[:3], v_cache.shape[3]), meaning)
        k_cache.expect_output()
        v_cache.expect_output()
        if not is_number and "cache_seqlens" not in there:
            raise InvalidArgumentError(
                "cache_seqlens: k and v are written behind so many tokens; give it."
            )
    if "rotary_cos" in there:
        _check_angles(there, sizes)


def _check_angles(there: Mapping[str, Argument], sizes: Layout) -> None:
    cos, sin, q = there["rotary_cos"], there["rotary_sin"], there["q"]
    if "k" not in there:
        raise InvalidArgumentError(
            "rotary_cos and rotary_sin turn queries and new keys; give k and v, too."
        )
    for it in (cos, sin):
        it.expect_type(q.dtype, data_type.FLOAT)
    cos.expect_shape((None, None), "(seqlen_rotary, rotary_dim / 2)")
    sin.expect_shape(cos.shape, "that of rotary_cos")
    sin.expect_type(cos.dtype)
    for it in (cos, sin):
        it.expect_contiguous()
    if not 0 < 2 * cos.shape[1] <= q.shape[3]:
        raise InvalidArgumentError(
            f"rotary_cos: expected 1 to {q.shape[3] // 2} columns, half as many as are rotated, "
            f"got shape {cos.shape}."
        )
    if cos.shape[0] < sizes.seqlen_k:
        raise InvalidArgumentError(
            f"rotary_cos: expected a row for each of the {sizes.seqlen_k} positions of the cache, "
            f"got {cos.shape[0]}."
        )
