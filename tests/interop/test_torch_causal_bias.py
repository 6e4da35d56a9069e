"""PyTorch's causal biases, whose memory is never written: what they stand for is what runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import dlattn  # noqa: E402
from dlattn.errors import InvalidArgumentError, InvalidVariantPackError  # noqa: E402
from dlattn.runtime.tensors import view  # noqa: E402
from dlattn.torch import attention, replace, replace_sdpa, scaled_dot_product_attention  # noqa: E402
from tests.torch_checks import assert_same, gradients, random, sdpa  # noqa: E402

ROWS, KEYS = 5, 9
BIASES = [(causal_upper_left, 0), (causal_lower_right, KEYS - ROWS)]


def inputs() -> tuple[Any, Any, Any]:
    return random(2, 3, ROWS, 8), random(2, 3, KEYS, 8, seed=1), random(2, 3, KEYS, 8, seed=2)


def by_mask(diagonal: int) -> list[Any]:
    """The output and the gradients, of PyTorch's own function and a mask that is written."""
    mask = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(diagonal)
    return gradients(lambda *x: sdpa(*x, attn_mask=mask), inputs())


def replaced(*given: Any, **named: Any) -> Any:
    """What PyTorch's name stands for when it is called."""
    return torch.nn.functional.scaled_dot_product_attention(*given, **named)


@pytest.mark.parametrize(("make", "diagonal"), BIASES)
def test_is_the_diagonal_that_it_stands_for(make: Any, diagonal: int) -> None:
    """By position and by name, of dlattn's function and in the place of PyTorch's."""
    bias, wanted = make(ROWS, KEYS), by_mask(diagonal)
    with replace_sdpa(fall_back=False):
        for function in (scaled_dot_product_attention, replaced):
            assert_same(gradients(lambda *x, f=function: f(*x, bias), inputs()), wanted)
            assert_same(gradients(lambda *x, f=function: f(*x, attn_mask=bias), inputs()), wanted)


@pytest.mark.parametrize(("make", "diagonal"), BIASES)
@pytest.mark.parametrize("function", [scaled_dot_product_attention, replaced])
def test_compiled(function: Callable[..., Any], make: Any, diagonal: int) -> None:
    """Given to a compiled function, it leaves one graph; made inside, the numbers are right."""
    bias, (wanted, *_) = make(ROWS, KEYS), by_mask(diagonal)
    with replace_sdpa():
        torch._dynamo.reset()
        given = torch.compile(lambda *x: function(*x), fullgraph=True, backend="aot_eager")
        made = torch.compile(lambda *x: function(*x, make(ROWS, KEYS)), backend="aot_eager")
        assert_same([given(*inputs(), bias), made(*inputs())], [wanted, wanted])


@pytest.mark.parametrize(("make", "diagonal"), BIASES)
def test_what_falls_back_is_pytorchs(
    make: Any, diagonal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What dlattn refuses, PyTorch runs with the mask that is meant, not with its memory."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise InvalidArgumentError("for the sake of the test")

    wanted = by_mask(diagonal)[0].detach()
    monkeypatch.setattr(replace, "scaled_dot_product_attention", refuse)
    with replace_sdpa(), torch.no_grad():
        assert_same([replaced(*inputs(), make(ROWS, KEYS))], [wanted])


def test_sizes_and_second_diagonals_are_refused() -> None:
    """A bias of other sizes, or beside words that are aligned to another corner; not of a square,
    where both corners are one."""
    q, k, v = inputs()
    with pytest.raises(InvalidArgumentError, match=r"attn_mask: expected .* \(5, 9\), got"):
        scaled_dot_product_attention(q, k, v, causal_upper_left(4, KEYS))
    bias = causal_lower_right(ROWS, KEYS)
    for more in ({"is_causal": True}, {"window": (2, None)}):
        with pytest.raises(InvalidArgumentError, match="attn_mask: .*alignment='bottom_right'"):
            scaled_dot_product_attention(q, k, v, bias, **more)
        options = {**more, "is_causal": True, "alignment": "bottom_right"}
        assert_same(
            [scaled_dot_product_attention(q, k, v, bias, **more, alignment="bottom_right")],
            [scaled_dot_product_attention(q, k, v, **options)],
        )
    square = scaled_dot_product_attention(q, q, q, causal_lower_right(ROWS, ROWS), is_causal=True)
    assert_same([square], [sdpa(q, q, q, is_causal=True)])


def test_no_function_reads_its_memory() -> None:
    """Where there are words for it, it is refused by name, also where PyTorch compiles."""
    bias, q = causal_lower_right(ROWS, ROWS), random(2, ROWS, 3, 8, grad=False)
    for function in (dlattn.attention, attention):
        with pytest.raises(InvalidArgumentError, match="bias: .*memory is never written"):
            function(q, q, q, bias=bias)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="memory is never written"):
        torch.compile(attention, backend="eager")(q, q, q, bias=bias)
    with pytest.raises(InvalidVariantPackError, match="memory is never written"):
        view(bias)


class Handled(torch.Tensor):
    """A class that has attention of its own."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        if function is sdpa:
            return "its own"
        return super().__torch_function__(function, types, given, named or {})


class Plain(torch.Tensor):
    """A class without a word about attention."""


def test_classes_with_attention_of_their_own() -> None:
    """In the place of PyTorch's function, theirs is asked, wherever such a tensor is; a class that
    says nothing is dlattn's."""
    q, k, v = (x.detach() for x in inputs())
    with replace_sdpa():
        for at in range(3):
            given = [x.as_subclass(Handled) if n == at else x for n, x in enumerate((q, k, v))]
            assert replaced(*given) == "its own"
        assert replaced(q, k, value=v.as_subclass(Handled)) == "its own"
    with replace_sdpa(fall_back=False):
        found = replaced(q.as_subclass(Plain), k, v, is_causal=True)
    assert_same([found.as_subclass(torch.Tensor)], [sdpa(q, k, v, is_causal=True)])
