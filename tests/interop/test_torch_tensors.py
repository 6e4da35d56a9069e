"""Tensors of torch that have no rows, no memory, or a sign beside it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dlattn.errors import InvalidArgumentError  # noqa: E402
from dlattn.torch import scaled_dot_product_attention  # noqa: E402
from tests.torch_checks import assert_same, random, sdpa  # noqa: E402


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_tensors_without_rows(name: str, masked: bool) -> None:
    """Sparse tensors and numbers are refused by name, beside a mask too."""
    good = {role: torch.zeros(2, 3, 4, 8) for role in ("query", "key", "value")}
    mask = torch.ones(4, 4, dtype=torch.bool) if masked else None
    for wrong, said in ((good[name].to_sparse(), "dense"), (torch.tensor(1.0), "two dimensions")):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected .*{said}"):
            scaled_dot_product_attention(**{**good, name: wrong}, attn_mask=mask)


class Wrapper(torch.Tensor):
    """A tensor without memory, around one that has some."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: Any) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        inside = torch.utils._pytree.tree_map_only(cls, lambda x: x.held, (given, named or {}))
        found = function(*inside[0], **inside[1])
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, found)


@pytest.mark.parametrize("at", range(4))
def test_one_tensor_without_memory(at: int) -> None:
    """Of query, key, value and mask, any one may be of a class that wraps its memory."""
    given = [random(2, 3, 4, 8, seed=n, grad=False) for n in range(3)]
    given.append(random(4, 4, grad=False))
    wrapped = [Wrapper(x) if n == at else x for n, x in enumerate(given)]
    assert_same([scaled_dot_product_attention(*wrapped).held], [sdpa(*given)])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_that_are_negated(masked: bool, with_lse: bool) -> None:
    """Gradients come as what PyTorch reads with another sign than the memory has."""
    x = [random(2, 3, 4, 8, seed=n) for n in range(3)]
    mask = random(4, 4, seed=3, grad=False) if masked else None
    found = []
    for negate in (torch._neg_view, torch.neg):
        results = scaled_dot_product_attention(*x, mask, return_lse=True)[: 1 + with_lse]
        grads = [negate(torch.ones_like(result)) for result in results]
        found.append(torch.autograd.grad(results, x, grads))
    assert_same(*found)
