"""Attention as one writes it in PyTorch, in the type of its tensors, with autograd's gradients.

What people had before there were fused kernels, and what the error of those is usually compared
with. Scores, probabilities and what comes back through them are rounded to that type.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.cases import Case
from tests.definition import Entry, Tensors, by_entry, cast, scores_of

#: The gradients, in the order of what they are of.
GRADIENTS = ("dQ", "dK", "dV")


def plain_gradients(case: Case, given: Tensors) -> dict[str, Any]:
    """dQ, dK and dV, float32 numbers of the case's type; tensors are PyTorch's."""
    import torch

    def entry(e: Entry) -> dict[str, Any]:
        leaves = [cast(x, case.dtype).requires_grad_() for x in (e.q, e.k, e.v)]
        q, k, v = leaves
        # What does not depend on them is exact before it is rounded.
        added = None if e.added is None else cast(e.added, case.dtype)
        scores = scores_of(case, replace(e, q=q, k=k, v=v, added=added))[0]
        scores = cast(scores, case.dtype).masked_fill(~e.keep, -torch.inf)
        # Rows that attend to nothing have no softmax.
        scores = torch.where(e.keep.any(-1)[..., None] | (e.sink > -torch.inf), scores, 0.0)
        sink = cast(e.sink, case.dtype).expand(*scores.shape[:2], 1)
        p = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
        p = p * cast(e.alive * e.kept * case.dropout_scale(), case.dtype)
        gradients = torch.autograd.grad(p @ v, leaves, cast(e.d_o, case.dtype))
        return {role: cast(x, "float32") for role, x in zip(GRADIENTS, gradients, strict=True)}

    with torch.enable_grad():
        results = by_entry(case, given, entry, "float32")
    return {role: cast(cast(results[role], case.dtype), "float32") for role in GRADIENTS}
