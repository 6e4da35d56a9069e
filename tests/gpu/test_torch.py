"""``dlattn.torch`` on a GPU, beside PyTorch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dlattn.torch import attention, replace_sdpa, scaled_dot_product_attention  # noqa: E402

pytestmark = pytest.mark.gpu

sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA")


def random(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def gradients(function: Callable[..., Any], inputs: tuple[Any, ...], dout: Any) -> list[Any]:
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def assert_as_near(found: list[Any], theirs: list[Any], exact: list[Any], factor: float) -> None:
    """No result is ``factor`` times as far from the exact one as PyTorch's of the same type."""
    for mine, other, true in zip(found, theirs, exact, strict=True):
        error, allowed = ((x.double() - true).abs().max() for x in (mine, other))
        assert error <= factor * allowed + 1e-3 * true.abs().max()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped heads": {"enable_gqa": True, "is_causal": True},
    "a bias": {"attn_mask": (1, 8, 300, 500)},
    "a bias of a row": {"attn_mask": (500,)},
    "a mask": {"attn_mask": torch.bool},
}


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_is_pytorchs(name: str, size: int) -> None:
    """Outputs and gradients are as near to those in fp64 as PyTorch's."""
    options = dict(CASES[name])
    torch.manual_seed(1)
    keys = 300 if options.get("is_causal") else 500
    q, k, v = (
        random(2, heads, rows, size)
        for heads, rows in (
            (8, 300),
            *((2 if "enable_gqa" in options else 8, keys),) * 2,
        )
    )
    inputs: tuple[Any, ...] = (q, k, v)
    mask = options.pop("attn_mask", None)
    if mask is torch.bool:
        options["attn_mask"] = torch.rand(2, 1, 300, 500, device="cuda") < 0.8
    elif mask:
        inputs += (random(*mask),)
    dout = torch.randn(2, 8, 300, size, device="cuda", dtype=torch.bfloat16)
    found = gradients(lambda *x: scaled_dot_product_attention(*x, **options), inputs, dout)
    theirs = gradients(lambda *x: sdpa(*x, **options), inputs, dout)
    doubles = tuple(x.detach().double().requires_grad_() for x in inputs)
    exact = gradients(lambda *x: sdpa(*x, **options), doubles, dout)
    assert_as_near(found, theirs, exact, 3)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_the_log_sum_exp_is_differentiable(layout: str) -> None:
    """Gradients of a loss of both results are near those in fp64 on the CPU."""
    options: dict[str, Any] = {"layout": layout, "causal": True, "return_lse": True}
    shape: tuple[int, ...] = (2, 200, 4, 128)
    if layout == "thd":
        shape, options["max_seqlens"] = (450, 4, 128), 251
        options["cu_seqlens"] = torch.tensor([0, 199, 450], dtype=torch.int32, device="cuda")
    q, k, v = (random(*shape) for _ in range(3))
    weights = torch.randn_like(attention(q, k, v, **options)[1])

    def loss(q: Any, k: Any, v: Any, weights: Any, options: dict[str, Any]) -> Any:
        out, lse = attention(q, k, v, **options)
        return (weights * lse).sum() + out.double().square().sum()

    found = torch.autograd.grad(loss(q, k, v, weights, options), (q, k, v))
    doubles = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    if layout == "thd":
        options["cu_seqlens"] = options["cu_seqlens"].cpu()
    wanted = torch.autograd.grad(loss(*doubles, weights.cpu().double(), options), doubles)
    for one, other in zip(found, wanted, strict=True):
        assert (one.cpu() - other).abs().max() < 2e-2 * other.abs().max()


def loss(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return scaled_dot_product_attention(q, k, v, is_causal=True, **options).sin().float().sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
def test_compiled() -> None:
    """Under ``torch.compile`` there is one graph, and the same bits."""
    torch._dynamo.reset()
    q, k, v = (random(2, 4, 256, 64) for _ in range(3))
    compiled = torch.compile(loss, fullgraph=True)
    found = torch.autograd.grad(compiled(q, k, v, deterministic=True), (q, k, v))
    wanted = torch.autograd.grad(loss(q, k, v, deterministic=True), (q, k, v))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)


def test_batched() -> None:
    """``vmap`` of a gradient is the gradient of each."""
    q, k, v = (random(3, 2, 4, 256, 64).detach() for _ in range(3))
    gradient = torch.func.grad(lambda *x: loss(*x, deterministic=True), argnums=(0, 1, 2))
    found = torch.vmap(gradient)(q, k, v)
    for i in range(3):
        for many, one in zip(found, gradient(q[i], k[i], v[i]), strict=True):
            torch.testing.assert_close(many[i], one, rtol=2e-2, atol=1e-3)


def test_cuda_graph() -> None:
    """A captured forward and backward replays on new numbers, with a new mask of dropout."""
    q, k, v = (random(2, 4, 256, 64) for _ in range(3))

    def step() -> list[Any]:
        out = scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append([x.clone() for x in results])
    assert not torch.equal(seen[0][0], seen[1][0])
    assert all(x.isfinite().all() for x in seen[1])
    with torch.no_grad():
        v.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert (results[0] == 0).all()


def test_training_layer() -> None:
    """A layer under autocast gives the gradients that PyTorch's attention gives."""
    layer = torch.nn.MultiheadAttention(128, 2, batch_first=True, device="cuda")
    x = torch.randn(2, 200, 128, device="cuda")
    found = []
    for scope in (replace_sdpa(fall_back=False), torch.enable_grad()):
        with scope, torch.autocast("cuda", torch.bfloat16):
            layer.zero_grad()
            out = layer(x, x, x, need_weights=False)[0]
            out.float().square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 3e-2 * other.abs().max()
