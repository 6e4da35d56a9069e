"""Attention as functions of autograd's: what runs eagerly, and what ``torch.func`` sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dlattn.errors import cudnnGraphNotSupportedError
from dlattn.runtime.tensors import array_beside
from dlattn.torch.arguments import Options, Tensors, backward, forward, split
from dlattn.torch.batching import batching
from dlattn.torch.derivative import gradients, refuse, save

#: Besides the tensors that may have gradients; of another framework, arrays are taken, too.
Others = Sequence[Any]

_Transforms = torch._C._functorch.TransformType

#: Of other tensors, such as fake ones, operators take care.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensors_of(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
    others: Others | None,
) -> Tensors:  # fmt: skip
    if not others:
        return Tensors(q, k, v, bias, None, sinks)
    slopes, *more = others
    return Tensors(q, k, v, bias, slopes, sinks, *more)


class Eager(torch.autograd.Function):  # type: ignore[misc]
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
        constants: tuple[Others | None, Options, bool, bool],
    ) -> Any:
        others, options, deterministic, return_lse = constants
        out, lse = forward(tensors_of(q, k, v, bias, sinks, others), options)
        # PyTorch sees when a saved tensor is written to before the backward reads it; of an array,
        # nobody would.
        kept = (
            x if x is None or isinstance(x, Tensor) else array_beside(x, q) for x in others or ()
        )
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse, *kept)
        ctx.asked = options, deterministic
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * 6
        q, k, v, bias, sinks, out, lse, *others = ctx.saved_tensors
        options, deterministic = ctx.asked
        tensors, wanted = tensors_of(q, k, v, bias, sinks, others), ctx.needs_input_grad[3:5]
        asked = options, wanted, deterministic
        return (*differentiated(dout, out, lse, dlse, tensors, *asked), None)

    jvp = staticmethod(refuse)


#: What ``apply`` does where no transform is active; it looks for one again, which takes as long.
apply_eagerly = super(torch.autograd.Function, Eager).apply


class Transformed(torch.autograd.Function):  # type: ignore[misc]
    """What ``torch.func`` sees, and with operators inside what dispatch modes and classes of
    tensors do."""

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        tensors, options, _ = split(given)
        if _is_for_operators(tensors):
            return tuple(torch.ops.dlattn.attention(*given))
        return tuple(forward(tensors, options))

    setup_context = staticmethod(save)
    jvp = staticmethod(refuse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return gradients(_Backward.apply, ctx, dout, dlse)

    @staticmethod
    def vmap(*given: Any) -> Any:
        return batching(Transformed.apply, 0)(*given)


class _Backward(torch.autograd.Function):  # type: ignore[misc]
    """A function for the sake of being batched, and of having no derivative."""

    @staticmethod
    def forward(
        dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *given: Any
    ) -> tuple[Any, ...]:
        tensors, options, (deterministic, *wanted) = split(given)
        if _is_for_operators((dout, *tensors)):
            return _by_operator(dout, out, lse, dlse, *given)
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


def is_dispatch_mode() -> bool:
    """Whether a ``TorchDispatchMode`` is on, such as ``make_fx``'s, which sees operators alone."""
    return bool(torch._C._len_torch_dispatch_stack())


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` looks on, which sees functions of autograd, but of
    operators no gradients."""
    return bool(torch._C._are_functorch_transforms_active())


def is_functionalized() -> bool:
    """Whether one of the transforms is ``functionalize``, which knows operators alone.

    Raises:
        cudnnGraphNotSupportedError: another one wants gradients, which operators have none for it.
    """
    kinds = {it.key() for it in torch._C._functorch.get_interpreter_stack() or ()}
    if _Transforms.Functionalize not in kinds:
        return False
    if kinds & {_Transforms.Grad, _Transforms.Jvp}:
        raise cudnnGraphNotSupportedError(
            "torch.func.functionalize: of a function that torch.func differentiates, dlattn's "
            "attention is none of its operations; differentiate what functionalize gives by "
            "torch.autograd.grad, or use PyTorch's attention."
        )
    return True


def is_observed() -> bool:
    """Whether what sees neither kernels nor functions of autograd looks on: a transform of
    ``torch.func``, or a dispatch mode."""
    return is_transformed() or is_dispatch_mode()


def _is_for_operators(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a mode sees operators alone, or tensors are of a class, or of the meta device, that
    is asked about them."""
    return is_dispatch_mode() or any(
        x is not None and (type(x) not in PLAIN or x.is_meta) for x in tensors
    )


def is_of_many(gradient: Tensor | None) -> bool:
    """Whether it is one of ``is_grads_batched``, which operators take, and functions do not."""
    return gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)


def _by_operator(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *given: Any
) -> tuple[Any, ...]:
    """As :class:`_Backward`."""
    *found, dbias, dsinks = torch.ops.dlattn.attention_backward(dout, out, lse, dlse, *given)
    bias, sinks = given[-2:]
    return *found, dbias if bias else None, dsinks if sinks else None


def differentiated(
    dout: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    tensors: Tensors,
    options: Options,
    wanted: tuple[bool, bool],
    deterministic: bool,
) -> Any:
    """What :func:`dlattn.torch.arguments.backward` gives, for a function's ``backward``: who takes
    gradients of gradients must not get them for constants, several gradients of one output may come
    as one tensor, and a mode may look on."""
    dout = torch.zeros_like(out) if dout is None else dout
    given = (*tensors, *options, deterministic, *wanted)
    if is_of_many(dout) or is_of_many(dlse):
        return _by_operator(dout, out, lse, dlse, *given)
    if torch.is_grad_enabled() or is_observed():
        return _Backward.apply(dout, out, lse, dlse, *given)
    return backward(dout, out, lse, dlse, tensors, options, wanted, deterministic)
