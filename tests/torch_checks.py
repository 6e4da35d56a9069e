"""What tests of ``dlattn.torch`` compare with, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dlattn.torch import attention

sdpa = torch.nn.functional.scaled_dot_product_attention


def by_definition(*given: Any, **options: Any) -> Any:
    """PyTorch's attention as a few operations; its kernel for CPUs has NaN for negative scales."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return sdpa(*given, **options)


def random(*shape: int, seed: int = 0, grad: bool = True) -> Any:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    made = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return made.requires_grad_(grad)


def gradients(function: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Any]:
    """The output, and the gradients of what has any, of a random direction."""
    out = function(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, random(*out.shape, grad=False))]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def loss(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return attention(q, k, v, **options).sin().sum()
