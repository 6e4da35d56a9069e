"""Memory that a caller gives for a result is no other tensor's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlattn
from dlattn import flash
from dlattn.errors import InvalidArgumentError
from dlattn.problem.sharing import Elements, Sharing


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


def appended(k_cache: Any, v_cache: Any, count: int = 1) -> None:
    """So many new tokens, of ones and twos, behind two tokens of each of two sequences."""
    shapes = ((2, count, *x.shape[2:]) for x in (k_cache, v_cache))
    k, v = (np.full(shape, float(n)) for n, shape in enumerate(shapes, 1))
    q = np.zeros((2, 1, 4, k_cache.shape[3]))
    flash.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=2)


#: Of memory of zeros: two caches, (2, 5, 2, 16) but for the columns.
OVERLAPPING: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "the same": lambda x: (x[:320].reshape(2, 5, 2, 16),) * 2,
    "a part of its columns": lambda x: (
        x[:320].reshape(2, 5, 2, 16),
        x[:320].reshape(2, 5, 2, 16)[..., 8:],
    ),
    "the end of one": lambda x: (x[:320].reshape(2, 5, 2, 16), x[319:639].reshape(2, 5, 2, 16)),
    "the end of the other": lambda x: (
        x[319:639].reshape(2, 5, 2, 16),
        x[:320].reshape(2, 5, 2, 16),
    ),
    "a column of interleaved ones": lambda x: (
        x[:640].reshape(2, 5, 2, 32)[..., :16],
        x[:640].reshape(2, 5, 2, 32)[..., 15:31],
    ),
    "another order": lambda x: (
        x[:320].reshape(2, 5, 2, 16),
        x[:320].reshape(2, 2, 5, 16).swapaxes(1, 2),
    ),
}
APART: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "one behind the other": lambda x: tuple(x[:640].reshape(2, 2, 5, 2, 16)),
    "by entries": lambda x: tuple(x[:640].reshape(2, 2, 5, 2, 16).swapaxes(0, 1)),
    "by tokens": lambda x: tuple(np.moveaxis(x[:640].reshape(2, 5, 2, 2, 16), 2, 0)),
    "by heads": lambda x: tuple(np.moveaxis(x[:640].reshape(2, 5, 2, 2, 16), 3, 0)),
    "by columns": lambda x: (
        x[:800].reshape(2, 5, 2, 40)[..., :16],
        x[:800].reshape(2, 5, 2, 40)[..., 16:],
    ),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_caches_that_overlap(name: str) -> None:
    """New keys and values are not written to memory that both caches have, also not by a call like
    one whose caches are apart; what appends nothing may read such caches."""
    k_cache, v_cache = OVERLAPPING[name](np.zeros(1000))
    with pytest.raises(InvalidArgumentError, match="v_cache: expected memory that k_cache has no"):
        appended(k_cache, v_cache)
    other = np.zeros(1000)
    appended(k_cache, OVERLAPPING[name](other)[1])
    assert k_cache.any() and other.any()
    k_cache[...] = 0
    with pytest.raises(InvalidArgumentError, match="overlap; give each memory of its own"):
        appended(k_cache, v_cache)
    assert not k_cache.any() and not v_cache.any()
    appended(k_cache, v_cache, count=0)
    q = np.zeros((2, 1, 4, 16))
    flash.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=2)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_appended_is_no_part_of_the_caches(name: str) -> None:
    """It would be read while the caches are written; what appends nothing may attend so."""
    k_cache, v_cache = np.zeros((2, 2, 5, 4, 16))
    given = {x: np.ones((2, 1, 4, 16)) for x in "qkv"} | {name: k_cache[:, 2:3]}
    q, k, v = (given[x] for x in "qkv")
    with pytest.raises(InvalidArgumentError, match="overlap; give each memory of its own"):
        flash.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=2)
    assert not k_cache.any() and not v_cache.any()
    flash.flash_attn_with_kvcache(k_cache[:, 2:3], k_cache, v_cache, cache_seqlens=2)


@pytest.mark.parametrize("name", APART)
def test_caches_in_one_tensor(name: str) -> None:
    """Caches that interleave, however, get what is appended to each."""
    k_cache, v_cache = APART[name](np.zeros(1000))
    appended(k_cache, v_cache)
    for number, cache in enumerate((k_cache, v_cache), 1):
        assert (cache[:, 2] == number).all() and (np.delete(cache, 2, 1) == 0).all()


def one_call(*given: Any) -> Any:
    *inputs, lse, dk, dv = given
    return dlattn.attention_backward(*inputs, lse.astype("f8"), dk=dk, dv=dv)


def dense(*given: Any) -> Any:
    *inputs, dk, dv = given
    return flash.mha_bwd(*inputs, None, dk, dv)


def packed(*given: Any) -> Any:
    """The first sequence alone."""
    *rows, lse, dk, dv = given
    cu = np.array([0, 5], np.int32)
    inputs, memory = [x[0] for x in rows], (dk[0], dv[0])
    return flash.mha_varlen_bwd(*inputs, lse[0], None, *memory, cu, cu, None, 5, 5)


BACKWARDS = (one_call, dense, packed)


def gradients(function: Callable[..., Any], dk: Any, dv: Any) -> None:
    """Written to such memory, of random tensors in their shapes."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(x.shape) for x in (dv, dk, dk, dv, dv)]
    function(*inputs, rng.standard_normal((2, 2, 5)).astype("f4"), dk, dv)


@pytest.mark.parametrize("function", BACKWARDS)
@pytest.mark.parametrize("name", OVERLAPPING)
def test_gradients_that_overlap(name: str, function: Callable[..., Any]) -> None:
    """Gradients are not written to memory that two of them have, also not by a call like one whose
    gradients are apart."""
    dk, dv = OVERLAPPING[name](np.zeros(1000))
    first = slice(0, 1 if function is packed else 2)
    if function is not one_call and dk.shape != dv.shape:
        pytest.skip("FlashAttention's functions have one head size.")
    if not np.shares_memory(dk[first], dv[first]):
        pytest.skip("The first sequences are apart.")
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="dv.*(dk.* no part of|begins where dk)"):
            gradients(function, dk, dv)
        assert not dk.any() and not dv.any()
        other = OVERLAPPING[name](np.zeros(1000))
        gradients(function, other[0], OVERLAPPING[name](np.zeros(1000))[1])
        assert other[0].any()


@pytest.mark.parametrize("function", BACKWARDS)
@pytest.mark.parametrize("name", APART)
def test_gradients_that_interleave(name: str, function: Callable[..., Any]) -> None:
    """Those that share one tensor, but no element, are what they are in memory of their own."""
    found = APART[name](np.zeros(1000))
    if function is not one_call and found[0].shape != found[1].shape:
        pytest.skip("FlashAttention's functions have one head size.")
    wanted = [np.zeros(x.shape) for x in found]
    gradients(function, *found)
    gradients(function, *wanted)
    for one, want in zip(found, wanted, strict=True):
        assert (one == want).all() and want.any()


def test_a_layout_that_takes_too_long_to_tell() -> None:
    """Whether two tensors overlap is asked for a bounded time; NumPy alone would search for about a
    second here, and for others for years."""
    one = Elements((31, 127, 4096, 4096), (2132267138, 16789505, 4099, 1), 2)
    other = Elements((4096, 127, 2, 8), (1016, 8, 4161536, 1), 2)
    begin = time.perf_counter()
    assert not Sharing(one, other)(120746745560)
    assert time.perf_counter() - begin < 0.5
