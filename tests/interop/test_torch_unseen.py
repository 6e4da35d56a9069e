"""What autograd does not see: memory that is written to, and inputs that get no gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn  # noqa: E402
from dlattn import flash  # noqa: E402
from dlattn.errors import InvalidArgumentError  # noqa: E402
from dlattn.torch import attention, scaled_dot_product_attention  # noqa: E402
from dlattn.torch.arguments import options_of  # noqa: E402

SHAPE = 1, 4, 2, 16
LSE = 1, 2, 4


def random(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


Q, K, V = (random(*SHAPE, seed=seed) for seed in range(3))
NARROW = [x[..., :13] for x in (Q, K, V)]
OUT, OUT_LSE = dlattn.attention(Q, K, V, return_lse=True)


def by_operator(out: Any) -> None:
    options = options_of("bshd", False, None, "bottom_right", None, None, None, 0.0)
    torch.ops.dlattn.attention.out(Q, K, V, *[None] * 9, *options, False, out=out)


def declared() -> Callable[[Any], None]:
    """A built graph, as a function of the memory for its output."""
    half, types = dlattn.data_type.HALF, dlattn.data_type.FLOAT
    graph = dlattn.pygraph(io_data_type=half, intermediate_data_type=types, compute_data_type=types)
    tensors = [graph.tensor_like(x) for x in (Q, K, V)]
    o, _ = graph.sdpa(*tensors, is_inference=True, attn_scale=0.25)
    o.set_output(True).set_dim(list(SHAPE)).set_stride(list(Q.stride()))
    graph.build()
    pack = dict(zip(tensors, (Q, K, V), strict=True))
    return lambda out: graph.execute({**pack, o: out}, 0)


def gradient(name: str) -> Callable[[Any], Any]:
    return lambda out: dlattn.attention_backward(OUT, Q, K, V, OUT, OUT_LSE, **{name: out})


def cache(at: int) -> Callable[[Any], Any]:
    def append(memory: Any) -> None:
        caches = [torch.zeros(SHAPE).half() for _ in range(2)]
        caches[at] = memory
        flash.flash_attn_with_kvcache(Q, *caches, K, V, cache_seqlens=0)

    return append


WRITERS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "attention": (lambda out: dlattn.attention(Q, K, V, out=out), SHAPE),
    "mha_fwd": (lambda out: flash.mha_fwd(Q, K, V, out_=out), SHAPE),
    "padded": (lambda out: flash.mha_fwd(*NARROW, out_=out), (*SHAPE[:3], 13)),
    "merge_states": (
        lambda out: dlattn.merge_states(
            OUT, OUT_LSE, OUT, OUT_LSE, out=(out, torch.empty(LSE))
        ),
        SHAPE,
    ),
    "k_cache": (cache(0), SHAPE),
    "v_cache": (cache(1), SHAPE),
    "operator": (by_operator, SHAPE),
    **{name: (gradient(name), SHAPE) for name in ("dq", "dk", "dv")},
}  # fmt: skip


def refuses_the_gradient(write: Callable[[Any], Any], memory: Any) -> None:
    """A product that has saved the memory, before it is written to, has no gradient any more."""
    weights = torch.ones(memory.shape, requires_grad=True)
    loss = (weights * memory).sum()
    write(memory)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_counts_as_such(name: str) -> None:
    """In the first call of a kind, and in those that find it prepared."""
    write, shape = WRITERS[name]
    for seed in range(3):
        refuses_the_gradient(write, random(*shape, seed=seed))


def test_what_graphs_write_counts_as_such() -> None:
    """In calls that are checked, and in those that are known."""
    write = declared()
    for seed in range(4):
        refuses_the_gradient(write, random(*SHAPE, seed=seed))


def test_what_is_read_does_not_count() -> None:
    """Inputs, and caches to which nothing is appended, stay as they are to autograd."""
    inputs = [x.clone() for x in (Q, K, V)]
    for _ in range(2):
        dlattn.attention(*inputs, out=torch.empty_like(Q))
        flash.flash_attn_with_kvcache(*inputs, cache_seqlens=3)
    assert [x._version for x in inputs] == [0, 0, 0]


def test_tensors_of_inference_are_written() -> None:
    """They have no versions; others have theirs in inference mode, too."""
    plain = torch.empty_like(Q)
    with torch.inference_mode():
        out = torch.empty_like(Q)
        for memory in (out, plain):
            dlattn.attention(Q, K, V, out=memory)
    dlattn.attention(Q, K, V, out=out)
    assert plain._version == 1
    torch.testing.assert_close(out, OUT, rtol=0, atol=0)


def test_what_requires_a_gradient_is_refused_as_memory() -> None:
    """While grad mode is on, as by PyTorch."""
    q = random(1, 5, 2, 16)
    leaf = torch.empty(1, 5, 2, 16, dtype=torch.half, requires_grad=True)
    for write in (
        lambda out: dlattn.attention(q, K, V, out=out),
        lambda out: flash.mha_fwd(q, K, V, out_=out),
    ):
        with pytest.raises(InvalidArgumentError, match="out_?: .* requires a gradient"):
            write(leaf)
        with torch.no_grad():
            write(leaf)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_the_operator_into_memory_loses_no_gradient(name: str, backend: str | None) -> None:
    """It has none to give, so that it refuses what requires one while grad mode is on."""
    given = {"q": Q, "k": K, "v": V, "bias": torch.zeros(4, 4), "sinks": torch.zeros(2)}
    given[name] = given[name].clone().requires_grad_()
    options = options_of("bshd", False, None, "bottom_right", None, None, None, 0.0)

    def write(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        out = torch.empty_like(q)
        more = bias, None, sinks, *[None] * 6
        torch.ops.dlattn.attention.out(q, k, v, *more, *options, False, out=out)
        return out

    call = torch.compile(write, backend=backend, fullgraph=True) if backend else write
    with pytest.raises(Exception, match="call torch.ops.dlattn.attention, or"):
        call(*given.values())
    with torch.no_grad():
        found = call(*given.values())
    wanted = dlattn.attention(Q, K, V, bias=torch.zeros(4, 4), sinks=torch.zeros(2))
    assert torch.equal(found, wanted)


#: Of a size for each, because a kind of call warns once.
DROPPING: dict[str, Callable[[Any], Any]] = {
    "attention": lambda q: dlattn.attention(q, K, V),
    "mha_fwd": lambda q: flash.mha_fwd(q, K, V),
    "kvcache": lambda q: flash.flash_attn_with_kvcache(q, K, V, cache_seqlens=2),
    "merge_states": lambda q: dlattn.merge_states(
        q, torch.zeros(1, 2, q.shape[1]), q * 1, torch.zeros(1, 2, q.shape[1])
    ),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropped_gradients_are_said_once(name: str) -> None:
    """Where the user's program calls; not without grad mode, and not of what needs none."""
    call = DROPPING[name]
    for rows, mode, needs in ((8, False, True), (9, True, False)):
        with torch.set_grad_enabled(mode):
            call(random(1, rows, 2, 16).requires_grad_(needs))
    q = random(1, 10, 2, 16).requires_grad_()
    with pytest.warns(UserWarning, match=r"call dlattn\.torch\.attention to learn") as said:
        call(q)
    assert [it.filename for it in said] == [__file__]
    call(q)


