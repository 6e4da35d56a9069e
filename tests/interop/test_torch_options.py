"""Options of ``dlattn.torch``, which are remembered from call to call."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn  # noqa: E402
from dlattn.errors import InvalidArgumentError  # noqa: E402
from dlattn.torch import attention, scaled_dot_product_attention  # noqa: E402
from tests.torch_checks import random  # noqa: E402

CU = torch.tensor([0, 3, 8], dtype=torch.int32)

#: Wrong options, and right ones that equal them.
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a window": ({"window": (4.0, 0)}, {"window": (4, 0)}, "window: expected an integer, got 4.0"),
    "causal": ({"causal": 1.0}, {"causal": True}, "causal: expected True or False, got 1.0"),
    "max_seqlens": (
        {"max_seqlens": 8.0}, {"max_seqlens": 8}, "max_seqlens: expected an integer, got 8.0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("beside", ["nothing", "sinks"])
@pytest.mark.parametrize("name", EQUAL)
def test_what_equals_a_wrong_option_is_right(name: str, beside: str) -> None:
    """And the other way round: wrong ones are refused before and after, in any order."""
    wrong, right, message = EQUAL[name]
    packed = name == "max_seqlens"
    more: dict[str, Any] = {"layout": "thd", "cu_seqlens": CU} if packed else {}
    if beside == "sinks":
        more["sinks"] = torch.ones(2)
    # A scale of its own, so that no other test had such a call before.
    more["scale"] = 0.123 + sum(map(ord, name + beside)) / 1e4
    x = random(*(() if packed else (1,)), 8, 2, 8, grad=False)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=message):
            attention(x, x, x, **more, **wrong)
        found = attention(x, x, x, **more, **right)
        assert torch.equal(found, dlattn.attention(x, x, x, **more, **right))


def test_what_says_a_window_is_read_in_each_call() -> None:
    """A tensor of one integer is taken for what it holds at present."""
    x, bound = random(1, 2, 8, 8, grad=False), torch.tensor(1)
    for function in (scaled_dot_product_attention, attention):
        for n in (1, 3):
            bound.fill_(n)
            assert torch.equal(
                function(x, x, x, window=(bound, 0)), function(x, x, x, window=(n, 0))
            )
