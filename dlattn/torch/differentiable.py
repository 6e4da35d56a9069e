"""``attention``: :func:`dlattn.attention` with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlattn.errors import InvalidArgumentError
from dlattn.one_call.arguments import pair, shared
from dlattn.torch import ops  # noqa: F401 - registers the operators
from dlattn.torch.arguments import (
    Options,
    Tensors,
    backward,
    forward,
    options_of,
    plain_forward,
    split,
)
from dlattn.torch.batching import batching
from dlattn.torch.derivative import gradients, refuse, save


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
        Of ``"thd"``, rows of no sequence are 0, and their log-sum-exp is not written.

    Raises:
        InvalidArgumentError: tensors or arguments contradict each other (a ``RuntimeError``).
        cudnnGraphNotSupportedError: no plan runs it; the message has each one's reason.
    """
    options = options_of(
        layout, causal, window, alignment, scale, softcap, max_seqlens, dropout_p,
        *shared(lengths, cu_seqlens),
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
    plain = type(q) in _PLAIN
    if not plain:
        _check(q)
    device = q.device.type
    is_meta = device == "meta"
    if not is_meta and torch.is_autocast_enabled(device):
        q, k, v, bias = _autocast(q, k, v, bias)
    state = None if options.dropout_p == 0 else _drawn(q, options.dropout_p)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    others = None
    if not (alibi_slopes is lengths is cu_seqlens is block_table is state is None):
        others = (alibi_slopes, *pair(lengths), *pair(cu_seqlens), block_table, state)
    if is_meta or not plain or torch.compiler.is_compiling():
        every = _all(q, k, v, bias, sinks, others)
        out, lse = torch.ops.dlattn.attention(*every, *options, deterministic)
    elif torch._C._are_functorch_transforms_active():
        every = _all(q, k, v, bias, sinks, others)
        out, lse = _Transformed.apply(*every, *options, deterministic)
    elif torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ):
        constants = others, options, deterministic, return_lse
        return _apply_eagerly(q, k, v, bias, sinks, constants)
    else:
        found = _forward(q, k, v, bias, sinks, others, options, return_lse)
        return tuple(found) if return_lse else found[0]
    return (out, lse) if return_lse else out


#: Besides the tensors that may have gradients.
_Others = tuple[Tensor | None, ...]


def _all(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
    others: _Others | None,
) -> Tensors:  # fmt: skip
    if others is None:
        return Tensors(q, k, v, bias, None, sinks)
    slopes, *more = others
    return Tensors(q, k, v, bias, slopes, sinks, *more)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
    others: _Others | None, options: Options, return_lse: bool,
) -> Any:  # fmt: skip
    if bias is sinks is others is None:
        return plain_forward(q, k, v, options, return_lse)
    return forward(_all(q, k, v, bias, sinks, others), options, return_lse=return_lse)


#: Of other tensors, such as fake ones, operators take care.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _check(q: Any) -> None:
    """Refuse what operators would refuse in other words."""
    if not isinstance(q, Tensor):
        raise InvalidArgumentError(
            f"q: expected a torch.Tensor, got a {type(q).__module__}.{type(q).__qualname__}; "
            "dlattn.attention takes those of every framework."
        )
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


class _Eager(torch.autograd.Function):  # type: ignore[misc]
    """The quick way: each argument costs, and of a function that transforms could see, PyTorch
    binds the signature anew in every call, which takes four times as long as all else."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        constants: tuple[_Others | None, Options, bool, bool],
    ) -> Any:
        others, options, _, return_lse = constants
        out, lse = _forward(q, k, v, bias, sinks, others, options, True)
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
        ctx.constants = constants
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * 6
        q, k, v, bias, sinks, out, lse = ctx.saved_tensors
        others, options, deterministic, _ = ctx.constants
        dout = torch.zeros_like(out) if dout is None else dout
        tensors, wanted = _all(q, k, v, bias, sinks, others), ctx.needs_input_grad[3:5]
        if torch.is_grad_enabled():
            # Who takes gradients of gradients must not get them for constants.
            given = (*tensors, *options, deterministic, *wanted)
            gradients = _Backward.apply(dout, out, lse, dlse, *given)
        else:
            gradients = backward(dout, out, lse, dlse, tensors, options, wanted, deterministic)
        return (*gradients, None)

    jvp = staticmethod(refuse)


#: What ``apply`` does where no transform is active; it looks for one again, which takes as long.
_apply_eagerly = super(torch.autograd.Function, _Eager).apply


class _Transformed(torch.autograd.Function):  # type: ignore[misc]
    """What ``torch.func`` sees."""

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        tensors, options, _ = split(given)
        return tuple(forward(tensors, options))

    setup_context = staticmethod(save)
    jvp = staticmethod(refuse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return gradients(_Backward.apply, ctx, dout, dlse)

    @staticmethod
    def vmap(*given: Any) -> Any:
        return batching(_Transformed.apply, 0)(*given)


class _Backward(torch.autograd.Function):  # type: ignore[misc]
    """A function for the sake of being batched, and of having no derivative."""

    @staticmethod
    def forward(
        dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *given: Any
    ) -> tuple[Any, ...]:
        tensors, options, (deterministic, *wanted) = split(given)
        return backward(
            dout, out, lse, dlse, tensors, options, (wanted[0], wanted[1]), deterministic
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        return

    backward = jvp = staticmethod(refuse)

    @staticmethod
    def vmap(*given: Any) -> Any:
        return batching(_Backward.apply, 4)(*given)
