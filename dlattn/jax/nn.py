"""``dot_product_attention``: the words of ``jax.nn``, and more of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlattn.calls.arguments import flag
from dlattn.errors import InvalidArgumentError
from dlattn.jax.arguments import as_array, expect_known
from dlattn.jax.differentiable import attend_in


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    alignment: str = "top_left",
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    deterministic: bool = False,
) -> Any:
    """``jax.nn.dot_product_attention``, and dlattn's options after it.

    Traced and differentiated as :func:`dlattn.jax.attention` is. Rows that attend to nothing are 0.

    Args:
        query: (B, T, N, H), or without B; fp16 or bf16, on the CPU also fp32 and fp64.
        key, value: (B, S, K, H), where K divides N, or without B, whether or not the query has it.
        bias: added to scores, broadcasts to (B, N, T, S); it has a gradient. Of booleans, it is a
            mask.
        mask: of booleans, true where a query attends; broadcasts so, too. Beside a bias, both hold.
        scale: ``1 / sqrt(H)`` unless given; an array of no dimensions, which may be traced and has
            a gradient, is multiplied with the query.
        is_causal: query t attends to keys 0 to t.
        query_seq_lengths, key_value_seq_lengths: (B,), int32: how much of each sequence is used,
            cut to the rows that there are.
        local_window_size: how many keys before and behind its position a query attends to, or one
            number of both; with ``is_causal`` only the first counts.
        implementation: ignored; dlattn is the implementation.
        return_residual: return the log-sum-exp, too, (B, T, N); fp32, where ``jax.nn`` rounds it to
            the query's type and stops its gradient.
        alignment: where the positions of queries and keys meet: ``"top_left"``, or
            ``"bottom_right"``.
        softcap, alibi_slopes, sinks, dropout_rate, dropout_key, deterministic: as in
            :func:`dlattn.jax.attention`; distances of slopes are from the bottom right corner,
            whatever the alignment.

    Raises:
        InvalidArgumentError: arrays or arguments contradict each other, an option but the scale is
            traced, or an array is a tensor of PyTorch's (a ``RuntimeError``).
        cudnnGraphNotSupportedError: no plan runs it; the message has each one's reason.
    """
    expect_known(
        is_causal=is_causal,
        local_window_size=local_window_size,
        return_residual=return_residual,
    )
    query, key, value = (
        as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    is_causal, return_residual = (
        flag("is_causal", is_causal),
        flag("return_residual", return_residual),
    )
    single = query.ndim == 3
    query, key, value = (x[None] if x.ndim == 3 else x for x in (query, key, value))
    window: Any = local_window_size
    if window is not None and not isinstance(window, (tuple, list)):
        window = (window, window)
    if window is not None and len(window) != 2:
        raise InvalidArgumentError(
            f"local_window_size: expected a number or a pair, got {local_window_size!r:.100}."
        )
    bias, mask = (x if x is None else as_array(n, x) for n, x in (("bias", bias), ("mask", mask)))
    if mask is not None and mask.dtype != jnp.bool_:
        raise InvalidArgumentError(
            f"mask: expected booleans, got {mask.dtype}; give numbers as bias."
        )
    added = _added(bias, mask)
    if mask is not None and query.ndim == key.ndim == 4:
        _check_shape(mask, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))
    if isinstance(scale, (jax.Array, np.ndarray)):
        factor = as_array("scale", scale)
        if factor.ndim:
            raise InvalidArgumentError(
                f"scale: expected a number, or an array of no dimensions, got shape {factor.shape}."
            )
        query, scale = query * factor.astype(query.dtype), 1.0
    found = attend_in(
        "jax",
        query,
        key,
        value,
        added,
        sinks,
        alibi_slopes,
        lengths=(query_seq_lengths, key_value_seq_lengths),
        cu_seqlens=None,
        block_table=None,
        layout="bshd",
        causal=is_causal,
        window=window,
        alignment=alignment,
        scale=scale,
        softcap=softcap,
        max_seqlens=None,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        deterministic=deterministic,
        return_lse=return_residual,
    )
    out, lse = found if return_residual else (found, None)
    out = out[0] if single else out
    if lse is None:
        return out
    lse = jnp.moveaxis(lse, 1, 2)
    return out, lse[0] if single else lse


def _check_shape(mask: Any, full: tuple[int, ...]) -> None:
    """Refuse a mask of other scores, which beside none, or a bias, would be called a bias.

    Raises:
        InvalidArgumentError: it is one.
    """
    sizes = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.ndim > len(full) or any(size not in (1, most) for size, most in sizes):
        raise InvalidArgumentError(
            f"mask: expected a shape that broadcasts to (B, N, T, S) = {full}, got {mask.shape}."
        )


def _added(bias: Any, mask: Any) -> Any:
    """What both add to the scores.

    Raises:
        InvalidArgumentError: they do not broadcast with each other.
    """
    if bias is None or mask is None:
        return mask if bias is None else bias
    try:
        jnp.broadcast_shapes(bias.shape, mask.shape)
    except ValueError as error:
        raise InvalidArgumentError(
            "bias, mask: expected shapes that broadcast with each other, got "
            f"{bias.shape} and {mask.shape}."
        ) from error
    if bias.dtype in (jnp.bool_, jnp.uint8):  # which is a mask, too
        return bias.astype(jnp.bool_) & mask
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        return bias  # to be refused as it is without a mask
    return jnp.where(mask, bias, jnp.asarray(-jnp.inf, bias.dtype))
