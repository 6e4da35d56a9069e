"""The quick way: attention of q, k and v alone, run at once.

What most programs call, and often enough that microseconds count. All that is known of tensors and
options that look like earlier ones is found by one look-up, so that each tensor is looked at once
in each direction, and nothing is asked of it again that its looks say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dlattn.calls.arguments import flag
from dlattn.calls.cache import CallCache
from dlattn.calls.call import Call
from dlattn.errors import InvalidVariantPackError
from dlattn.one_call import backward as backward_pass
from dlattn.one_call import forward as forward_pass
from dlattn.torch.arguments import Options, Tensors, options_of, words
from dlattn.torch.derivative import is_forward_mode, refuse
from dlattn.torch.functions import PLAIN, differentiated, is_observed, is_of_many
from dlattn.torch.rows import is_in_rows, is_movable

#: What else a call says, each of one type: the layout, whether it is causal, the window, the
#: alignment, the scale, the soft cap, in whose words, and whether heads of q may share those of k
#: and v.
Words = tuple[str, Any, Any, Any, Any, Any, str, Any]
#: That, and whether the log-sum-exp is wanted.
Asked = tuple[Words, bool]


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of calls that look alike.

    Attributes:
        call: gives the output, and the log-sum-exp if that is wanted; ``None`` if the quick way is
            none for them.
        device: the kind of it, as autocasting knows it.
    """

    call: Call | None
    options: Options
    device: str


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, said: Words, deterministic: bool | None, return_lse: bool
) -> Any:
    """As :func:`dlattn.torch.differentiable.attend`; ``None`` if there is more to do than to run
    it, or to say what is wrong."""
    if torch.compiler.is_compiling() or is_forward_mode():
        return None
    tensors = q, k, v
    if return_lse is not False:
        return_lse = flag("return_lse", return_lse)
    if deterministic is not None:
        deterministic = flag("deterministic", deterministic)
    try:
        learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        asked = said, learns or return_lse
        # Which looks at types and transforms, too, and at whether autocasting is on.
        found = _FORWARDS.latest(tensors, asked) or _find(q, k, v, asked)
    except (AttributeError, TypeError, InvalidVariantPackError):
        return None
    if found is None:
        return None
    known, addresses = found
    if known.call is None:
        return None
    if not learns:
        results = known.call(tensors, addresses)
        return tuple(results) if return_lse else results[0]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return _apply(q, k, v, (known, addresses, deterministic, return_lse))


def _find(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> tuple[Known, list[int]] | None:
    """What is known, and the addresses; ``None`` if attention of such tensors is, at present, that
    of others."""
    found = _CAST.latest((q, k, v), asked)
    if found is not None and torch.get_autocast_dtype(found[0].device) is q.dtype:
        return found
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        return None
    if is_observed():
        return None
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _FORWARDS.find((q, k, v), asked)
    return _CAST.find((q, k, v), asked) if torch.get_autocast_dtype(device) is q.dtype else None


def _prepare(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Known:
    said, with_lse = asked
    *numbers, said_by, _ = said
    options = options_of(*numbers, None, 0.0, False, False, said_by)
    device, call = q.device.type, None
    if device in ("cuda", "cpu") and _is_plain(q, k, v, said):
        call = forward_pass.prepare(q, k, v, words(options, with_lse))
    return Known(call, options, device)


def _is_plain(q: Tensor, k: Tensor, v: Tensor, said: Words) -> bool:
    """Whether there is neither anything to copy or to cast, nor anything wrong with heads and
    batch."""
    tensors, layout, enable_gqa = (q, k, v), said[0], said[-1]
    if not isinstance(layout, str) or sorted(layout) != sorted("bshd"):
        return False
    if any(x.is_nested or x.dim() != 4 or not is_in_rows(x) for x in tensors):
        return False
    if not q.dtype is k.dtype is v.dtype:
        return False
    batches, heads = ({x.shape[layout.index(letter)] for x in tensors} for letter in "bh")
    return len(batches) == 1 and (enable_gqa or len(heads) == 1)


#: Of calls without autocasting, and under it: quick tests see whether it is on, but not the type.
_FORWARDS, _CAST = CallCache(_prepare), CallCache(_prepare)


class _Function(torch.autograd.Function):  # type: ignore[misc]
    """Each argument costs; see also :class:`dlattn.torch.functions.Eager`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor,
        constants: tuple[Known, list[int], bool, bool],
    ) -> Any:  # fmt: skip
        known, addresses, deterministic, return_lse = constants
        assert known.call is not None
        out, lse = known.call((q, k, v), addresses)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.asked = known, deterministic
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        tensors = (*ctx.saved_tensors, dout)
        if dlse is None and dout is not None and not torch.is_grad_enabled():
            asked = ctx.asked
            # Which looks at transforms, too.
            found = _BACKWARDS.latest(tensors, asked) or _find_backward(tensors, asked)
            if found is not None and found[0].call is not None:
                return (*found[0].call(tensors, found[1]), None)
        if dout is dlse is None:
            return None, None, None, None
        known, deterministic = ctx.asked
        q, k, v, out, lse, _ = tensors
        given = Tensors(q, k, v), known.options, (False, False), deterministic
        dq, dk, dv, *_ = differentiated(dout, out, lse, dlse, *given)
        return dq, dk, dv, None

    jvp = staticmethod(refuse)


#: What ``apply`` does where no transform is active; it looks for one again, which takes as long.
_apply = super(torch.autograd.Function, _Function).apply
# What autograd calls, without looking first which function it is that has a backward.
_Function._backward_cls.apply = _Function.backward


def _prepare_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    asked: tuple[Known, bool],
) -> Known:  # fmt: skip
    forward, deterministic = asked
    call = None
    if is_movable(dout):
        said = words(forward.options, False, False, deterministic)
        call = backward_pass.prepare(q, k, v, out, lse, dout, said)
    return replace(forward, call=call)


def _find_backward(
    tensors: tuple[Tensor, ...], asked: tuple[Known, bool]
) -> tuple[Known, list[int]] | None:
    """As :func:`_find`, of a backward."""
    dout = tensors[-1]
    if is_observed() or is_of_many(dout) or dout.is_neg():
        return None
    return _BACKWARDS.find(tensors, asked)


_BACKWARDS = CallCache(_prepare_backward)
