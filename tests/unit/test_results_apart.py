"""Memory that a caller gives for a result is no other tensor's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlattn
from dlattn import flash
from dlattn.errors import InvalidArgumentError


def tensors() -> dict[str, Any]:
    """q, k, v and what a backward needs besides, of random numbers."""
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal((2, 5, 4, 16)) for name in ("q", "k", "v", "dout", "out")}
    return made | {"lse": rng.standard_normal((2, 4, 5))}


def flash_backward(**given: Any) -> Any:
    given["softmax_lse"] = given.pop("lse").astype(np.float32)
    return flash.mha_bwd(**given, alibi_slopes_=None)


def forward(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Of q, k and v under other names."""

    def run(**given: Any) -> Any:
        inputs = [given.pop(name) for name in ("q", "k", "v")]
        for name in ("dout", "out", "lse"):
            if name not in names:
                given.pop(name, None)
        return function(*inputs, **given)

    return run


SHARED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "attention": (forward(dlattn.attention, "out"), "out", "q"),
    "gradients": (dlattn.attention_backward, "dk", "dq"),
    "a gradient and what it is of": (dlattn.attention_backward, "dv", "v"),
    "mha_fwd": (forward(flash.mha_fwd), "out_", "k"),
    "mha_bwd": (flash_backward, "dk_", "dq_"),
    "mha_bwd, an input": (flash_backward, "dv_", "dout"),
    "a cache": (forward(flash.flash_attn_with_kvcache, "out"), "out", "q"),
}
#: What results are given besides, by function.
MORE = {"gradients": "dq", "mha_bwd": "dq_"}


@pytest.mark.parametrize("name", SHARED)
def test_results_begin_apart(name: str) -> None:
    """A result that begins where an input or another result does is refused, and both are named."""
    function, result, other = SHARED[name]
    given = tensors()
    if name in MORE:
        given[MORE[name]] = np.zeros((2, 5, 4, 16))
    if name.startswith("mha_bwd"):
        given |= {x: given.get(x) for x in ("dq_", "dk_", "dv_")}
    with pytest.raises(InvalidArgumentError, match=rf"{result}: it begins where {other} does"):
        function(**{**given, result: given[other]})


def test_gradients_in_one_tensor() -> None:
    """Views that interleave are memory of their own, and get what separate memory does."""
    given = tensors()
    whole = np.zeros((2, 5, 3, 4, 16))
    dq, dk, dv = (whole[:, :, n] for n in range(3))
    dlattn.attention_backward(**given, dq=dq, dk=dk, dv=dv)
    wanted = dlattn.attention_backward(**given)
    for found, want in zip((dq, dk, dv), wanted, strict=False):
        assert (found == want).all() and (want != 0).any()


def test_inputs_may_be_one() -> None:
    """Self-attention of one tensor reads it three times."""
    x = tensors()["q"]
    assert (dlattn.attention(x, x, x) == dlattn.attention(x, x.copy(), x.copy())).all()
