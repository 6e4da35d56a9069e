"""Nested tensors, as packed sequences and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlattn.errors import InvalidArgumentError
from dlattn.torch.arguments import check_heads
from dlattn.torch.differentiable import attend_in


def nested_attention(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, options: dict[str, Any]
) -> Any:
    """Attention of sequences of different lengths, packed one behind the other, maybe with gaps.

    Args:
        query, key, value: (B, H, jagged, E), as ``transpose(1, 2)`` gives it.
        enable_gqa: as of :func:`dlattn.torch.scaled_dot_product_attention`.
        options: of :func:`dlattn.torch.differentiable.attend_in`.

    Raises:
        InvalidArgumentError: they are no such tensors, keys and values differ in lengths, or heads
            are shared where that is not said.
    """
    q, k, v = packed = [x.transpose(1, 2) for x in (query, key, value)]
    if any(x.layout is not torch.jagged for x in packed):
        raise InvalidArgumentError(
            "query, key, value: expected nested tensors of layout torch.jagged, got "
            f"{[str(x.layout) for x in packed]}."
        )
    if any(x.dim() != 4 or x._ragged_idx != 1 for x in packed):
        raise InvalidArgumentError(
            "query, key, value: expected (B, H, jagged, E), as transpose(1, 2) gives it of (B, "
            f"jagged, H, E), got {[tuple(x.shape) for x in (query, key, value)]}."
        )
    if k.shape[1] != v.shape[1]:
        raise InvalidArgumentError(
            "value: expected the lengths of key, made of the same offsets, got others; make one by "
            "torch.nested.nested_tensor_from_jagged(values, key.offsets())."
        )
    check_heads(q.shape[2], k.shape[2], v.shape[2], enable_gqa)
    found = attend_in(
        "torch",
        q.values(),
        k.values(),
        v.values(),
        bias=None,
        layout="thd",
        lengths=(q.lengths(), k.lengths()),
        cu_seqlens=tuple(x.offsets().to(torch.int32) for x in (q, k)),
        max_seqlens=tuple(x._get_max_seqlen() for x in (q, k)),
        **options,
    )
    out, lse = found if options["return_lse"] else (found, None)
    nested = torch.nested.nested_tensor_from_jagged(out, q.offsets(), q.lengths()).transpose(1, 2)
    return nested if lse is None else (nested, lse)
