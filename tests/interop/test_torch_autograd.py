"""What autograd keeps of ``dlattn.torch`` between the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

from dlattn.errors import InvalidArgumentError  # noqa: E402
from dlattn.torch import attention, scaled_dot_product_attention  # noqa: E402
from tests.torch_checks import assert_same, random  # noqa: E402


def kept() -> dict[str, tuple[dict[str, Any], Any]]:
    """Options, and the tensor among them that is looked at."""
    slopes, lengths = torch.linspace(0.1, 0.7, 4), torch.tensor([2, 3])
    cu, other = (torch.tensor([0, 2, 5], dtype=torch.int32) for _ in range(2))
    return {
        "slopes": ({"alibi_slopes": slopes}, slopes),
        "lengths": ({"lengths": lengths}, lengths),
        "lengths of keys": ({"lengths": (None, lengths)}, lengths),
        "packed": ({"layout": "thd", "cu_seqlens": cu}, cu),
        "packed queries": ({"layout": "thd", "cu_seqlens": (cu, other)}, cu),
        "packed keys": ({"layout": "thd", "cu_seqlens": (other, cu)}, cu),
    }


def attend(x: Any, options: dict[str, Any]) -> Any:
    x = x.flatten(0, 1)[:5] if "layout" in options else x
    return attention(x, x, x, causal=True, **options).sin().sum()


@pytest.mark.parametrize("name", kept())
def test_what_changes_between_the_passes_is_refused(name: str) -> None:
    """In PyTorch's words, as of q, k and v: gradients would be those of another function."""
    x = random(2, 5, 4, 8)
    options, tensor = kept()[name]
    found = attend(x, options)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(found, x)


@pytest.mark.parametrize("name", kept())
def test_what_is_kept_elsewhere(name: str) -> None:
    """Tensors that hooks store, or that are computed twice, give the gradient of finite
    differences."""
    from torch.utils.checkpoint import checkpoint

    x = random(2, 5, 4, 8)
    direction, step = random(2, 5, 4, 8, seed=1, grad=False), 1e-6
    options, _ = kept()[name]
    with torch.no_grad():
        ends = [attend(x + sign * step * direction, options) for sign in (1, -1)]
    wanted = (ends[0] - ends[1]) / (2 * step)
    with torch.autograd.graph.save_on_cpu():
        stored = attend(x, options)
    for found in (stored, checkpoint(attend, x, options, use_reentrant=False)):
        (gradient,) = torch.autograd.grad(found, x)
        torch.testing.assert_close((gradient * direction).sum(), wanted, rtol=1e-6, atol=1e-7)


def test_lengths_of_another_framework() -> None:
    """Arrays are as good as tensors."""
    x = random(2, 5, 4, 8)
    lengths = torch.tensor([2, 3])
    found, wanted = (
        torch.autograd.grad(attend(x, {"lengths": given}), x)
        for given in (lengths.numpy(), lengths)
    )
    assert_same(list(found), list(wanted))


def test_slopes_that_are_learned_are_warned_of() -> None:
    """Slopes have no gradient, which is said where one would be lost, and nowhere else; a bias of
    the same numbers has it."""
    x, slopes = random(2, 5, 4, 8), torch.linspace(0.1, 0.7, 4, requires_grad=True)
    rows = x.transpose(1, 2)
    with pytest.warns(UserWarning, match="alibi_slopes: slopes count as constants") as seen:
        found = [attend(x, {"alibi_slopes": slopes})]
        scaled_dot_product_attention(rows, rows, rows, alibi_slopes=slopes)
        torch.func.grad(lambda it: attend(x, {"alibi_slopes": it}))(slopes.detach())
    assert len(seen) == 3 and {it.filename for it in seen} == {__file__}
    attend(x, {"alibi_slopes": slopes.detach()})
    with torch.no_grad():
        attend(x, {"alibi_slopes": slopes})
    positions = torch.arange(5)
    distance = (positions[:, None] - positions).abs()
    found.append(attend(x, {"bias": -slopes[:, None, None] * distance}))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
    assert torch.autograd.grad(found[1], slopes)[0].abs().min() > 0


def test_arrays_that_are_written_to_before_the_backward() -> None:
    """Gradients are of the numbers that the forward read."""
    x = random(2, 5, 4, 8)
    lengths = np.array([2, 3])
    (wanted,) = torch.autograd.grad(attend(x, {"lengths": lengths}), x)
    loss = attend(x, {"lengths": lengths})
    lengths[:] = 1
    (found,) = torch.autograd.grad(loss, x)
    assert_same([found], [wanted])


@pytest.mark.parametrize("name", ["lengths", "cu_seqlens", "alibi_slopes"])
def test_arrays_under_transforms(name: str) -> None:
    """They are refused by name: transforms and modes see tensors alone."""
    x = random(2, 5, 4, 8, grad=False)
    given = {name: np.ones(4, np.float32)}
    for call in (
        lambda: torch.func.grad(lambda x: attend(x, given))(x),
        lambda: torch.vmap(lambda x: attention(x, x, x, **given))(x[None]),
        lambda: attention(*[torch.empty(2, 5, 4, 8, device="meta")] * 3, **given),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"{name}.*: expected a torch\.Tensor"):
            call()


