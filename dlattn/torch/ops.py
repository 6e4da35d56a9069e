"""``torch.ops.dlattn``: what ``torch.compile`` and ``torch.export`` see.

An operator says its results' shapes to them (a fake), its gradients, and how it is batched, so that
a graph holds one node for it. The eager way, in :mod:`dlattn.torch.differentiable`, is quicker, and
the one that ``torch.func`` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from dlattn.calls.arguments import SAID
from dlattn.errors import InvalidArgumentError
from dlattn.torch.arguments import Options, backward, forward, split
from dlattn.torch.batching import batching
from dlattn.torch.derivative import gradients, is_forward_mode, refuse, refuse_tangents, save
from dlattn.torch.rows import empty_as

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? lengths_q, Tensor? lengths_kv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, "
    "Tensor? block_table, Tensor? state"
)
_OPTIONS = (
    "str layout, bool causal, int? left, int? right, str alignment, float? scale, float? softcap, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_kv, float dropout_p, "
    "bool shared_lengths, bool shared_cu_seqlens, str words"
)
_SCHEMAS = {
    "attention": f"({_TENSORS}, {_OPTIONS}, bool deterministic) -> (Tensor out, Tensor lse)",
    "attention.out": (
        f"({_TENSORS}, {_OPTIONS}, bool deterministic, *, Tensor(a!) out) -> Tensor lse"
    ),
    "attention_backward": (
        f"(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, {_TENSORS}, {_OPTIONS}, "
        "bool deterministic, bool bias_gradient, bool sinks_gradient) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
    ),
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"dlattn::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)


# What runs ----------------------------------------------------------------------------------------


def _attention(*given: Any) -> tuple[Tensor, Tensor]:
    tensors, options, _ = split(given)
    out, lse = forward(tensors, options)
    return out, lse


def _attention_out(*given: Any, out: Tensor) -> Tensor:
    tensors, options, _ = split(given)
    return forward(tensors, options, out)[1]


def _attention_backward(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *given: Any
) -> tuple[Tensor, ...]:
    tensors, options, (deterministic, *wanted) = split(given)
    bias, sinks = wanted
    found = backward(dout, out, lse, dlse, tensors, options, (bias, sinks), deterministic)
    # A schema has no results that may be missing.
    return tuple(dout.new_empty(0) if gradient is None else gradient for gradient in found)


# What they are like -------------------------------------------------------------------------------


def _fake_attention(*given: Any) -> tuple[Tensor, Tensor]:
    tensors, options, _ = split(given)
    q, v = tensors.q, tensors.v
    return empty_as(q, v.shape[-1]), _fake_lse(q, options)


def _fake_attention_out(*given: Any, out: Tensor) -> Tensor:
    tensors, options, _ = split(given)
    return _fake_lse(tensors.q, options)


def _fake_lse(q: Tensor, options: Options) -> Tensor:
    layout, name = options.layout, SAID[options.words].get("q", "q")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    letters = "ht" if layout == "thd" else "bhs"
    if q.dim() != len(layout):
        raise InvalidArgumentError(
            f"{name}: expected the dimensions of layout {layout!r}, got shape {tuple(q.shape)}."
        )
    return q.new_empty([q.shape[layout.index(letter)] for letter in letters], dtype=dtype)


def _fake_backward(dout: Tensor, *given: Any) -> tuple[Tensor, ...]:
    tensors, _, (_, *wanted) = split(given[3:])
    more = (
        like.new_empty(like.shape) if asked and like is not None else dout.new_empty(0)
        for asked, like in zip(wanted, (tensors.bias, tensors.sinks), strict=True)
    )
    return (*(empty_as(x, x.shape[-1]) for x in tensors[:3]), *more)


for _devices in ("CPU", "CUDA"):
    torch.library.impl("dlattn::attention", _devices, _attention)
    torch.library.impl("dlattn::attention.out", _devices, _attention_out)
    torch.library.impl("dlattn::attention_backward", _devices, _attention_backward)
torch.library.register_fake("dlattn::attention", _fake_attention)
torch.library.register_fake("dlattn::attention.out", _fake_attention_out)
torch.library.register_fake("dlattn::attention_backward", _fake_backward)


# What transforms make of them ---------------------------------------------------------------------


class _WithoutTangents(torch.library.Library):  # type: ignore[misc]
    """What PyTorch makes of gradients looks at none but those of reverse mode: where nothing
    requires one, tangents would be lost."""

    def impl(self, name: Any, kernel: Callable[..., Any], *more: Any, **options: Any) -> None:
        @wraps(kernel)
        def refusing(keys: Any, *given: Any, **named: Any) -> Any:
            if is_forward_mode():
                every = (*given, *named.values())
                refuse_tangents(*(x for x in every if isinstance(x, Tensor)))
            return kernel(keys, *given, **named)

        super().impl(name, refusing, *more, **options)


#: Its registrations last as long as it does.
_LIBRARY = _WithoutTangents("dlattn", "FRAGMENT")

torch.library.register_autograd(
    "dlattn::attention",
    partial(gradients, torch.ops.dlattn.attention_backward),
    setup_context=save,
    lib=_LIBRARY,
)
torch.library.register_autograd("dlattn::attention_backward", refuse, lib=_LIBRARY)


def _without_gradients(keys: Any, *given: Any, out: Tensor) -> Tensor:
    """As all of PyTorch's operators that write to memory, which else would have none in silence."""
    tensors, _, _ = split(given)
    learned = (tensors.q, tensors.k, tensors.v, tensors.bias, tensors.sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned):
        raise InvalidArgumentError(
            "attention.out: what is written to given memory has no gradient, but an input requires "
            "one; call torch.ops.dlattn.attention, or this under torch.no_grad()."
        )
    with torch._C._AutoDispatchBelowAutograd():
        below = keys & torch._C._after_autograd_keyset
        lse: Tensor = torch.ops.dlattn.attention.out.redispatch(below, *given, out=out)
    return lse


_LIBRARY.impl("attention.out", _without_gradients, "Autograd", with_keyset=True)
torch.library.register_vmap("dlattn::attention", batching(torch.ops.dlattn.attention, 0))
torch.library.register_vmap(
    "dlattn::attention_backward", batching(torch.ops.dlattn.attention_backward, 4)
)
