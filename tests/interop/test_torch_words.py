"""Errors of ``scaled_dot_product_attention`` name the arguments that it has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError  # noqa: E402
from dlattn.torch import attention, scaled_dot_product_attention  # noqa: E402


def x(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.ones(*shape).to(dtype)


def learned(given: Any) -> Any:
    return given.requires_grad_()


Q = x(2, 4, 5, 8)
PAGES = {"lengths": (None, torch.tensor([1, 2])), "block_table": torch.zeros(2, 1).int()}

#: Arguments, and what is said of them.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "mask's shape": (lambda: {"attn_mask": x(3, 5)}, "attn_mask: expected a shape that"),
    "mask's type": (lambda: {"attn_mask": x(5, 5).int()}, "attn_mask: expected elements of"),
    "mask of NumPy": (lambda: {"attn_mask": np.ones((5, 5))}, "attn_mask: expected a torch.Tensor"),
    "mask of NumPy, of more dimensions": (
        lambda: {"query": x(1, 2, 4, 5, 8), "attn_mask": np.ones((5, 5))},
        "attn_mask: expected a torch.Tensor",
    ),
    "mask that learns": (
        lambda: {"attn_mask": learned(x(3, 5))}, "attn_mask: expected a shape that",
    ),
    "type": (lambda: {"query": Q.int(), "key": Q.int(), "value": Q.int()}, "query: expected ele"),
    "types": (lambda: {"key": Q.half()}, "key: expected elements of FLOAT, as query has"),
    "types, with gradients": (
        lambda: {"query": learned(x(2, 4, 5, 8)), "value": Q.half()},
        "value: expected elements of FLOAT, as query has",
    ),
    "columns": (lambda: {"key": x(2, 4, 5, 9)}, "key: expected shape .* as of query, got"),
    "rows": (lambda: {"value": x(2, 4, 6, 8)}, "value: expected shape .* as of key, got"),
    "no columns": (lambda: {"value": x(2, 4, 5, 0)}, "value: expected one column or more"),
    "heads": (
        lambda: {"key": x(2, 3, 5, 8), "value": x(2, 3, 5, 8), "enable_gqa": True},
        "key: expected a number of heads that divides the 4 of query, got 3",
    ),
    "memory": (lambda: {"value": Q.to("meta")}, "value: .* has no memory"),
    "three dimensions": (
        lambda: {"query": x(4, 5, 8), "key": x(4, 5, 9), "value": x(4, 5, 8)},
        "key: expected shape .* as of query",
    ),
    "lengths": (lambda: {"lengths": (torch.ones(3).int(), None)}, "lengths of query: expected"),
    "lengths of all": (
        lambda: {"key": x(2, 4, 6, 8), "value": x(2, 4, 6, 8), "lengths": torch.ones(2).int()},
        "lengths: one tensor is of query, key and value alike, but query has 5 rows and key 6",
    ),
    "pages": (
        lambda: {"key": x(1, 4, 3, 8), "value": x(1, 4, 3, 8), **PAGES}, "key has pages of 3 rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_arguments_have_their_names(name: str) -> None:
    """What is wrong with an argument is said of the name that it has here; and nothing of names
    that it has elsewhere."""
    make, said = WRONG[name]
    given = {"query": Q, "key": Q, "value": Q, **make()}
    with pytest.raises((InvalidArgumentError, cudnnGraphNotSupportedError), match=said) as caught:
        scaled_dot_product_attention(**given)
    words = str(caught.value).split("; convert it")[0]
    assert not re.search(r"\b(q|k|v|bias)\b", re.sub(r"\([^()]*\)", "", words)), words


def test_nested_tensors_have_their_names() -> None:
    """So are the lengths of nested tensors, of which there are other numbers."""
    two, three = (
        torch.nested.nested_tensor([x(3, 4, 8)] * count, layout=torch.jagged).transpose(1, 2)
        for count in (2, 3)
    )
    with pytest.raises(InvalidArgumentError, match="offsets of key and value: expected shape"):
        scaled_dot_product_attention(two, three, three)
    with pytest.raises(InvalidArgumentError, match="key: expected elements of HALF, as query has"):
        scaled_dot_product_attention(two.half(), two, two)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own imports
@pytest.mark.parametrize("name", ["types", "columns", "heads", "mask's shape", "lengths of all"])
def test_compiled_calls_have_their_names(name: str) -> None:
    """So do operators, which a compiled call is."""
    make, said = WRONG[name]
    torch._dynamo.reset()
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager")
    given = {"query": Q, "key": Q, "value": Q, **make()}
    with pytest.raises(InvalidArgumentError, match=f"^{said}"):
        compiled(**given)


def test_attention_has_its_own() -> None:
    """The same call by other words is refused in those, before and after."""
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="k: expected elements of .* as q has"):
            attention(Q, Q.half(), Q, layout="bhsd")
        with pytest.raises(InvalidArgumentError, match="key: expected elements of .* as query has"):
            scaled_dot_product_attention(Q, Q.half(), Q)
        with pytest.raises(InvalidArgumentError, match="bias: expected a shape"):
            attention(Q, Q, Q, layout="bhsd", bias=x(3, 5))