def in_pytorchs_words(q: Any, k: Any, v: Any, *, bias: Any = None, sinks: Any = None) -> Any:
    return scaled_dot_product_attention(q, k, v, bias, sinks=sinks)


GRADIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 0.7, 4)},
    "a bias": {"bias": random(2, 4, 5, 5)},
    "sinks": {"sinks": torch.linspace(-1, 1, 4, requires_grad=True)},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_many_gradients_of_one_output(name: str, return_lse: bool) -> None:
    """At once, they are those of one after the other, as PyTorch and as its transforms ask."""
    options = GRADIENTS[name]
    inputs = [random(2, 5, 4, 8, seed=i) for i in range(3)]
    learned = [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    found = attention(*inputs, **options, return_lse=return_lse)
    outputs = found if return_lse else (found,)
    many = [torch.stack([random(*x.shape, seed=i, grad=False) for i in range(3)]) for x in outputs]
    many = [x.to(y.dtype) for x, y in zip(many, outputs, strict=True)]
    given = outputs, [*inputs, *learned]
    at_once = torch.autograd.grad(*given, many, is_grads_batched=True, retain_graph=True)
    batched = torch.vmap(lambda *x: torch.autograd.grad(*given, x, retain_graph=True))(*many)
    each = [torch.autograd.grad(*given, [x[i] for x in many], retain_graph=True) for i in range(3)]
    wanted = [torch.stack(x) for x in zip(*each, strict=True)]
    assert_same(list(at_once), wanted)
    assert_same(list(batched), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own imports
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
@pytest.mark.parametrize("function", [attention, in_pytorchs_words])
def test_no_forward_mode(function: Callable[..., Any], name: str) -> None:
    """A tangent is refused where nothing requires a gradient, too, and not lost; beside tensors
    that have one, others are attended to as ever."""
    good = {x: random(1, 4, 4, 8, seed=i, grad=False) for i, x in enumerate("qkv")}
    more = {"bias": torch.zeros(4, 4, dtype=torch.float64), "sinks": torch.zeros(4)}
    wanted = function(**good)
    with forward_ad.dual_level():
        x = {**more, **good}[name]
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert torch.equal(function(**good), wanted)
                with pytest.raises(NotImplementedError, match="first derivatives alone"):
                    function(**{**good, name: dual})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own imports
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
@pytest.mark.parametrize("function", [attention, in_pytorchs_words])
def test_no_forward_mode_compiled(function: Callable[..., Any], name: str, backend: str) -> None:
    """Nor is a tangent lost under torch.compile: not by what was compiled for tensors without one,
    not by what is compiled for it, and not by a function that makes tangents itself."""
    good = {x: random(1, 4, 4, 8, seed=i, grad=False) for i, x in enumerate("qkv")}
    more = {"bias": torch.zeros(4, 4, dtype=torch.float64), "sinks": torch.zeros(4)}
    good[name] = {**more, **good}[name]
    tangent, wanted = torch.ones_like(good[name]), function(**good)

    def calls(x: Any) -> Any:
        return function(**{**good, name: x})

    def pushes(x: Any) -> Any:
        return torch.func.jvp(calls, (x,), (tangent,))

    for warm in (True, False):
        torch._dynamo.reset()
        compiled = torch.compile(calls, backend=backend)
        if warm:
            assert torch.equal(compiled(good[name]), wanted)
        with forward_ad.dual_level():
            with pytest.raises(NotImplementedError, match="first derivatives alone"):
                compiled(forward_ad.make_dual(good[name], tangent))
            assert torch.equal(compiled(good[name]), wanted)
    with pytest.raises(Exception, match="first derivatives alone"):
        torch.compile(pushes, backend=backend, fullgraph=True)(good[name])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own imports
@pytest.mark.parametrize("operator", ["attention", "attention.out", "attention_backward"])
def test_operators_lose_no_tangent(operator: str) -> None:
    """Of a graph that was exported, the operators themselves refuse what has a tangent."""
    q = random(1, 4, 4, 8, grad=False)
    given = [q, q, q, *[None] * 9, "bshd", False, None, None, "bottom_right", None, None]
    given += [None, None, 0.0, False, False, "dlattn", False]
    out, lse = torch.ops.dlattn.attention(*given)
    named = {"out": torch.empty_like(q)} if operator == "attention.out" else {}
    if operator == "attention_backward":
        given = [q, out, lse, None, *given, False, False]
    packet, _, overload = operator.partition(".")
    call = getattr(getattr(torch.ops.dlattn, packet), overload or "default")
    call(*given, **named)
    with forward_ad.dual_level():
        given[0] = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="first derivatives alone"):
            call(*given, **named)
