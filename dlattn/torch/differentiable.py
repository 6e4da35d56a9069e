"""``attention``: :func:`dlattn.attention` with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlattn.calls.arguments import SAID, flag
from dlattn.errors import InvalidArgumentError
from dlattn.one_call.arguments import TENSORS, pair, shared
from dlattn.runtime.gradients import wants_gradient, warn_of_slopes
from dlattn.torch import ops  # noqa: F401 - registers the operators
from dlattn.torch.arguments import (
    Options,
    Tensors,
    bounds,
    expect_tensors,
    forward,
    longest,
    options_of,
    probability,
    real,
    truth,
)
from dlattn.torch.causal import refuse_causal_bias
from dlattn.torch.derivative import is_forward_mode, refuse_tangents
from dlattn.torch.functions import (
    PLAIN,
    Transformed,
    apply_eagerly,
    is_functionalized,
    is_observed,
    is_transformed,
    tensors_of,
)
from dlattn.torch.plain import attend_plainly


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str = "bshd",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    lengths: Any = None,
    cu_seqlens: Any = None,
    max_seqlens: int | tuple[int, int] | None = None,
    block_table: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Any:
    """:func:`dlattn.attention` of torch tensors, with gradients of q, k, v, the bias and the sinks.

    It works under ``torch.compile``, ``torch.export``, ``torch.func`` and CUDA graphs, and takes
    part in autocasting as PyTorch's own attention does.

    Arguments that are not listed are those of :func:`dlattn.attention`.

    Args:
        dropout_p: the probability to drop. Seed and offset are drawn from PyTorch's generator of
            the device.
        deterministic: gradients have the same bits in every run; unless given, what
            ``torch.are_deterministic_algorithms_enabled`` says.

    Returns:
        The output, or with ``return_lse`` a pair of it and the log-sum-exp, both differentiable.
        Of ``"thd"``, rows of no sequence, or past the lengths, are 0, and their log-sum-exp is not
        written.

    Raises:
        InvalidArgumentError: tensors or arguments contradict each other (a ``RuntimeError``).
        InvalidVariantPackError: in host memory, a page that there is not (a ``ValueError``).
        cudnnGraphNotSupportedError: no plan runs it; the message has each one's reason.
    """
    if type(dropout_p) is not float:
        dropout_p = probability(dropout_p)
    if type(causal) is not bool:
        causal = truth("causal", causal)
    if window is not None:
        window = bounds(window)
    if scale is not None and type(scale) is not float:
        scale = real("scale", scale)
    if softcap is not None and type(softcap) is not float:
        softcap = real("softcap", softcap)
    if not dropout_p and (
        bias is alibi_slopes is sinks is lengths is cu_seqlens is max_seqlens is block_table is None
    ):
        said = layout, causal, window, alignment, scale, softcap, "dlattn", True
        found = attend_plainly(q, k, v, said, deterministic, return_lse)
        if found is not None:
            return found
    return attend_in(
        "dlattn", q, k, v, bias, sinks, alibi_slopes, lengths, cu_seqlens, block_table,
        layout, causal, window, alignment, scale, softcap, max_seqlens, dropout_p,
        deterministic, return_lse,
    )  # fmt: skip


def attend_in(
    words: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
    alibi_slopes: Tensor | None, lengths: Any, cu_seqlens: Any, block_table: Tensor | None,
    layout: str, causal: Any, window: Any, alignment: str, scale: Any, softcap: Any,
    max_seqlens: Any, dropout_p: Any, deterministic: bool | None, return_lse: bool,
) -> Any:  # fmt: skip
    """:func:`attention` whose errors name arguments in these words
    (:data:`dlattn.calls.arguments.SAID`); flags and numbers are as it makes them of what
    it is given."""
    options = options_of(
        layout, causal, window, alignment, scale, softcap,
        None if max_seqlens is None else longest(max_seqlens), dropout_p,
        *shared(lengths, cu_seqlens), words,
    )  # fmt: skip
    return attend(
        q, k, v, bias, sinks, alibi_slopes, lengths, cu_seqlens, block_table,
        options, deterministic, return_lse,
    )  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    lengths: Any,
    cu_seqlens: Any,
    block_table: Tensor | None,
    options: Options,
    deterministic: bool | None,
    return_lse: bool,
) -> Any:
    """:func:`attention`, by the way through autograd that there is for such tensors.

    The hot path of most programs: arguments are passed by position, and those that most calls lack
    are looked at together.
    """
    plain = (
        type(q) in PLAIN
        and type(k) in PLAIN
        and type(v) in PLAIN
        and (bias is None or type(bias) in PLAIN)
        and (sinks is None or type(sinks) in PLAIN)
    )
    if not plain:
        _check(q, k, v, bias, sinks, options.words)
    device = q.device.type
    is_meta = device == "meta"
    if not is_meta and torch.is_autocast_enabled(device):
        q, k, v, bias = _autocast(q, k, v, bias)
    state = None if options.dropout_p == 0 else _drawn(q, options.dropout_p)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    else:
        deterministic = flag("deterministic", deterministic)
    if return_lse is not False:
        return_lse = flag("return_lse", return_lse)
    others = None
    if not (alibi_slopes is lengths is cu_seqlens is block_table is state is None):
        if (
            isinstance(alibi_slopes, Tensor)
            and not torch.compiler.is_compiling()
            and wants_gradient(alibi_slopes)
        ):
            warn_of_slopes("alibi_slopes.detach()")
        others = (alibi_slopes, *pair(lengths), *pair(cu_seqlens), block_table, state)
    if torch.compiler.is_compiling() or (
        is_functionalized() if is_transformed() else is_meta or not plain
    ):
        every = _of_torch(tensors_of(q, k, v, bias, sinks, others), options.words)
        out, lse = torch.ops.dlattn.attention(*every, *options, deterministic)
    elif is_observed():
        every = _of_torch(tensors_of(q, k, v, bias, sinks, others), options.words)
        out, lse = Transformed.apply(*every, *options, deterministic)
    elif torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ):
        constants = others, options, deterministic, return_lse
        return apply_eagerly(q, k, v, bias, sinks, constants)
    else:
        if is_forward_mode():
            refuse_tangents(q, k, v, bias, sinks)
        every = tensors_of(q, k, v, bias, sinks, others)
        found = forward(every, options, return_lse=return_lse)
        return tuple(found) if return_lse else found[0]
    return (out, lse) if return_lse else out


def _of_torch(tensors: Tensors, words: str) -> Tensors:
    """As they are, for operators and transforms, to which arrays of others are none; but for
    PyTorch's compiler, which makes tensors of them."""
    if not torch.compiler.is_compiling():
        given = zip(TENSORS, tensors, strict=False)
        expect_tensors(**{SAID[words].get(name, name): it for name, it in given})
    return tensors


def _check(q: Any, k: Any, v: Any, bias: Any, sinks: Any, words: str) -> None:
    """Refuse what autograd and operators would refuse in other words."""
    said = SAID[words]
    for name, it in (("q", q), ("k", k), ("v", v)):
        if it is None:
            raise InvalidArgumentError(
                f"{said.get(name, name)}: expected a torch.Tensor, got None."
            )
    given = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    expect_tensors(**{said.get(name, name): it for name, it in given.items()})
    refuse_causal_bias(bias)
    if q.is_nested:
        raise InvalidArgumentError(
            "q: expected no nested tensor, which is scaled_dot_product_attention's; or give "
            "values() with layout='thd' and offsets() as cu_seqlens."
        )


def _autocast(*tensors: Tensor | None) -> list[Any]:
    """Floats as autocasting wants them."""
    (first, *_) = tensors
    assert first is not None
    dtype = torch.get_autocast_dtype(first.device.type)
    return [
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    ]


def _drawn(q: Tensor, p: float) -> Tensor:
    """Seed and offset of a dropout, on the device, so that graphs draw new ones at every replay."""
    if not 0 <= p <= 1:
        raise InvalidArgumentError(f"dropout_p: expected at least 0 and at most 1, got {p}.")
    return torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)
