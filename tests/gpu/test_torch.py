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


def test_any_strides() -> None:
    """Tensors whose last dimension has gaps, and a gradient that repeats one number."""
    q, k = random(2, 4, 64, 200), random(2, 4, 300, 1)
    v = random(2, 300, 4, 64)

    def run(function: Callable[..., Any], *inputs: Any) -> list[Any]:
        q, k, v = inputs
        out = function(q.mT, k.expand(2, 4, 300, 64), v.transpose(1, 2))
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    def theirs(*inputs: Any) -> Any:
        # Other strides PyTorch leaves to a backend that rounds nothing in between.
        return sdpa(*(x.contiguous() for x in inputs))

    doubles = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    assert_as_near(
        run(scaled_dot_product_attention, q, k, v), run(theirs, q, k, v), run(sdpa, *doubles), 3
    )


@pytest.mark.parametrize("learns", [False, True])
def test_autocasting_is_seen_between_calls_that_look_alike(learns: bool) -> None:
    """Calls are cast as PyTorch casts its own, whatever the ones before were."""
    x = [random(2, 4, 200, 64).detach().requires_grad_(learns) for _ in range(3)]
    for dtype in (None, torch.bfloat16, torch.float16, None, torch.float16) * 2:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            found, own = (f(*x, is_causal=True) for f in (scaled_dot_product_attention, sdpa))
        assert found.dtype is own.dtype is (dtype or torch.bfloat16)
        torch.testing.assert_close(found, own, rtol=2e-2, atol=2e-2)


def test_biases_and_sinks_have_gradients() -> None:
    """Under autocasting those of fp32 are near those in fp64 on the CPU."""
    q, k, v = (random(2, 200, 4, 64) for _ in range(3))
    bias, sinks = random(4, 200, 200, dtype=torch.float32), random(4, dtype=torch.float32)

    def run(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> list[Any]:
        inputs = q, k, v, bias, sinks
        out = attention(q, k, v, bias=bias, sinks=sinks, causal=True)
        return [out, *torch.autograd.grad(out.double().square().sum(), inputs)]

    with torch.autocast("cuda", torch.bfloat16):
        found = run(q, k, v, bias, sinks)
    assert [x.dtype for x in found[4:]] == [torch.float32] * 2
    inputs = [x.detach().cpu().double().requires_grad_() for x in (q, k, v, bias)]
    wanted = run(*inputs, sinks.detach().cpu().requires_grad_())
    for one, other in zip(found, wanted, strict=True):
        assert (one.cpu() - other).abs().max() < 3e-2 * other.abs().max()


@pytest.mark.parametrize("gaps", [False, True])
def test_nested(gaps: bool) -> None:
    """Nested tensors, with gaps between sequences or without, give what each sequence gives."""
    lengths = (130, 1, 257)
    buffer = random(3, 300, 4, 64)
    starts = [10, 0, 43] if gaps else [0] * 3
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    if gaps:
        where = (torch.tensor(x, device="cuda") for x in (starts, lengths))
        made = torch.nested.narrow(buffer, 1, *where, layout=torch.jagged)
    else:
        offsets = torch.tensor([0, 130, 131, 388], device="cuda")
        values = torch.cat([own[:length] for own, length in zip(buffer, lengths, strict=True)])
        made = torch.nested.nested_tensor_from_jagged(values, offsets)
    x = made.transpose(1, 2)
    found = scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)
    begins = found.offsets().tolist()
    dout = torch.randn_like(found.values())
    (gradient,) = torch.autograd.grad(found.values(), buffer, dout)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        rows = slice(begins[i], begins[i] + lengths[i])
        part = buffer[i : i + 1, start:end].detach().requires_grad_()
        out = attention(part, part, part, causal=True)
        (own,) = torch.autograd.grad(out, part, dout[None, rows])
        torch.testing.assert_close(found.values()[rows], out[0], rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(gradient[i, start:end], own[0], rtol=2e-2, atol=2e-2)
    assert gradient.isfinite().all()


def test_operators_are_well_made() -> None:
    """What ``torch.library.opcheck`` asks of operators, on the device."""
    q, k, v = (random(2, 64, 4, 64) for _ in range(3))
    options = ("bshd", True, None, None, "bottom_right", None, None, None, None, 0.0, False, False)
    options += ("dlattn",)
    for deterministic in (False, True):
        torch.library.opcheck(
            torch.ops.dlattn.attention.default,
            (q, k, v, *(None,) * 9, *options, deterministic),
            rtol=2e-2,
            atol=2e-2,
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
def test_compiled_models_fall_back() -> None:
    """A compiled call in fp32, for which there is no kernel, goes to PyTorch; with autocasting, or
    in bf16, it does not."""
    torch._dynamo.reset()
    q = torch.randn(1, 2, 64, 64, device="cuda")
    functional = torch.nn.functional

    @torch.compile(fullgraph=True)
    def run(q: Any) -> Any:
        return functional.scaled_dot_product_attention(q, q, q)

    with replace_sdpa():
        torch.testing.assert_close(run(q), sdpa(q, q, q), rtol=1e-3, atol=1e-3)
        with torch.autocast("cuda", torch.bfloat16):
            assert run(q).dtype == torch.bfloat16


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
