"""``dlattn.torch`` on the CPU: PyTorch's own attention is the computation to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import dlattn  # noqa: E402
from dlattn.errors import InvalidArgumentError  # noqa: E402
from dlattn.torch import attention, scaled_dot_product_attention  # noqa: E402
from tests.torch_checks import (  # noqa: E402
    assert_same,
    by_definition,
    gradients,
    random,
    sdpa,
)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_is_pytorchs(data: st.DataObject) -> None:
    """The output and all gradients are those of PyTorch's function, for its arguments."""
    draw = data.draw
    lead = draw(st.sampled_from([(), (2,), (3, 2)]))
    dims = draw(st.sampled_from([2, 3, 4])) if not lead else 4
    heads, divisor = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3)]))
    rows, keys, columns, columns_v = (draw(st.integers(1, 9)) for _ in range(4))
    front_q = {2: (), 3: (heads,), 4: (*(lead or (1,)), heads)}[dims]
    shared = dims == 4 and draw(st.booleans())
    front_k = (*front_q[:-1], heads // divisor) if shared else front_q
    shapes = (*front_q, rows, columns), (*front_k, keys, columns), (*front_k, keys, columns_v)
    q, k, v = (random(*shape, seed=i) for i, shape in enumerate(shapes))
    options: dict[str, Any] = {"enable_gqa": shared}
    options["scale"] = draw(st.sampled_from([None, 0.3, -1.0]))
    kind = draw(st.sampled_from(["none", "causal", "floats", "booleans"]))
    options["is_causal"] = kind == "causal"
    mask = None
    if kind in ("floats", "booleans"):
        whole = (*front_q, rows, keys)
        some = [draw(st.sampled_from([1, n])) for n in whole]
        some = some[draw(st.integers(0, len(whole) - 2)) :]
        mask = random(*some, seed=9, grad=kind == "floats")
        if kind == "booleans":
            mask = mask > -0.5
            mask[..., 0] = True  # where nothing is attended, PyTorch's versions differ
    inputs = (q, k, v) if mask is None else (q, k, v, mask)
    assert_same(
        gradients(lambda *x: scaled_dot_product_attention(*x, **options), inputs),
        gradients(lambda *x: by_definition(*x, **options), inputs),
    )


def test_a_call_is_not_taken_for_the_last_one() -> None:
    """Between calls that look alike, modes, types, heads and what gradients repeat are seen."""
    x = tuple(random(2, 4, 5, 8, seed=i) for i in range(3))
    alike = [t.detach().clone().requires_grad_() for t in x]
    first = gradients(scaled_dot_product_attention, x)
    single = [t.detach().float() for t in x]
    assert scaled_dot_product_attention(*single).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert scaled_dot_product_attention(*single).dtype is torch.bfloat16
        mixed = single[0].bfloat16(), *single[1:]
        assert scaled_dot_product_attention(*mixed).dtype is torch.bfloat16
    assert scaled_dot_product_attention(*alike, scale=1).ne(first[0]).any()
    with torch.no_grad():
        assert not scaled_dot_product_attention(*alike).requires_grad
    with pytest.raises(InvalidArgumentError, match="expected the 4 heads of query"):
        scaled_dot_product_attention(alike[0], *(t[:, :2] for t in alike[1:]))
    by_entry = torch.vmap(scaled_dot_product_attention)(*(t[None] for t in alike))
    assert_same([by_entry[0]], first[:1])
    moved = [t.detach().transpose(2, 3).contiguous().transpose(2, 3) for t in x]
    assert_same([scaled_dot_product_attention(*moved)], first[:1])
    out = scaled_dot_product_attention(*alike)
    repeated = torch.autograd.grad(out.sum(), alike, retain_graph=True)
    assert_same([*repeated], [*torch.autograd.grad(out, alike, torch.ones_like(out))])
    assert_same(gradients(scaled_dot_product_attention, (*alike,)), first)


BIAS = torch.linspace(-1, 1, 5 * 7, dtype=torch.float64).reshape(5, 7)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "a window": {"window": (2, 1)},
    "top left": {"causal": True, "alignment": "top_left"},
    "a soft cap": {"softcap": 2.0, "scale": 1.5},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 0.7, 4)},
    "lengths": {"lengths": (torch.tensor([5, 2]), torch.tensor([3, 7]))},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "a bias": {"bias": BIAS},
}


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_finite_differences(name: str, layout: str) -> None:
    """Of every option, in every layout."""
    axes = [("bshd".index(letter)) for letter in layout]
    q, k, v = (
        random(2, rows, heads, 8).detach().permute(axes).contiguous().requires_grad_()
        for rows, heads in ((5, 4), (7, 2), (7, 1))
    )
    options = dict(OPTIONS[name])
    if "bias" not in options:
        torch.autograd.gradcheck(lambda *x: attention(*x, layout=layout, **options), (q, k, v))
        return
    bias = options.pop("bias").clone().requires_grad_()
    torch.autograd.gradcheck(
        lambda q, k, v, bias: attention(q, k, v, layout=layout, bias=bias, **options),
        (q, k, v, bias),
    )