def test_graphs_say_it_too() -> None:
    """Also where inputs of calls before needed no gradient."""
    q, k, v = (x.transpose(1, 2).clone().requires_grad_() for x in (Q, K, V))
    for stats in (False, True):
        with dlattn.Graph() as graph:
            o, lse = graph.sdpa(q=q, k=k, v=v, generate_stats=stats, name="sdpa")
            o.set_output(True).set_name("o")
            if stats:
                lse.set_output(True).set_name("stats")

        def call(x: Any, graph: Any = graph) -> None:
            graph({"sdpa::q": x, "sdpa::k": k.detach(), "sdpa::v": v.detach()})

        for _ in range(3):
            call(q.detach())
        if stats:  # which are for a backward of the caller's
            call(q)
            continue
        with pytest.warns(UserWarning, match="gets none from here"):
            call(q)
        call(q)


def test_functions_with_gradients_say_nothing() -> None:
    """None of the ways through ``dlattn.torch``."""

    def fresh(rows: int) -> Any:
        return random(1, rows, 2, 16).requires_grad_()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows, options in ((11, {}), (12, {"sinks": torch.zeros(2)}), (13, {"dropout_p": 0.5})):
            attention(fresh(rows), K, V, **options).sum().backward()
        q, *kv = (x.transpose(1, 2) for x in (fresh(14), K, V))
        scaled_dot_product_attention(q, *kv, torch.ones(14, 4).bool()).sum().backward()
        torch.func.grad(lambda x: attention(x, K, V).sum())(random(1, 15, 2, 16))
        options = options_of("bshd", False, None, "bottom_right", None, None, None, 0.0)
        out, _ = torch.ops.dlattn.attention(fresh(16), K, V, *[None] * 9, *options, False)
        out.sum().backward()
