"""``attn_implementation="dlattn"``: dlattn under a name that ``transformers`` knows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, finfo

from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.torch.differentiable import attention


def register_transformers(name: str = "dlattn") -> None:
    """Makes models of ``transformers`` (4.53 and later) take ``attn_implementation=name``.

    Unlike under :func:`dlattn.torch.replace_sdpa`, soft caps and sinks are dlattn's own, keys and
    values are not repeated for query heads that share them, and other models run as before.

    Args:
        name: what to call it.

    Raises:
        InvalidArgumentError: the name is no str.
        ImportError: there is no ``transformers``, or one without a registry of masks.
    """
    if not isinstance(name, str):
        raise InvalidArgumentError(f"name: expected a str, got {name!r:.100}.")
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as layers of ``transformers`` call it.

    Args:
        module: the layer; ``is_causal`` is its own unless given.
        query, key, value: (B, H, L, E), (B, Hk, S, E), (B, Hk, S, Ev).
        attention_mask: as ``transformers.masking_utils.sdpa_mask`` makes it; has causality and
            windows. Without, a causal layer's queries and keys begin together, but for one query,
            which attends to all keys.
        s_aux: sinks, (H).
        position_bias: added to the scores, broadcasts to (B, H, L, S).

    Returns:
        The output, (B, L, H, Ev), and no weights.

    Raises:
        cudnnGraphNotSupportedError: no plan runs it, or ``cache`` has the keys and values.
    """
    if cache is not None:
        raise cudnnGraphNotSupportedError(
            f"cache: expected None, got a {type(cache).__qualname__}, whose pages dlattn does not "
            "find by itself; use another attn_implementation for continuous batching."
        )
    length, causal = query.shape[2], module.is_causal if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and length > 1
    if causal and key.shape[2] > length:  # the rest of a static cache, not written yet
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = None if position_bias is None else position_bias[..., :length]
    out = attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        causal=causal,
        scale=scaling,
        softcap=softcap,
        bias=_added(position_bias, attention_mask),
        sinks=None if s_aux is None else s_aux.float(),
        dropout_p=dropout,
    )
    return out, None


def _added(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """What both add to the scores."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.is_floating_point():
        return bias + mask
    return bias.masked_fill(~mask, finfo(bias.dtype).min)
