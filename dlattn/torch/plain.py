"""The quick way: attention of q, k and v alone, run at once.

What most programs call, and often enough that microseconds count. All that is known of tensors and
options that look like earlier ones is found by one look-up, so that each tensor is looked at once
in each direction, and nothing is asked of it again that its looks say.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call
from dlattn.errors import InvalidVariantPackError
from dlattn.one_call import backward as backward_pass
from dlattn.one_call import forward as forward_pass
from dlattn.torch.arguments import Options, Tensors, options_of, words
from dlattn.torch.derivative import refuse
from dlattn.torch.functions import differentiated
from dlattn.torch.rows import is_in_rows, is_movable

#: Of other tensors, such as fake ones, operators take care.
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Words(NamedTuple):
    """What else a call says, as it was said."""

    layout: str
    causal: Any
    window: Any
    alignment: Any
    scale: Any
    softcap: Any
    enable_gqa: Any = True


class Known(NamedTuple):
    """What is known of calls that look alike.

    Attributes:
        call: gives the output, and the log-sum-exp if that is wanted; ``None`` if the quick way is
            none for them.
        dtype, device: of the tensors, as autocasting knows them.
    """

    call: Call | None
    options: Options
    dtype: torch.dtype
    device: str


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, said: Words, deterministic: bool | None, return_lse: bool
) -> Any:
    """As :func:`dlattn.torch.differentiable.attend`; ``None`` if there is more to do than to run
    it, or to say what is wrong."""
    if (
        torch.compiler.is_compiling()
        or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    tensors = q, k, v
    try:
        known, addresses = _FORWARDS.find(tensors, (said, learns or return_lse))
    except (TypeError, InvalidVariantPackError):
        return None
    call, options, dtype, device = known
    if call is None or (
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is not dtype
    ):
        return None
    if not learns:
        found = call(tensors, addresses)
        return tuple(found) if return_lse else found[0]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return _apply(q, k, v, (call, addresses, options, deterministic, return_lse))


def _prepare(q: Tensor, k: Tensor, v: Tensor, said: Words, with_lse: bool) -> Known:
    options = options_of(*said[:-1], None, 0.0)
    device, call = q.device.type, None
    if device in ("cuda", "cpu") and _is_plain(q, k, v, said):
        call = forward_pass.prepare(q, k, v, words(options, with_lse))
    return Known(call, options, q.dtype, device)


def _is_plain(q: Tensor, k: Tensor, v: Tensor, said: Words) -> bool:
    """Whether there is neither anything to copy, nor anything wrong with heads and batch."""
    tensors = q, k, v
    if sorted(said.layout) != sorted("bshd"):
        return False
    if any(x.is_nested or x.dim() != 4 or not is_in_rows(x) for x in tensors):
        return False
    batches, heads = ({x.shape[said.layout.index(letter)] for x in tensors} for letter in "bh")
    return len(batches) == 1 and bool(said.enable_gqa or len(heads) == 1)


_FORWARDS = CallCache(_prepare)


class _Function(torch.autograd.Function):  # type: ignore[misc]
    """Each argument costs; see also :class:`dlattn.torch.functions.Eager`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor,
        constants: tuple[Call, list[int], Options, bool, bool],
    ) -> Any:  # fmt: skip
        call, addresses, options, deterministic, return_lse = constants
        out, lse = call((q, k, v), addresses)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.constants = options, deterministic
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        options, deterministic = ctx.constants
        if dlse is None and dout is not None and not torch.is_grad_enabled():
            tensors = q, k, v, dout, out, lse
            known, addresses = _BACKWARDS.find(tensors, (options, deterministic))
            if known.call is not None:
                return (*known.call(tensors, addresses), None)
        if dout is dlse is None:
            return None, None, None, None
        asked = options, (False, False), deterministic
        dq, dk, dv, *_ = differentiated(dout, out, lse, dlse, Tensors(q, k, v), *asked)
        return dq, dk, dv, None

    jvp = staticmethod(refuse)


#: What ``apply`` does where no transform is active; it looks for one again, which takes as long.
_apply = super(torch.autograd.Function, _Function).apply


def _prepare_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor,
    options: Options, deterministic: bool,
) -> Known:  # fmt: skip
    call = None
    if is_movable(dout):
        said = words(options, False, False, deterministic)
        call = backward_pass.prepare(q, k, v, dout, out, lse, said)
    return Known(call, options, q.dtype, q.device.type)


_BACKWARDS = CallCache(_prepare_backward)
