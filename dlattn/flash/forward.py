"""``mha_fwd``: FlashAttention's forward over sequences of one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlattn.calls.arguments import admit
from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call, Output
from dlattn.calls.request import Request
from dlattn.dtypes import data_type
from dlattn.flash.dropout import dropout_of
from dlattn.flash.options import (
    ROW_OPTIONS,
    check_chunk,
    check_output,
    dense_layout,
    element_type,
    row_options,
    scale_of,
    softcap_of,
    window_of,
)
from dlattn.problem import Direction

Results = tuple[Any, Any, Any, Any, Any, Any, Any, Any]


@dataclass(frozen=True)
class Forward:
    """What a forward does for all calls that look alike.

    Attributes:
        call: gives out and softmax_lse.
        pads: the head size that q, k and v must be padded to first; else 0.
        rest: the philox state, the unused offset, and debug_softmax, of a call without dropout.
    """

    call: Call | None
    pads: int
    rest: tuple[Any, Any, Any]


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
    """Attention of sequences of one length.

    Args:
        q: (batch_size, seqlen_q, num_heads, head_size).
        k, v: (batch_size, seqlen_k, num_heads_k, head_size).
    """
    tensors = (q, k, v, out_, alibi_slopes_, seqused_q, seqused_k, sinks)
    forward, addresses = _DENSE.find(
        tensors,
        (
            *(p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap),
            *(return_softmax, attention_chunk),
        ),
    )
    assert forward.call is not None
    out, lse = forward.call(tensors, addresses)
    return (out, q, k, v, lse, *forward.rest)


def _prepare_dense(
    q: Any,
    k: Any,
    v: Any,
    out_: Any,
    alibi_slopes_: Any,
    seqused_q: Any,
    seqused_k: Any,
    sinks: Any,
    p_dropout: Any,
    softmax_scale: Any,
    is_causal: Any,
    window_size_left: Any,
    window_size_right: Any,
    softcap: Any,
    return_softmax: Any,
    attention_chunk: Any,
) -> Forward:
    check_chunk(attention_chunk)
    values = (q, k, v, out_, alibi_slopes_, seqused_q, seqused_k, sinks)
    given = admit(
        q=q,
        k=k,
        v=v,
        out_=out_,
        alibi_slopes_=alibi_slopes_,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        sinks=sinks,
    )
    layout = dense_layout(given["q"], given["k"])
    dtype = element_type(given, "q", "k", "v", "out_")
    columns_v = given["v"].shape[-1]
    given["v"].expect_shape(
        layout.keys(columns_v), "(batch_size, seqlen_k, num_heads_k, head_size)"
    )
    check_output(given.get("out_"), layout.queries(columns_v), "that of q")
    for name in ("q", "k", "v"):
        given[name].expect_rows()
    window = window_of(layout, is_causal, window_size_left, window_size_right)
    dropout, numbers = dropout_of(p_dropout, return_softmax)
    out = Output("o", layout.queries(columns_v), dtype, given.get("out_"))
    lse = Output("stats", layout.lse, data_type.FLOAT)
    options = row_options(given, layout)
    request = Request(
        Direction.FORWARD,
        {
            **{role: layout.spec(role, given[role]) for role in ("q", "k", "v")},
            "o": layout.spec("o", out),
            "stats": layout.spec("stats", lse),
            **options,
        },
        attn_scale=scale_of(softmax_scale, given["q"].shape[-1]),
        softcap=softcap_of(softcap),
        dropout=dropout,
        numbers=numbers,
        flash_stats=True,
        aligned=all(
            given[name].seen.ptr % 16 == 0 for name in ("q", "k", "v", "out_") if name in given
        ),
        window=window,
    )
    inputs = {role: given[role].position for role in ("q", "k", "v")}
    inputs |= {role: given[ROW_OPTIONS[role]].position for role in options}
    call = Call(values, given["q"].seen.device, inputs, [out, lse], request)
    return Forward(call, 0, (None, None, None))


_DENSE = CallCache(_prepare_dense)
