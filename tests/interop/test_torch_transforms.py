"""``dlattn.torch`` under what transforms it: compilation, ``torch.func``, no memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import dlattn  # noqa: E402
from dlattn.errors import DlattnError, InvalidArgumentError  # noqa: E402
from dlattn.flash import mha_fwd  # noqa: E402
from dlattn.torch import attention, replace_sdpa, scaled_dot_product_attention  # noqa: E402
from tests.torch_checks import assert_same, by_definition, loss, random, sdpa  # noqa: E402


def test_meta_and_fake_tensors() -> None:
    """Tensors without memory tell the shapes of results."""
    from torch._subclasses import FakeTensorMode

    def shapes(device: str) -> Any:
        q, k = (torch.empty(2, 4, rows, 8, device=device, requires_grad=True) for rows in (5, 7))
        out, lse = scaled_dot_product_attention(q, k, k[..., :6], return_lse=True)
        out.sum().backward()
        assert q.grad.shape == q.shape
        return out.shape, lse.shape, lse.dtype

    wanted = ((2, 4, 5, 6), (2, 4, 5), torch.float32)
    assert shapes("meta") == wanted
    with FakeTensorMode():
        assert shapes("cpu") == wanted


def test_functions_of_dlattn_alone_say_what_transforms_take() -> None:
    """What has no memory while torch transforms it is told which functions it is for."""
    q = random(2, 3, 4, 8)
    for run in (
        torch.func.vmap(lambda x: dlattn.attention(x[None], q, q)),
        torch.func.grad(lambda x: dlattn.attention(x, q, q).sum()),
    ):
        with pytest.raises(InvalidArgumentError, match="^q: .*no memory of its own.*dlattn.torch"):
            run(q)


class Classed(torch.Tensor):
    """Of a class of the caller's."""


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_gradients_beside_tensors_of_a_class(name: str) -> None:
    """``torch.func`` differentiates by tensors of any class, beside them, and without memory."""
    given = dict(
        zip("qkv", (random(2, 5, 4, 8, seed=i, grad=False) for i in range(3)), strict=True)
    )
    given["bias"] = random(4, 5, 5, seed=3, grad=False)

    def gradients(given: Any) -> Any:
        def at(q: Any, v: Any) -> Any:
            return loss(**{**given, "q": q, "v": v})

        of_both = torch.func.grad(at, argnums=(0, 1))
        entries = torch.func.vmap(of_both, in_dims=(0, None))(given["q"][None], given["v"])
        return [*of_both(given["q"], given["v"]), *entries]

    found = gradients({**given, name: given[name].as_subclass(Classed)})
    assert_same([x.as_subclass(torch.Tensor) for x in found], gradients(given))
    on_meta = gradients({name: x.to("meta") for name, x in given.items()})
    assert [x.shape for x in on_meta] == [x.shape for x in found]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_is_refused() -> None:
    """torch.jit.trace, which would keep one call's numbers, is refused by functions, by graphs that
    have run before, and left to PyTorch's attention where that is replaced."""
    q, k, v, other = (random(2, 3, 4, 8, seed=seed, grad=False) for seed in range(4))
    with dlattn.Graph(inputs=[q, k, v], outputs=["sdpa::O"]) as graph:
        graph.sdpa(q, k, v, is_inference=True, name="sdpa")[0].set_output(True)
    for run in (graph, dlattn.attention, attention, scaled_dot_product_attention):
        run(q, k, v)
        with pytest.raises(DlattnError, match=r"torch\.jit\.trace records"):
            torch.jit.trace(lambda x, run=run: run(x, k, v), q, check_trace=False)
    theirs = torch.nn.functional.scaled_dot_product_attention(other, k, v)
    with replace_sdpa():
        traced = torch.jit.trace(
            lambda x: torch.nn.functional.scaled_dot_product_attention(x, k, v), q
        )
    assert_same([traced(other)], [theirs])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_a_graph_with_given_outputs_is_refused() -> None:
    """So it is where nothing is allocated, whether tensors are checked, matched one by one, or
    known at first sight."""
    q, k, v = (random(2, 3, 4, 8, seed=seed, grad=False) for seed in range(3))
    graph = dlattn.pygraph(io_data_type=q.dtype)
    inputs = [graph.tensor_like(x) for x in (q, k, v)]
    o = graph.sdpa(*inputs, is_inference=True)[0]
    o.set_output(True).set_dim(q.shape).set_stride(q.stride())
    graph.build()

    def run(x: Any) -> Any:
        out = torch.empty_like(x)
        graph.execute({**dict(zip(inputs, (x, k, v), strict=True)), o: out})
        return out

    for _ in range(4):
        with pytest.raises(DlattnError, match=r"torch\.jit\.trace records"):
            torch.jit.trace(run, q, check_trace=False)
        run(q)


