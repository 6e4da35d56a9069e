"""``scaled_dot_product_attention``: the words of ``torch.nn.functional``, and more of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlattn.errors import InvalidArgumentError
from dlattn.torch.arguments import (
    bounds,
    check_heads,
    expect_tensors,
    probability,
    real,
    truth,
)
from dlattn.torch.causal import alignment_of, is_causal_bias
from dlattn.torch.differentiable import attend_in
from dlattn.torch.functions import PLAIN
from dlattn.torch.nested import nested_attention
from dlattn.torch.plain import attend_plainly
from dlattn.torch.rows import in_rows


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "top_left",
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    lengths: Any = None,
    block_table: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Any:
    """``torch.nn.functional.scaled_dot_product_attention``, and dlattn's options after it.

    Differentiable, compiled and transformed as :func:`dlattn.torch.attention` is. Rows that attend
    to nothing are 0.

    Args:
        query: (..., H, L, E); fp16 or bf16, on the CPU also fp32 and fp64. With nested tensors
            (``torch.jagged``), (B, H, jagged, E), as ``transpose(1, 2)`` gives it. Copied, as key
            and value, if the stride of the last dimension is not 1.
        key: (..., Hk, S, E).
        value: (..., Hk, S, Ev).
        attn_mask: broadcasts to (..., H, L, S): of booleans, true where a query attends; of floats,
            added to the scores, with a gradient. One of ``torch.nn.attention.bias`` is what it
            says: ``is_causal=True`` with the ``alignment`` of its corner.
        dropout_p: the probability to drop.
        is_causal: query i attends to keys 0 to i. Beside a mask, both hold.
        scale: ``1 / sqrt(E)`` unless given.
        enable_gqa: Hk may be any divisor of H; else it must be H, or 1.
        window, softcap, alibi_slopes, sinks: as in :func:`dlattn.attention`; distances of slopes
            are from the bottom right corner, whatever the alignment.
        alignment: where the positions of queries and keys meet, for ``is_causal``, too:
            ``"top_left"``, or ``"bottom_right"``.
        lengths: as in :func:`dlattn.attention`, of four dimensions.
        block_table: (B, pages of a sequence), int32: key and value lie in pages, (pages, Hk, rows
            of a page, E), as in :func:`dlattn.attention`.
        deterministic, return_lse: as in :func:`dlattn.torch.attention`; log-sum-exps are (..., H,
            L), of nested tensors (H, tokens).

    Raises:
        InvalidArgumentError: tensors or arguments contradict each other (a ``RuntimeError``).
        InvalidVariantPackError: in host memory, a page that there is not (a ``ValueError``).
        cudnnGraphNotSupportedError: no plan runs it; the message has each one's reason.
    """
    if type(dropout_p) is not float:
        dropout_p = probability(dropout_p)
    if type(is_causal) is not bool:
        is_causal = truth("is_causal", is_causal)
    if type(enable_gqa) is not bool:
        enable_gqa = truth("enable_gqa", enable_gqa)
    if window is not None:
        window = bounds(window)
    if scale is not None and type(scale) is not float:
        scale = real("scale", scale)
    if softcap is not None and type(softcap) is not float:
        softcap = real("softcap", softcap)
    if attn_mask is not None and type(attn_mask) not in PLAIN and is_causal_bias(attn_mask):
        _check(query, key, value)
        alignment = alignment_of(attn_mask, query, key, is_causal, window, alignment)
        attn_mask, is_causal = None, True
    if not dropout_p and (attn_mask is sinks is alibi_slopes is lengths is block_table is None):
        said = "bhsd", is_causal, window, alignment, scale, softcap, "torch", enable_gqa
        found = attend_plainly(query, key, value, said, deterministic, return_lse)
        if found is not None:
            return found
    if not (
        type(query) in PLAIN
        and type(key) in PLAIN
        and type(value) in PLAIN
        and query.layout is key.layout is value.layout is torch.strided
        and query.dim()
        and key.dim()
        and value.dim()
    ):
        _check(query, key, value)
    nested = query.is_nested or key.is_nested or value.is_nested
    if not nested:
        if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
            query, key, value = in_rows(query), in_rows(key), in_rows(value)
        of_q, of_k, of_v = query.shape, key.shape, value.shape
        alike = block_table is not None or of_q[0] == of_k[0] == of_v[0]
        if len(of_q) == len(of_k) == len(of_v) == 4 and alike:
            check_heads(of_q[1], of_k[1], of_v[1], enable_gqa)
            return attend_in(
                "torch", query, key, value, attn_mask, sinks, alibi_slopes, lengths, None,
                block_table, "bhsd", is_causal, window, alignment, scale, softcap, None, dropout_p,
                deterministic, return_lse,
            )  # fmt: skip
    words: dict[str, Any] = {
        "causal": is_causal,
        "window": window,
        "alignment": alignment,
        "scale": scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "block_table": block_table,
        "dropout_p": dropout_p,
        "deterministic": deterministic,
        "return_lse": return_lse,
    }
    if not nested:
        return _reshaped(query, key, value, attn_mask, enable_gqa, lengths, words)
    if not (attn_mask is lengths is block_table is None):
        raise InvalidArgumentError(
            "attn_mask, lengths and block_table: expected None with nested tensors, which have "
            "lengths of their own and no common mask."
        )
    return nested_attention(query, key, value, enable_gqa, words)


def _check(query: Any, key: Any, value: Any) -> None:
    """Refuse what has no rows."""
    expect_tensors(query=query, key=key, value=value)
    for name, it in (("query", query), ("key", key), ("value", value)):
        if it is None:
            raise InvalidArgumentError(f"{name}: expected a torch.Tensor, got None.")
        if it.layout is not torch.strided and not it.is_nested:
            raise InvalidArgumentError(
                f"{name}: expected a dense tensor, got one of layout {it.layout}; pass its "
                "to_dense()."
            )
        if not it.dim():
            raise InvalidArgumentError(
                f"{name}: expected two dimensions (L, E) or more, got a number."
            )


def _reshaped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    enable_gqa: bool,
    lengths: Any,
    options: dict[str, Any],
) -> Any:
    """Of other than four dimensions, or of dimensions in front that broadcast."""
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if min(map(len, shapes)) < 2 or options["block_table"] is not None:
        raise InvalidArgumentError(
            "query, key, value: expected two dimensions (L, E) or more, and with a block_table "
            f"four, got shapes {shapes}."
        )
    expect_tensors(attn_mask=attn_mask)
    rank = max(map(len, shapes))
    four: list[Tensor] = [_with_heads(x, rank) for x in (query, key, value)]
    mask, of_mask = attn_mask, None if attn_mask is None else tuple(attn_mask.shape)
    if mask is not None and rank == 3 and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in four))
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"query, key, value: expected dimensions in front that broadcast, got shapes {shapes}."
        ) from error
    of_q, of_k, of_v = (x.shape[-3] for x in four)
    check_heads(of_q, of_k, of_v, enable_gqa)
    q, k, v = (x.expand(*lead, *x.shape[-3:]).flatten(0, -4) for x in four)
    if mask is not None and mask.dim() > 3:
        front = mask.shape[:-3]
        if len(front) > len(lead) or any(
            n not in (1, size) for n, size in zip(reversed(front), reversed(lead), strict=False)
        ):
            raise InvalidArgumentError(
                f"attn_mask: expected dimensions that broadcast to {(*lead, of_q)} in front of (L, "
                f"S), got shape {of_mask}."
            )
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
    found = attend_in(
        "torch", q, k, v, mask, layout="bhsd", lengths=lengths, cu_seqlens=None, max_seqlens=None,
        **options,
    )  # fmt: skip
    out, lse = found if options["return_lse"] else (found, None)
    rows = lead if rank < 4 else (*lead, of_q)
    rows = (*rows, query.shape[-2]) if rank > 2 else query.shape[:1]
    out = out.reshape(*rows, value.shape[-1])
    return out if lse is None else (out, lse.reshape(rows))


def _with_heads(x: Tensor, rank: int) -> Tensor:
    """With four dimensions or more, where the largest of a call has ``rank``: PyTorch's of three
    have no head, of two no batch; what has fewer than others lacks those in front."""
    x = x[(None,) * (rank - x.dim())]
    if rank > 3:
        return x
    return x.unsqueeze(-3) if rank == 3 else x[None, None]
