"""PyTorch's causal biases (``torch.nn.attention.bias``), which stand for a diagonal.

They are tensors whose memory is never written: what they mean is said by attributes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dlattn.errors import InvalidArgumentError


def is_causal_bias(x: Any) -> bool:
    """Whether it is one, by the name of its class, as importing that imports PyTorch's compiler."""
    return any(
        it.__module__ == "torch.nn.attention.bias" and it.__name__ == "CausalBias"
        for it in type(x).__mro__
    )


def refuse_causal_bias(bias: Any) -> None:
    """Where there are words for what it says.

    Raises:
        InvalidArgumentError: it is one.
    """
    if is_causal_bias(bias):
        raise InvalidArgumentError(
            "bias: expected numbers or booleans, got a CausalBias of torch.nn.attention, whose "
            "memory is never written; give causal=True, with alignment='top_left' for "
            "causal_upper_left."
        )


def alignment_of(
    bias: Any, query: Tensor, key: Tensor, is_causal: bool, window: Any, alignment: str
) -> str:
    """Where the diagonal of a causal bias begins or ends, as an ``alignment`` beside
    ``is_causal=True``.

    Args:
        is_causal, window, alignment: what else the call says.

    Raises:
        InvalidArgumentError: it is of other sizes, or the call has one more diagonal.
    """
    sizes = bias.seq_len_q, bias.seq_len_kv
    rows = (*query.shape[-2:-1], *key.shape[-2:-1])
    if sizes != rows:
        raise InvalidArgumentError(
            f"attn_mask: expected a causal bias of the rows of query and of key, {rows}, got one "
            f"of {sizes}; make one of theirs."
        )
    if sizes[0] == sizes[1]:
        return alignment
    meant = "top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right"
    if alignment != meant and (is_causal or window is not None):
        raise InvalidArgumentError(
            f"attn_mask: its diagonal is at the {meant.replace('_', ' ')}, but is_causal and "
            f"window are aligned to the {alignment!r:.100}; give alignment={meant!r}, or a mask of "
            "booleans."
        )
    return meant
