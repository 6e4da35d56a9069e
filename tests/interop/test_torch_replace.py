"""``replace_sdpa``: dlattn in the place of PyTorch's own function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError  # noqa: E402
from dlattn.torch import replace_sdpa  # noqa: E402
from tests.models import Block  # noqa: E402
from tests.torch_checks import assert_same, random, sdpa  # noqa: E402


def test_in_the_place_of_pytorchs() -> None:
    """A model that calls PyTorch's function runs on dlattn, and gives the same; what dlattn does
    not run goes to PyTorch."""
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    x = random(2, 5, 16)
    own = layer(x, x, x, need_weights=False)[0]
    with replace_sdpa():
        assert torch.nn.functional.scaled_dot_product_attention is not sdpa
        found = layer(x, x, x, need_weights=False)[0]
        whole = torch.ones(2, 3, 4, 8, dtype=torch.complex64)
        torch.nn.functional.scaled_dot_product_attention(*(whole.real,) * 3)
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert_same([found], [own])
    with replace_sdpa(fall_back=False), pytest.raises(InvalidArgumentError):
        torch.nn.functional.scaled_dot_product_attention(x, x, x[..., :0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what PyTorch differentiates by
def test_replaced_in_forward_mode() -> None:
    """Derivatives that dlattn does not have are PyTorch's, where that may be fallen back to."""
    q, k = random(2, 3, 4, 8, grad=False), random(2, 3, 5, 8, seed=1, grad=False)

    def tangent(x: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            run = torch.nn.functional.scaled_dot_product_attention
            return torch.func.jvp(lambda x: run(x, k, k), (x,), (x,))[1]

    wanted = tangent(q)
    with replace_sdpa():
        assert_same([tangent(q)], [wanted])
    with replace_sdpa(fall_back=False), pytest.raises(NotImplementedError, match="reverse mode"):
        tangent(q)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_that_replace_end_in_any_order(order: tuple[int, int]) -> None:
    """As those of two threads: PyTorch's own is back when the last one has ended, not before."""
    functional, blocks = torch.nn.functional, (replace_sdpa(), replace_sdpa())
    for block in blocks:
        block.__enter__()
    for n in order:
        assert functional.scaled_dot_product_attention is not sdpa
        blocks[n].__exit__(None, None, None)
    assert functional.scaled_dot_product_attention is sdpa


def test_replaced_under_compilation() -> None:
    """A model that is compiled has dlattn's operator in its one graph."""
    torch._dynamo.reset()
    block, x = Block(16, 2, 1).double(), random(2, 5, 16)
    seen = []

    def backend(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with replace_sdpa():
        found = torch.compile(block, fullgraph=True, backend=backend)(x)
    assert_same([found], [block(x)])
    assert seen.count("dlattn.attention") == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's attention
def test_functions_that_are_made_functional() -> None:
    """``functionalize`` sees the operator, entries and gradients around it, too; of a gradient in
    it, PyTorch's attention does."""
    q, k, v = (random(2, 4, 5, 8, seed=seed, grad=False) for seed in range(3))
    functional = torch.func.functionalize

    def run(x: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(x, k, v, is_causal=True)

    def total(x: Any) -> Any:
        return run(x).sin().sum()

    def results(of: Callable[..., Any]) -> list[Any]:
        x = q.clone().requires_grad_()
        found = [of(run)(q), torch.vmap(of(run))(q[None]), of(torch.vmap(run))(q[None])]
        return [*found, make_fx(of(run))(q)(q), *torch.autograd.grad(of(total)(x), x)]

    wanted = [*results(lambda function: function), torch.func.grad(total)(q)]
    with replace_sdpa(fall_back=False):
        found = results(functional)
        with pytest.raises(cudnnGraphNotSupportedError, match="functionalize"):
            functional(torch.func.grad(total))(q)
    with replace_sdpa():
        assert_same([*found, functional(torch.func.grad(total))(q)], wanted)
