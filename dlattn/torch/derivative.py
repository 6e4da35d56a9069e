"""What autograd keeps of a forward, and what it makes of that: for operators and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dlattn.torch.arguments import COUNT, Tensors

_BIAS, _SINKS = Tensors._fields.index("bias"), Tensors._fields.index("sinks")


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps tensors and results, and the options beside them."""
    ctx.save_for_backward(*output, *inputs[:COUNT])
    ctx.options = inputs[COUNT:]
    # So that a gradient that nobody computes is None, and not zeros to multiply by.
    ctx.set_materialize_grads(False)


def gradients(
    run: Callable[..., Any], ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, ...]:
    """One for each input, ``None`` for most.

    Args:
        run: the backward, of what ``torch.ops.dlattn.attention_backward`` takes.
    """
    found: list[Any] = [None] * len(ctx.needs_input_grad)
    if dout is None and dlse is None:
        return tuple(found)
    out, lse, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    wanted = ctx.needs_input_grad[_BIAS], ctx.needs_input_grad[_SINKS]
    *found[:3], dbias, dsinks = run(dout, out, lse, dlse, *tensors, *ctx.options, *wanted)
    if wanted[0]:
        found[_BIAS] = dbias
    if wanted[1]:
        found[_SINKS] = dsinks
    return tuple(found)


def refuse(*_: Any) -> NoReturn:
    """In the place of a derivative that there is not."""
    raise NotImplementedError(
        "dlattn's attention has first derivatives alone, in reverse mode. For gradients of "
        "gradients, torch.func.jvp, jacfwd and hessian, use PyTorch's own under "
        "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)."
    )


def is_forward_mode() -> bool:
    """Whether there may be tangents."""
    return forward_ad._current_level >= 0


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Where no gradient is required, autograd does not ask for a derivative: what has a tangent,
    would lose it.

    Raises:
        NotImplementedError: one has.
    """
    if torch._C._is_fwd_grad_enabled() and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        refuse()