@pytest.mark.parametrize("options", [{}, {"attn_mask": random(4, 5, seed=4)}, {"is_causal": True}])
def test_make_fx_records_operators(options: dict[str, Any]) -> None:
    """What make_fx makes of functions of dlattn.torch, their gradients and transforms computes the
    same of other numbers, also if they have run before."""
    q, x, other, k, v = (random(2, 3, n, 8, seed=seed) for seed, n in enumerate((4, 4, 4, 5, 5)))

    def run(x: Any) -> Any:
        return scaled_dot_product_attention(x, k, v, **options)

    def summed(x: Any) -> Any:
        return run(x).pow(2).sum()

    before = run(q)
    for call in (
        lambda x: run(x).detach(),
        lambda x: torch.autograd.grad(summed(x), x)[0],
        lambda x: torch.autograd.grad(before, (q, k), x, retain_graph=True)[0],
        torch.func.grad(summed),
        torch.func.vmap(torch.func.grad(lambda x: run(x[None]).sum())),
    ):
        assert_same([make_fx(call)(x)(other)], [call(other)])


def test_make_fx_is_refused_where_it_would_record_nothing() -> None:
    """So are functions and graphs that are no operators, also if they have run before."""
    q, k, v = (random(2, 3, 4, 8, seed=seed, grad=False) for seed in range(3))
    with dlattn.Graph(inputs=[q, k, v], outputs=["sdpa::O"]) as graph:
        graph.sdpa(q, k, v, is_inference=True, name="sdpa")[0].set_output(True)
    for run in (graph, dlattn.attention, mha_fwd):
        for _ in range(3):
            with pytest.raises(DlattnError, match="make_fx records"):
                make_fx(lambda x: run(x, k, v))(q)  # noqa: B023
            run(q, k, v)


def test_modes_see_an_operator() -> None:
    """A TorchDispatchMode sees attention, forward and backward, as one operator each, also of calls
    that look like earlier ones."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, run: Any, types: Any, given: Any = (), named: Any = None
        ) -> Any:
            seen.append(str(run))
            return run(*given, **(named or {}))

    q, k, v = (random(2, 3, 4, 8, seed=seed) for seed in range(3))
    sinks = torch.zeros(3, requires_grad=True)
    wanted = [f"dlattn.attention{direction}.default" for direction in ("", "_backward")]
    for more in ({}, {"sinks": sinks}):
        for _ in range(3):
            scaled_dot_product_attention(q, k, v, **more).sum().backward()
            seen: list[str] = []
            with Mode():
                scaled_dot_product_attention(q, k, v, **more).sum().backward()
            assert [name for name in seen if name.startswith("dlattn")] == wanted


TYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("learns", [False, True])
def test_autocasting_is_seen_between_calls_that_look_alike(learns: bool) -> None:
    """Calls are cast as PyTorch casts its own, whatever the ones before were."""
    single = torch.randn(3, 2, 4, 5, 8).unbind()
    some = [[x.to(dtype).requires_grad_(learns) for x in single] for dtype in TYPES]
    for _ in range(2):
        for types in ((), TYPES[1:2], TYPES[1:], TYPES[2:]):
            with ExitStack() as scopes:
                for dtype in types:
                    scopes.enter_context(torch.autocast("cpu", dtype))
                for x in some:
                    found = scaled_dot_product_attention(*x)
                    assert found.dtype is sdpa(*x).dtype
                    assert found.requires_grad is learns


def test_one_dropout_under_checkpointing_and_compilation() -> None:
    """What is computed again drops what was dropped, and so does a compiled graph."""
    from torch.utils.checkpoint import checkpoint

    x, dout = random(2, 4, 5, 8), random(2, 4, 5, 8, seed=1, grad=False)

    def dropped(x: Any) -> Any:
        return scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    def of(function: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(2)
        out = function(x)
        return [out, *torch.autograd.grad(out, x, dout)]

    torch._dynamo.reset()
    wanted = of(dropped)
    assert_same(of(lambda x: checkpoint(dropped, x, use_reentrant=False)), wanted)
    assert_same(of(torch.compile(dropped, fullgraph=True, backend="aot_eager")), wanted)


def test_what_entries_share_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias, slopes and sinks of all entries are of one batch; with gradients they are not."""
    from dlattn.torch import batching

    def refuse(*_: Any) -> None:
        raise AssertionError

    q = random(3, 2, 5, 4, 8, grad=False)
    bias = random(4, 5, 5, grad=False)
    shared = {"alibi_slopes": torch.linspace(0.1, 0.7, 4), "sinks": torch.linspace(-1, 1, 4)}

    def value(q: Any, bias: Any) -> Any:
        return loss(q, q, q, bias=bias, **shared)

    both = torch.vmap(torch.func.grad(value, argnums=(0, 1)), in_dims=(0, None))
    of_q, of_bias = both(q, bias)
    each = [torch.func.grad(value, argnums=(0, 1))(x, bias) for x in q]
    assert_same([of_q, of_bias], [torch.stack(x) for x in zip(*each, strict=True)])
    monkeypatch.setattr(batching, "_one_by_one", refuse)
    assert_same([torch.vmap(torch.func.grad(value), in_dims=(0, None))(q, bias)], [of_q])
    with pytest.raises(AssertionError):
        both(q, bias)


