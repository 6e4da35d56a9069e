"""``mha_fwd`` and ``mha_varlen_fwd``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from dlattn.calls.apart import Check, apart
from dlattn.calls.arguments import Argument, Laid, are_aligned, flag, soft_cap
from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call, Output, prepared
from dlattn.calls.keyless import NoSinks, past_lengths
from dlattn.calls.request import Request
from dlattn.dtypes import data_type
from dlattn.errors import InvalidVariantPackError
from dlattn.flash.dropout import drawn_state, dropout_of, drops, no_state, state_roles, unused
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
from dlattn.runtime.tensors import lasting, padded, view

Results = tuple[Any, Any, Any, Any, Any, Any, Any, Any]

#: The tensors of each function, in the order of its calls, which leave out those from the block
#: table or the slopes on if all of them are None.
_MORE = ("alibi_slopes_", "seqused_q", "seqused_k", "sinks", "gen_")
_DENSE = ("q", "k", "v", "out_", *_MORE)
_PACKED = ("q", "k", "v", "out_", "cu_seqlens_q", "cu_seqlens_k", "block_table_", *_MORE)


@dataclass(frozen=True)
class Forward:
    """What a forward does for all calls that look alike.

    Attributes:
        call: gives out and softmax_lse; ``None`` if q, k and v must be padded first.
        apart: of those, refuses memory for out that is another tensor's.
        rest: what follows softmax_lse: the philox state, or ``None`` if it is among the tensors of
            a call that drops; an unused tensor; and an empty debug_softmax, whose place a third
            result takes.
    """

    call: Call | None
    apart: Check | None = None
    rest: tuple[Any, Any, Any] = (None, None, None)


@opaque
def mha_fwd(
    q: Any,
    k: Any,
    v: Any,
    out_: Any = None,
    alibi_slopes_: Any = None,
    p_dropout: float = 0.0,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    return_softmax: bool = False,
    gen_: Any = None,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
    sinks: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    attention_chunk: int = 0,
) -> Results:
    """Attention of sequences of one length (PyTorch's ``flash_api.h``).

    Args:
        q: (batch_size, seqlen_q, num_heads, head_size), fp16 or bf16, in host memory fp32 and fp64
            too; as all tensors with a stride of 1 in the last dimension, and others from 0 on.
        k: (batch_size, seqlen_k, num_heads_k, head_size).
        v: (batch_size, seqlen_k, num_heads_k, head_size), or with a head_size of its own.
        out_: memory for the output, of which no input is a part; ``None`` makes it.
        alibi_slopes_: fp32, (num_heads,) or (batch_size, num_heads): scores get
            ``-slope * |i + seqlen_k - seqlen_q - j|``. With a causal mask FlashAttention-2 adds
            ``slope * j``: the same output, and a softmax_lse that differs by a number of the row.
        p_dropout: the probability to drop; FlashAttention-2's dropout, bit for bit
            (:class:`dlattn.problem.FlashDropout`).
        softmax_scale: of the scores; ``None`` is ``1 / sqrt(head_size)``.
        is_causal: a ``window_size_right`` of 0.
        window_size_left, window_size_right: how many keys before and after the diagonal, which ends
            in the bottom right corner, a query attends to; -1 is no bound. As in FlashAttention-2,
            a size from seqlen_k on is none either, and with a left bound alone the right one is
            seqlen_k.
        softcap: scores become ``softcap * tanh(score / softcap)``, before slopes; 0 is none.
        return_softmax: return debug_softmax; only with dropout.
        gen_: where dropout's seed and offset come from: a ``torch.Generator``, which is advanced by
            ``32 * batch_size * num_heads``; a seed; (seed, offset); a state as it is returned,
            which CUDA graphs read again at each replay; or ``None``, for torch's own generator of
            the device, and of other frameworks a random seed.
        seqused_q, seqused_k: int32, (batch_size,): how many rows of each sequence count, at most
            those that there are. Other rows of the output are 0, of softmax_lse +inf.
        sinks: fp32, (num_heads,): one more score of each row, without a value; softmax_lse has it.
            Finite, or -inf, which is none.
        num_splits, pack_gqa: hints, which change no result; dlattn decides itself.
        attention_chunk: 0; others are refused.

    Returns:
        out, like q; q, k and v, padded where the head size is no multiple of 8; softmax_lse, fp32,
        (batch_size, num_heads, seqlen_q), +inf where nothing is attended; the philox state, seed
        and offset, two uint64 (of JAX, four int32 of the same bits), zeros without dropout; an
        unused tensor; and debug_softmax: with ``return_softmax`` of q's type, (batch_size,
        num_heads, seqlen_q, seqlen_k), the lengths up to multiples of 128: probabilities, 0 where
        nothing is attended, with the sign set where they are dropped (FlashAttention has
        exponentials relative to the maximum so far in the place of probabilities); else empty.
        Calls may share what says nothing.

    Raises:
        InvalidArgumentError: an argument is wrong, or contradicts another.
        cudnnGraphNotSupportedError: no plan can do it; the message has each one's reason.
    """
    state = _state(gen_, q, q) if drops(p_dropout) else None
    tensors: tuple[Any, ...] = (q, k, v, out_)
    if not (alibi_slopes_ is seqused_q is seqused_k is sinks is state is None):
        tensors += (alibi_slopes_, seqused_q, seqused_k, sinks, state)
    options = (
        p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        return_softmax, attention_chunk,
    )  # fmt: skip
    forward, addresses = _dense_calls.find(tensors, options)
    if forward.call is None or state is not None:
        return _run(_dense_calls, forward, addresses, tensors, options)
    out, lse = forward.call(tensors, addresses)
    return out, q, k, v, lse, *forward.rest


@opaque
def mha_varlen_fwd(
    q: Any,
    k: Any,
    v: Any,
    out_: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_k: Any,
    block_table_: Any,
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
    return_softmax: bool = False,
    gen_: Any = None,
    *,
    seqused_q: Any = None,
    sinks: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    attention_chunk: int = 0,
) -> Results:
    """Attention of packed sequences, or of packed queries on keys in pages.

    Arguments that are not listed are those of :func:`mha_fwd`.

    Args:
        q: (total_q, num_heads, head_size).
        k, v: (total_k, num_heads_k, head_size); in pages, (num_blocks, page_size, num_heads_k,
            head_size), with a page_size of any power of two.
        out_: like q.
        cu_seqlens_q: int32, (batch_size + 1,), contiguous: where sequences begin in q, and where
            the last one ends.
        cu_seqlens_k: the same of k and v; of keys in pages only the differences count, and with
            seqused_k nothing.
        seqused_k, seqused_q: int32, (batch_size,): how many rows of each sequence count.
        block_table_: int32, (batch_size, max_num_blocks_per_seq): the pages of each sequence.
        max_seqlen_q, max_seqlen_k: no sequence is longer. Windows are compared with max_seqlen_k.
        zero_tensors: rows of out and softmax_lse that belong to no sequence, or lie past its used
            rows, are 0 and -inf, and not whatever was there.

    Returns:
        As :func:`mha_fwd`, softmax_lse as (num_heads, total_q).

    Raises:
        InvalidArgumentError: an argument is wrong, or contradicts another; in host memory,
            cu_seqlens fall, or leave the tensors, or a sequence is longer than the maximum, or uses
            more rows than it has. (On a device, no sequence leaves the tensors, or counts as longer
            than the maximum.)
        InvalidVariantPackError: in host memory, a page that there is not.
        cudnnGraphNotSupportedError: no plan can do it; the message has each one's reason.
    """
    state = _state(gen_, q, cu_seqlens_q) if drops(p_dropout) else None
    tensors: tuple[Any, ...] = (q, k, v, out_, cu_seqlens_q, cu_seqlens_k)
    if not (block_table_ is alibi_slopes_ is seqused_q is seqused_k is sinks is state is None):
        tensors += (block_table_, alibi_slopes_, seqused_q, seqused_k, sinks, state)
    options = (
        p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        return_softmax, attention_chunk, max_seqlen_q, max_seqlen_k, zero_tensors,
    )  # fmt: skip
    forward, addresses = _packed_calls.find(tensors, options)
    if forward.call is None or state is not None:
        return _run(_packed_calls, forward, addresses, tensors, options)
    out, lse = forward.call(tensors, addresses)
    return out, q, k, v, lse, *forward.rest


def _state(generator: Any, q: Any, entries: Any) -> Any:
    """The philox state of a call; ``None`` of what are no tensors."""
    try:
        # Which some tensors say by a protocol alone.
        batch, heads = view(entries).shape[0] - (entries is not q), view(q).shape[-2]
    except (InvalidVariantPackError, IndexError):
        return None
    return drawn_state(generator, q, batch * heads)


def _run(
    calls: CallCache[Forward],
    forward: Forward,
    addresses: list[int],
    tensors: tuple[Any, ...],
    options: tuple[Any, ...],
) -> Results:
    """A call of any kind, as it was found; most need less, and do without this function."""
    if forward.call is None:
        if forward.apart is not None:
            forward.apart(addresses)
        return _run_padded(calls, tensors, options)
    out, lse, *more = forward.call(tensors, addresses)
    q, k, v, *_ = tensors
    state, unused, debug_softmax = forward.rest
    if state is None:
        state = tensors[-1]
    return out, q, k, v, lse, state, unused, more[0] if more else debug_softmax


def _run_padded(
    calls: CallCache[Forward], tensors: tuple[Any, ...], options: tuple[Any, ...]
) -> Results:
    """The same of head sizes that are multiples of 8; the output is cut."""
    q, k, v, out_, *more = tensors
    p_dropout, softmax_scale, *others = options
    sizes = [view(x).shape[-1] for x in (q, k, v)]
    wide = [padded(x, padded_size(size)) for x, size in zip((q, k, v), sizes, strict=True)]
    scale = scale_of(softmax_scale, sizes[0])
    tensors, options = (*wide, roomy(out_), *more), (p_dropout, scale, *others)
    out, *rest = _run(calls, *calls.find(tensors, options), tensors, options)
    return (cut(out, sizes[2], out_), *rest)


def _prepare_dense(*given: Any) -> Forward:
    *tensors, options = given
    arguments, options = named(_DENSE, tensors), Options(*options)
    return _prepare(dense_layout(arguments), tensors, arguments, options)


def _prepare_packed(*given: Any) -> Forward:
    *tensors, options = given
    arguments, options = named(_PACKED, tensors), Options(*options)
    return _prepare(packed_layout(arguments, options), tensors, arguments, options)


def _prepare(
    layout: Layout, tensors: Sequence[Any], given: Mapping[str, Argument], options: Options
) -> Forward:
    q, k, v, out_ = given["q"], given["k"], given["v"], given.get("out_")
    dtype = element_type(given, "q", "k", "v", "out_")
    columns = v.shape[-1]
    check_output(out_, layout.queries(columns), "that of q, of v's head_size")
    memory = apart(given, ("out_",))
    roles, positions = role_options(given, layout)
    dropout, numbers = dropout_of(options.p_dropout, options.return_softmax)
    offsets: dict[str, int] = {}
    if dropout is not None:
        states, places, offsets = state_roles({"philox_seed": given["gen_"]}, "gen_")
        roles, positions = {**roles, **states}, {**positions, **places}
    scale = scale_of(options.softmax_scale, q.shape[-1])
    window, softcap = window_of(layout, options), soft_cap(options.softcap)
    if padded_size(q.shape[-1]) != q.shape[-1] or padded_size(columns) != columns:
        return Forward(None, memory)
    out_fill, lse_fill = _fills(layout, given, options)
    out = Output("o", layout.queries(columns), dtype, out_, out_fill, order=q)
    lse = Output("stats", layout.lse, data_type.FLOAT, None, lse_fill)
    if not layout.has_keys:
        used = None if layout.packed else given.get("seqused_q")
        past = past_lengths(layout.seqlen_q, used, inf)
        by_sinks = "sinks" in given and 0 not in layout.lse
        lse = replace(lse, finish=NoSinks(layout.lse[-1], past) if by_sinks else past)
    results = [out, lse]
    if options.return_softmax:
        # The rows of no sequence are no kernel's.
        results.append(Output("debug_softmax", layout.debug_softmax, dtype, None, 0.0))
    laid: dict[str, Laid] = {"q": q, "k": k, "v": v}
    laid |= {it.role: it for it in results if it.role}
    request = Request(
        Direction.FORWARD,
        {**{role: layout.spec(role, it) for role, it in laid.items()}, **roles},
        attn_scale=scale,
        window=window,
        softcap=softcap,
        dropout=dropout,
        numbers=numbers,
        flash_stats=True,
        max_seq_kv=layout.seqlen_k if layout.paged else None,
        most_tokens_q=layout.tokens_q,
        most_tokens_kv=layout.most_tokens_k,
        aligned=are_aligned(given.values()),
    )
    positions = {**positions, "q": q.position, "k": k.position, "v": v.position}
    call = prepared(
        tensors, q.seen.device, positions, results, request, offsets, memory, layout.is_empty
    )
    like = tensors[0]
    with lasting(like):
        state = no_state(like) if dropout is None else None
        return Forward(call, None, (state, *unused(like, dtype)))


def _fills(
    layout: Layout, given: Mapping[str, Argument], options: Options
) -> tuple[float | None, float | Argument | None]:
    """What out and softmax_lse hold before a plan runs, if one does."""
    if not layout.has_keys:
        return 0.0, given.get("sinks", inf)
    # Where there are keys and no queries, all rows are of no sequence.
    return (0.0, -inf) if flag("zero_tensors", options.zero_tensors) else (None, None)


#: What may be learned.
_LEARNED = ("q", "k", "v", "sinks")
_dense_calls = CallCache(_prepare_dense, drops=[_DENSE.index(it) for it in _LEARNED])
_packed_calls = CallCache(_prepare_packed, drops=[_PACKED.index(it) for it in _LEARNED])