def test_sinks_have_gradients() -> None:
    """Those of a key of that score without a value."""
    q, k, v = random(2, 5, 4, 8), random(2, 7, 4, 8), random(2, 7, 4, 8)
    sinks = torch.linspace(-1, 1, 4, requires_grad=True)

    def written_out(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        scores = torch.einsum("bshd,bthd->bhst", q, k) * 8**-0.5
        column = sinks.double()[None, :, None, None].expand(2, 4, 5, 1)
        p = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhst,bthd->bshd", p, v)

    inputs = (q, k, v, sinks)
    found = gradients(lambda q, k, v, sinks: attention(q, k, v, sinks=sinks), inputs)
    for one, other in zip(found, gradients(written_out, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_packed_sequences() -> None:
    """Packed, outputs and gradients are those of each sequence; rows of none are 0."""
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    q, k, v = (random(10, 2, 8, seed=i) for i in range(3))
    found = gradients(
        lambda q, k, v: attention(q, k, v, layout="thd", cu_seqlens=cu, causal=True), (q, k, v)
    )

    def alone(q: Any, k: Any, v: Any) -> Any:
        parts = [
            attention(*(x[None, a:b] for x in (q, k, v)), causal=True)[0]
            for a, b in ((0, 3), (3, 8))
        ]
        return torch.cat([*parts, torch.zeros(2, 2, 8, dtype=torch.float64)])

    assert_same(found, gradients(alone, (q, k, v)))


def test_nested() -> None:
    """Nested tensors give nested ones, and gradients."""
    parts = [random(n, 2, 8, grad=False) for n in (3, 6)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    found, lse = scaled_dot_product_attention(
        *(x.transpose(1, 2),) * 3, is_causal=True, return_lse=True
    )
    assert found.is_nested and lse.shape == (2, 9)
    found.transpose(1, 2).values().square().sum().backward()
    for part, out, grad in zip(parts, found.transpose(1, 2).unbind(), x.grad.unbind(), strict=True):
        alone = part[None].clone().requires_grad_()
        own = attention(alone, alone, alone, causal=True)
        own.square().sum().backward()
        assert_same([out[None], grad[None]], [own, alone.grad])
    with pytest.raises(
        InvalidArgumentError, match="attn_mask, lengths and block_table: expected None"
    ):
        scaled_dot_product_attention(*(x.transpose(1, 2),) * 3, attn_mask=torch.ones(1))


def test_one_tensor_of_lengths_is_of_queries_and_keys() -> None:
    """Of as many of both; else it is refused, as by ``dlattn.attention``."""
    q, k = random(2, 5, 4, 8), random(2, 7, 4, 8)
    lengths, cu = torch.tensor([5, 2]), torch.tensor([0, 5], dtype=torch.int32)
    assert attention(q, q, q, lengths=lengths)[1, 2:].eq(0).all()
    with pytest.raises(InvalidArgumentError, match="lengths: one tensor is of q, k and v alike"):
        attention(q, k, k, lengths=lengths)
    with pytest.raises(InvalidArgumentError, match="lengths: one tensor is of q, k and v alike"):
        torch.compile(attention, backend="aot_eager")(q, k, k, lengths=lengths)
    with pytest.raises(InvalidArgumentError, match="cu_seqlens: one tensor is of q, k and v alike"):
        attention(q[0], k[0], k[0], layout="thd", cu_seqlens=cu)


@pytest.mark.parametrize("compiled", [False, True])
def test_keys_in_pages(compiled: bool) -> None:
    """Keys and values that a table finds are as good as those in one piece."""
    q, k, v = (random(*shape, grad=False) for shape in ((2, 4, 3, 8), (9, 2, 4, 8), (9, 2, 4, 6)))
    table = torch.tensor([[3, 0, 8], [5, 2, -1]], dtype=torch.int32)
    lengths = torch.tensor([10, 5], dtype=torch.int32)

    def paged(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(
            q, k, v, block_table=table, lengths=(None, lengths), is_causal=True,
            alignment="bottom_right", enable_gqa=True,
        )  # fmt: skip

    run = torch.compile(paged, fullgraph=True, backend="aot_eager") if compiled else paged
    found = run(q, k, v)
    for b, n in enumerate(lengths):
        whole = (x[table[b].clamp(0)].transpose(0, 1).flatten(1, 2)[None, :, :n] for x in (k, v))
        keep = torch.ones(3, int(n), dtype=torch.bool).tril(int(n) - 3)
        wanted = sdpa(q[b : b + 1], *whole, attn_mask=keep, enable_gqa=True)
        assert_same([found[b : b + 1]], [wanted])


def test_nested_with_gaps() -> None:
    """Rows between the sequences of a nested tensor belong to none."""
    buffer = random(2, 8, 4, 8)
    starts, lengths = torch.tensor([0, 1]), torch.tensor([3, 5])
    x = torch.nested.narrow(buffer, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    out = scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)
    dout = random(16, 4, 8, grad=False)
    (found,) = torch.autograd.grad(out.values(), buffer, dout)
    wanted = torch.zeros_like(buffer)
    for i, (a, b) in enumerate(((0, 3), (1, 6))):
        part = buffer[i : i + 1, a:b].detach().requires_grad_()
        alone = attention(part, part, part, causal=True)
        at = int(out.offsets()[i])
        (wanted[i, a:b],) = torch.autograd.grad(alone, part, dout[None, at : at + b - a])
        assert_same([out.values()[at : at + b - a]], [alone[0]])
    assert_same([found], [wanted])


def test_nested_refusals() -> None:
    """Nested tensors that are not what the function takes are refused by name."""
    parts = [random(n, 2, 8, grad=False) for n in (3, 6)]
    x, other = (
        torch.nested.nested_tensor(some, layout=torch.jagged).transpose(1, 2)
        for some in (parts, parts[::-1])
    )
    dense = random(2, 2, 6, 8)
    with pytest.raises(
        InvalidArgumentError, match="expected nested tensors of layout torch.jagged"
    ):
        scaled_dot_product_attention(dense, x, x)
    with pytest.raises(InvalidArgumentError, match=r"expected \(B, H, jagged, E\), as transpose"):
        scaled_dot_product_attention(*(x.transpose(1, 2),) * 3)
    with pytest.raises(InvalidArgumentError, match="value: expected the lengths of key"):
        scaled_dot_product_attention(x, x, other)
    with pytest.raises(InvalidArgumentError, match="q: expected no nested tensor"):
        attention(x, x, x)


def test_any_strides() -> None:
    """Tensors whose last dimension has gaps, or repeats a number, are as good as any other."""
    q, k = random(2, 4, 8, 5), random(2, 4, 7, 1)
    v = random(2, 7, 4, 8)

    def run(function: Callable[..., Any]) -> list[Any]:
        return gradients(
            lambda q, k, v: function(q.mT, k.expand(2, 4, 7, 8), v.transpose(1, 2)), (q, k, v)
        )

    assert_same(run(scaled_dot_product_attention), run(by_definition))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_results_lie_in_memory_as_their_inputs_do(order: tuple[int, ...], compiled: bool) -> None:
    """Results have the strides that ``torch.empty_like`` would give them, so that heads that were
    moved by a view are moved back by one."""
    sizes, back = (2, 4, 6, 8), sorted(range(4), key=order.__getitem__)
    q, k, v = (
        torch.randn([sizes[i] for i in order]).permute(back).requires_grad_() for _ in range(3)
    )
    function = scaled_dot_product_attention
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    out = function(q, k, v)
    assert out.stride() == torch.empty_like(q).stride()
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(x.stride() == torch.empty_like(q).stride() for x in gradients)


def test_gradients_of_sums() -> None:
    """A gradient that repeats one number, with strides of 0, is a gradient as any other."""
    q = random(2, 5, 4, 8)
    (found,) = torch.autograd.grad(attention(q, q, q).sum(), q)
    out = attention(q, q, q)
    (wanted,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert_same([found], [wanted])


def test_dropout_is_the_same_in_both_passes() -> None:
    """The output is linear in v, so that its gradient tells the mask."""
    q, k, v = (random(1, 30, 2, 8, seed=i) for i in range(3))
    torch.manual_seed(3)
    out = attention(q, k, v, dropout_p=0.4)
    dout = random(*out.shape, seed=5, grad=False)
    (dv,) = torch.autograd.grad(out, v, dout)
    torch.testing.assert_close((dv * v).sum(), (dout * out).sum())
    torch.manual_seed(3)
    assert torch.equal(attention(q, k, v, dropout_p=0.4), out)
    assert not torch.equal(attention(q, k, v, dropout_p=0.4), out)
    with pytest.raises(InvalidArgumentError, match="dropout_p: expected at least 0 and at most 1"):
        attention(q, k, v, dropout_p=1.5)


def test_autocast() -> None:
    """Inputs are cast as PyTorch's own attention casts them."""
    x = torch.randn(2, 4, 5, 8, requires_grad=True)
    mask = torch.zeros(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        found = scaled_dot_product_attention(x, x, x, attn_mask=mask)
        assert found.dtype == sdpa(x, x, x).dtype == torch.bfloat16
    found.sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("name", OPTIONS)
def test_the_log_sum_exp_is_differentiable(name: str) -> None:
    """Alone, and beside the output."""
    q, k, v = (random(2, rows, 4, 8, seed=rows) for rows in (5, 7, 7))
    weight = torch.linspace(-1, 1, 2 * 4 * 5, dtype=torch.float64).reshape(2, 4, 5)

    def weighed(*inputs: Any) -> Any:
        out, lse = attention(*inputs, **OPTIONS[name], return_lse=True)
        return (weight * lse.where(lse.isfinite(), 0)).sum() + out.sin().sum()

    torch.autograd.gradcheck(weighed, (q, k, v))
    torch.autograd.gradcheck(
        lambda *inputs: attention(*inputs, **OPTIONS[name], return_lse=True)[1][:, :, :2], (q, k, v)
    )


def test_without_gradients() -> None:
    """What needs no gradient is what ``dlattn.attention`` gives."""
    q, k, v = (random(1, 5, 2, 8, seed=i, grad=False) for i in range(3))
    assert torch.equal(attention(q, k, v), dlattn.attention(q, k, v))
    with torch.no_grad():
        assert attention(q.requires_grad_(), k, v).grad_fn is None
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v), dlattn.attention(q, k, v))


def test_refusals() -> None:
    """What is no tensor of torch's, or no window, is refused by name."""
    q = random(1, 5, 2, 8)
    with pytest.raises(InvalidArgumentError, match="q: expected a torch.Tensor, got a numpy.nd"):
        attention(*(q.detach().numpy(),) * 3)
    for window in (3, (1, 2, 3)):
        with pytest.raises(InvalidArgumentError, match="window: expected a pair"):
            attention(q, q, q, window=window)


BAD_SHAPES = {
    "one dimension": ((8,), (8,), {}, "expected two dimensions"),
    "another batch": ((2, 4, 5, 8), (3, 4, 5, 8), {}, "dimensions in front that broadcast"),
    "a table and three dimensions": (
        (4, 5, 8),
        (4, 4, 8),
        {"block_table": torch.zeros(4, 1, dtype=torch.int32)},
        "with a block_table four",
    ),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_shapes_are_refused(name: str) -> None:
    """Shapes that do not go together are named."""
    of_q, of_k, options, message = BAD_SHAPES[name]
    with pytest.raises(InvalidArgumentError, match=message):
        scaled_dot_product_attention(random(*of_q), random(*of_k), random(*of_k), **options)


def test_heads_are_shared_only_if_that_is_said() -> None:
    """As in PyTorch."""
    q, k = random(1, 4, 5, 8), random(1, 2, 5, 8)
    with pytest.raises(InvalidArgumentError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k, k)
