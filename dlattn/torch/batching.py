"""How ``torch.vmap`` batches attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlattn.torch.arguments import COUNT, Tensors
from dlattn.torch.rows import in_rows


def batching(operator: Callable[..., Any], before: int) -> Callable[..., Any]:
    """A rule: entries and batch become one batch, if there is no more than q, k, v, lengths, and
    what all entries share; else the operator runs for each entry.

    Args:
        before: tensors before q.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any) -> Any:
        tensors = Tensors(*given[before : before + COUNT])
        layout = given[before + COUNT]
        entries = Tensors(*in_dims[before : before + COUNT])
        # Of which gradients are asked for, those of each entry.
        asked = given[-2:] if before else (False, False)
        shared = {
            name: None
            for name, learned in zip(
                ("bias", "sinks", "alibi_slopes"), (*asked, False), strict=True
            )
            if not learned and getattr(entries, name) is None and _has_no_batch(tensors, name)
        }
        others = tensors._replace(q=None, k=None, v=None, lengths_q=None, lengths_kv=None, **shared)
        if layout == "thd" or any(x is not None for x in others):
            return _one_by_one(operator, info, in_dims, given)
        axis = layout.index("b")
        axes = [axis] * before + [axis] * 3 + [0] * (COUNT - 3)
        if before:
            axes[before - 2 : before] = 0, 0  # log-sum-exps have the batch in front in every layout
        names = (*[None] * before, *Tensors._fields)
        merged = [
            x if x is None or name in shared else _merged(x, dim, at, info.batch_size)
            for x, dim, at, name in zip(given, in_dims, axes, names, strict=False)
        ]
        found = operator(*merged, *given[before + COUNT :])
        of_entry = list(tensors.q.shape)
        if entries.q is not None:
            del of_entry[entries.q]
        batch = of_entry[axis]
        parted, dims = list(found), [None] * len(found)
        for i, at in enumerate((axis, axis, axis) if before else (axis, 0)):
            parted[i], dims[i] = found[i].unflatten(at, (info.batch_size, batch)), at
        return tuple(parted), tuple(dims)

    return rule


def _has_no_batch(tensors: Tensors, name: str) -> bool:
    """Whether a tensor, if there is one, is of every entry of a batch alike."""
    x = getattr(tensors, name)
    if x is None:
        return True
    return x.dim() < 2 or (name == "bias" and (x.dim() < 4 or x.shape[0] == 1))


def _merged(x: Tensor, dim: int | None, axis: int, count: int) -> Tensor:
    """With the entries of vmap in front of those of an axis, as one axis."""
    x = x.unsqueeze(0).expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
    return in_rows(x.movedim(0, axis).flatten(axis, axis + 1))


def _one_by_one(
    operator: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], given: tuple[Any, ...]
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    count = info.batch_size
    if not count:  # the operator says the shapes of results, of an entry of zeros
        given = tuple(
            x if dim is None else x.new_zeros(x.movedim(dim, 0).shape[1:]).unsqueeze(dim)
            for x, dim in zip(given, in_dims, strict=True)
        )
    found = [
        operator(
            *(
                x if dim is None else x.select(dim, i).contiguous()
                for x, dim in zip(given, in_dims, strict=True)
            )
        )
        for i in range(count or 1)
    ]
    stacked = tuple(
        None if x[0] is None else torch.stack(x)[:count] for x in zip(*found, strict=True)
    )
    return stacked, tuple(None if x is None else 0 for x in stacked)
