"""What every way through autograd passes on: tensors first, then options that can be hashed."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from dlattn.attention import attention, attention_backward


class Tensors(NamedTuple):
    """The tensors of :func:`dlattn.attention`, of which all but three may be ``None``.

    Attributes:
        state: seed and offset of the dropout, (2,), int64.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    state: Tensor | None = None


class Options(NamedTuple):
    """What else it takes, as PyTorch's schemas can say it."""

    layout: str
    causal: bool
    left: int | None
    right: int | None
    alignment: str
    scale: float | None
    softcap: float | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    dropout_p: float


#: How many tensors there are.
COUNT = len(Tensors._fields)


def keywords(tensors: Tensors, options: Options) -> dict[str, Any]:
    """The keyword arguments of :func:`dlattn.attention`."""
    state = tensors.state
    return {
        "layout": options.layout,
        "causal": options.causal,
        "window": (options.left, options.right),
        "alignment": options.alignment,
        "scale": options.scale,
        "softcap": options.softcap,
        "bias": tensors.bias,
        "alibi_slopes": tensors.alibi_slopes,
        "sinks": tensors.sinks,
        "lengths": (tensors.lengths_q, tensors.lengths_kv),
        "cu_seqlens": (tensors.cu_seqlens_q, tensors.cu_seqlens_kv),
        "max_seqlens": (options.max_seqlen_q, options.max_seqlen_kv),
        "dropout": None if state is None else (options.dropout_p, state[:1], state[1:]),
    }


def forward(tensors: Tensors, options: Options, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp; in memory of its own, also rows of no sequence are 0."""
    if options.layout == "thd" and out is None:
        # Where nothing is written, there may be NaN, which a gradient of 0 would not take away.
        out = tensors.q.new_zeros(*tensors.q.shape[:-1], tensors.v.shape[-1])
    o, lse = attention(*tensors[:3], **keywords(tensors, options), return_lse=True, out=out)
    return o, lse


def backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    tensors: Tensors,
    options: Options,
    wanted: tuple[bool, bool],
    deterministic: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, the bias and the sinks.

    Args:
        wanted: of the bias, and of the sinks; without, theirs is ``None``.
    """
    # Gradients of sums repeat one number, which the copy engine cannot, and neither can rows.
    if 0 in dout.stride() or dout.stride(-1) != 1:
        dout = dout.contiguous()
    return attention_backward(
        dout,
        *tensors[:3],
        out,
        lse,
        dlse=dlse,
        **keywords(tensors, options),
        bias_gradient=wanted[0],
        sinks_gradient=wanted[1],
        deterministic=deterministic,
    )


def split(given: tuple[Any, ...]) -> tuple[Tensors, Options, tuple[Any, ...]]:
    """Arguments one after the other, as a schema has them, and those that follow."""
    end = COUNT + len(Options._fields)
    return Tensors(*given[:COUNT]), Options(*given[COUNT:end]), given[end:]