def test_jacobian() -> None:
    """``torch.func.jacrev`` is that of the computation written out."""
    q = random(1, 2, 3, 4, grad=False)
    found, wanted = (
        torch.func.jacrev(lambda q, by=by: by(q, q, q))(q)
        for by in (scaled_dot_product_attention, by_definition)
    )
    assert_same([found], [wanted])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
def test_compiled(layout: str, dynamic: bool) -> None:
    """Under ``torch.compile`` there is one graph, with the same gradients."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"layout": layout, "causal": True}
    shape: tuple[int, ...] = (2, 5, 4, 8)
    if layout == "thd":
        shape = (9, 4, 8)
        options["cu_seqlens"] = torch.tensor([0, 4, 9], dtype=torch.int32)
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for more in (0, 1) if dynamic and layout != "thd" else (0,):
        sizes = (shape[0] + more, shape[1] + more, *shape[2:])
        q, k, v = (random(*sizes, seed=i) for i in range(3))
        found = torch.autograd.grad(compiled(q, k, v, **options), (q, k, v))
        assert_same(list(found), list(torch.autograd.grad(loss(q, k, v, **options), (q, k, v))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler for C++")
def test_compiled_by_inductor() -> None:
    """With what is before and behind fused, and under autocasting, gradients are the same."""
    torch._dynamo.reset()

    def around(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = scaled_dot_product_attention(x.sin(), x.cos(), 2 * x, is_causal=True)
        assert out.dtype == torch.bfloat16
        return out.float().tanh().sum()

    x = random(2, 4, 5, 8, grad=False).float().requires_grad_()
    found, wanted = (
        torch.autograd.grad(function(x), x)[0]
        for function in (torch.compile(around, fullgraph=True), around)
    )
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_operators_are_well_made() -> None:
    """What ``torch.library.opcheck`` asks of operators."""
    q, k, v = (random(2, 5, 4, 8, seed=i).float().detach().requires_grad_() for i in range(3))
    bias = torch.zeros(4, 5, 5, requires_grad=True)
    options = ("bshd", True, None, None, "bottom_right", None, None, None, None, 0.0, False, False)
    options += ("dlattn", False)
    for more in ((None,) * 9, (bias, None, torch.ones(4), *(None,) * 6)):
        torch.library.opcheck(torch.ops.dlattn.attention.default, (q, k, v, *more, *options))
    given = [x.detach() for x in (q, k, v)]
    out, lse = torch.ops.dlattn.attention(*given, *(None,) * 9, *options)
    for dlse in (None, lse):
        torch.library.opcheck(
            torch.ops.dlattn.attention_backward.default,
            (out, out, lse, dlse, *given, *(None,) * 9, *options, False, False),
        )
    into = torch.empty_like(out)
    torch.library.opcheck(
        torch.ops.dlattn.attention.out, (*given, *(None,) * 9, *options), {"out": into}
    )
    assert torch.equal(torch.ops.dlattn.attention(*given, *(None,) * 9, *options, out=into), lse)
    assert torch.equal(into, out)


BATCHED: dict[str, dict[str, Any]] = {
    "plain": {},
    "another layout": {"layout": "sbhd"},
    "a bias": {"bias": torch.linspace(0, 1, 25, dtype=torch.float64).reshape(5, 5)},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 0.7, 4)},
    "lengths": {"lengths": torch.tensor([5, 2])},
}


@pytest.mark.parametrize("in_memory", ["as rows", "entries last"])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, 4, 2)])
@pytest.mark.parametrize("name", BATCHED)
def test_batched(name: str, in_dims: tuple[int | None, ...], in_memory: str) -> None:
    """``vmap`` of a function, and of its gradient, is the function of each entry."""
    options = BATCHED[name]
    shape = (5, 2, 4, 8) if options.get("layout") == "sbhd" else (2, 5, 4, 8)
    tensors = []
    for i, dim in enumerate(in_dims):
        x = random(3, *shape, seed=i, grad=False)
        if in_memory == "entries last":
            x = x.movedim(0, -1).contiguous().movedim(-1, 0)
        tensors.append(x[0].contiguous() if dim is None else x.movedim(0, dim))

    def value(q: Any, k: Any, v: Any) -> Any:
        return loss(q, k, v, **options)

    for function in (value, torch.func.grad(value, argnums=(0, 1, 2))):
        found = torch.vmap(function, in_dims=in_dims)(*tensors)
        each = [
            function(
                *(
                    x if dim is None else x.select(dim, i).contiguous()
                    for x, dim in zip(tensors, in_dims, strict=True)
                )
            )
            for i in range(3)
        ]
        if function is value:
            found, each = (found,), [(x,) for x in each]
        assert_same(list(found), [torch.stack(x) for x in zip(*each, strict=True)])


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, 4, 2)])
@pytest.mark.parametrize("name", [*BATCHED, "packed"])
def test_batched_without_entries(name: str, in_dims: tuple[int | None, ...]) -> None:
    """Results, and gradients, have the shapes that they have with entries, but for those."""
    options, shape = BATCHED.get(name, {}), (2, 5, 4, 8)
    in_dims = tuple(dim if dim is None else min(dim, 3) for dim in in_dims)
    if name == "packed":
        options, shape = {"layout": "thd", "cu_seqlens": torch.tensor([0, 2, 5]).int()}, (5, 4, 8)
    elif name == "another layout":
        shape = (5, 2, 4, 8)

    def value(q: Any, k: Any, v: Any) -> Any:
        return loss(q, k, v, **options)

    for function in (
        lambda *x: (attention(*x, **options),),
        torch.func.grad(value, argnums=(0, 1, 2)),
    ):
        of_none, of_some = (
            torch.vmap(function, in_dims=in_dims)(
                *(
                    random(*shape, grad=False)
                    if dim is None
                    else random(count, *shape, grad=False).movedim(0, dim)
                    for dim in in_dims
                )
            )
            for count in (0, 3)
        )
        assert [x.shape for x in of_none] == [(0, *x.shape[1:]) for x in of_some]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func.jvp itself
def test_no_second_derivative() -> None:
    """It is refused, and not taken for 0."""
    q = random(1, 5, 2, 8)
    (first,) = torch.autograd.grad(loss(q, q, q), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives alone"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match="first derivatives alone"):
        torch.autograd.gradgradcheck(lambda q: attention(q, q, q), (q,))
    for derivative in (torch.func.hessian, torch.func.jacfwd):
        with pytest.raises(NotImplementedError, match="first derivatives alone"):
            derivative(lambda q: attention(q, q, q).sum())(q.detach())
