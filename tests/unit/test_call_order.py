"""What a call gives does not depend on what was called before, however much alike that was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import dlattn
from dlattn import flash
from dlattn.calls.cache import forget_calls

ROWS, HEADS, HEADS_K, PAGE = 4, 4, 2, 2
#: Of 2 sequences.
TOKENS = 2 * ROWS

SINKS = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
SLOPES = np.array([0.5, 0.25, 1.0, 2.0], np.float32)
TABLE = np.array([[3, 1], [0, 2]], np.int32)
USED = {"seqused_q": np.array([3, 4], np.int32), "seqused_k": np.array([2, 4], np.int32)}
BIAS = 3 * np.eye(ROWS, dtype=np.float32)[None, None]


def pages(x: Any) -> Any:
    return x.reshape(TOKENS // PAGE, PAGE, *x.shape[2:])


def dense(q: Any, k: Any, v: Any, alibi_slopes_: Any = None, **given: Any) -> Any:
    return flash.mha_fwd(q, k, v, None, alibi_slopes_, **given)[0]


def packed(
    q: Any, k: Any, v: Any, begin: Any, seqused_k: Any = None, block_table_: Any = None,
    alibi_slopes_: Any = None, **given: Any,
) -> Any:  # fmt: skip
    q, *keys = (x.reshape(TOKENS, *x.shape[2:]) for x in (q, k, v))
    k, v = keys if block_table_ is None else map(pages, (k, v))
    # Rows that are not used are 0.
    more = seqused_k, block_table_, alibi_slopes_, ROWS, ROWS, 0.0, None, True
    return flash.mha_varlen_fwd(q, k, v, None, begin, begin, *more, **given)[0]


def cached(q: Any, k: Any, v: Any, block_table: Any = None, new: Any = None, **given: Any) -> Any:
    k, v = k + 0, v + 0  # it writes to them
    caches = (k, v) if block_table is None else map(pages, (k, v))
    more = {"block_table": block_table, "softmax_scale": 0.3, "cache_seqlens": 3}
    return flash.flash_attn_with_kvcache(q[:, :1], *caches, new, new, **{**more, **given})


def backward(q: Any, k: Any, v: Any, lse: Any, alibi_slopes_: Any = None, **given: Any) -> Any:
    return flash.mha_bwd(q, q, k, v, q, lse, None, None, None, alibi_slopes_, **given)[1]


def of_torch(name: str) -> Callable[..., Any]:
    def call(*qkv: Any, **given: Any) -> Any:
        import dlattn.torch

        return getattr(dlattn.torch, name)(*qkv, **given)

    return call


#: Of each function: what it takes beside q, k and v, and what it may be given besides, which
#: changes neither the other tensors nor its numbers.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "attention": (dlattn.attention, {}, {"sinks": SINKS, "alibi_slopes": SLOPES, "bias": BIAS}),
    "mha_fwd": (dense, {}, {"sinks": SINKS, "alibi_slopes_": SLOPES, **USED}),
    "mha_varlen_fwd": (
        packed,
        {"begin": np.array([0, ROWS, TOKENS], np.int32)},
        {"sinks": SINKS, "alibi_slopes_": SLOPES, "block_table_": TABLE, **USED},
    ),
    "flash_attn_with_kvcache": (
        cached,
        {},
        {
            "sinks": SINKS,
            "alibi_slopes": SLOPES,
            "block_table": TABLE,
            "cache_seqlens": np.array([1, 2], np.int32),
            "cache_leftpad": np.array([1, 0], np.int32),
            "new": np.full((2, 1, 2, 8), 0.5, np.float32),
        },
    ),
    "torch.attention": (
        of_torch("attention"),
        {},
        {"sinks": SINKS, "alibi_slopes": SLOPES, "bias": BIAS},
    ),
    "torch.scaled_dot_product_attention": (
        of_torch("scaled_dot_product_attention"),
        {},
        {"attn_mask": BIAS},
    ),
    "mha_bwd": (
        backward,
        {"lse": np.full((2, HEADS, ROWS), 2.0, np.float32)},
        {"alibi_slopes_": SLOPES, **USED},
    ),
}


def kinds(more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Nothing of it, each alone, and two at a time."""
    chosen = [names for count in range(3) for names in combinations(more, count)]
    return [{name: more[name] for name in names} for names in chosen]


@pytest.mark.parametrize(
    "name, library",
    [(name, "numpy") for name in CALLS if not name.startswith("torch.")]
    + [(name, "torch") for name in CALLS],
)
def test_each_call_gives_what_it_gives_alone(name: str, library: str) -> None:
    """After any other of the same function, with and without each tensor that may be left out."""
    of = np.asarray if library == "numpy" else pytest.importorskip("torch").from_numpy
    function, given, more = CALLS[name]
    rng = np.random.default_rng(0)
    heads = [HEADS, *([HEADS] if "scaled" in name else [HEADS_K]) * 2]
    shapes = ((2, ROWS, count, 8) for count in heads)
    qkv = [of(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
    given, more = ({role: of(x) for role, x in those.items()} for those in (given, more))

    def run(kind: dict[str, Any]) -> Any:
        return np.asarray(function(*qkv, **given, **kind))

    alone = []
    for kind in kinds(more):
        forget_calls()
        try:
            alone.append((kind, run(kind)))
        except dlattn.DlattnError as error:  # two that it does not take together
            assert len(kind) == 2, error
    assert len({result.tobytes() for _, result in alone}) == len(alone)
    forget_calls()
    for before, _ in alone:
        for kind, expected in alone:
            run(before)
            assert (run(kind) == expected).all(), ([*before], [*kind])


def test_what_requires_a_gradient_is_never_written_to() -> None:
    """Whatever memory of its looks took results before: a leaf, a part of one, or what autograd has
    made of it, whose gradient would be that of what it held."""
    torch = pytest.importorskip("torch")
    q = torch.randn(2, ROWS, HEADS, 8)
    lse = torch.zeros(2, HEADS, ROWS)
    calls: dict[str, Callable[[Any], Any]] = {
        "attention": lambda out: dlattn.attention(q, q, q, out=out),
        "mha_fwd": lambda out: flash.mha_fwd(q, q, q, out),
        "mha_bwd": lambda out: flash.mha_bwd(q, q, q, q, q, lse, out),
        "flash_attn_with_kvcache": lambda out: flash.flash_attn_with_kvcache(q, q, q, out=out),
        "k_cache": lambda out: flash.flash_attn_with_kvcache(
            q, out, q.clone(), q[:, :1], q[:, :1], cache_seqlens=0
        ),
        "merge_states": lambda out: dlattn.merge_states(q, lse, q, lse, out=(out, lse.clone())),
    }
    for name, call in calls.items():
        leaf = torch.full_like(q, 7.0).requires_grad_()
        for learned in (leaf, leaf[:], leaf * 1):
            forget_calls()
            call(q.clone())
            for _ in range(2):
                with pytest.raises(dlattn.InvalidArgumentError, match="requires a gradient"):
                    call(learned)
            assert (learned == 7).all(), name
        with torch.no_grad():
            call(leaf)


def test_lost_gradients_are_told_of() -> None:
    """Also after a call of such tensors that needed none."""
    torch = pytest.importorskip("torch")
    q = torch.randn(2, ROWS, HEADS, 8)
    learned = q.clone().requires_grad_()
    for call in (dlattn.attention, flash.mha_fwd):
        forget_calls()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                call(q, q, q)
                with torch.no_grad():
                    call(learned, q, q)
        with pytest.warns(UserWarning, match="gets none from here"):
            call(learned, q, q)


def test_lost_gradients_of_sinks_and_angles_are_told_of() -> None:
    """Of every tensor that a model may learn, and not of those that need no gradient."""
    torch = pytest.importorskip("torch")
    q = torch.randn(2, ROWS, HEADS, 8)
    flat, begin = q.flatten(0, 1), torch.tensor([0, ROWS, TOKENS], dtype=torch.int32)
    slots = None, begin, begin, None, None, None, ROWS, ROWS
    cache: dict[str, Any] = {"cache_seqlens": 0}

    def appended(cos: Any, sin: Any) -> Any:
        new = q[:, :1].clone()
        return flash.flash_attn_with_kvcache(q, q * 1, q * 1, new, new, cos, sin, **cache)

    sinks, angles = torch.zeros(HEADS), torch.ones(ROWS, 4)
    calls: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "attention": (sinks, lambda x: dlattn.attention(q, q, q, sinks=x)),
        "mha_fwd": (sinks, lambda x: flash.mha_fwd(q, q, q, sinks=x)),
        "mha_varlen_fwd": (
            sinks, lambda x: flash.mha_varlen_fwd(flat, flat, flat, *slots, sinks=x)
        ),
        "kvcache": (sinks, lambda x: flash.flash_attn_with_kvcache(q, q, q, sinks=x)),
        "rotary_cos": (angles, lambda x: appended(x, angles)),
        "rotary_sin": (angles, lambda x: appended(angles, x)),
    }  # fmt: skip
    forget_calls()
    for given, call in calls.values():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(given)
        with pytest.warns(UserWarning, match="gets none from here"):
            call(given.clone().requires_grad_())


def test_evaluation_before_training() -> None:
    """What an inference's call gives beside its results, autograd can keep of a later one."""
    torch = pytest.importorskip("torch")
    q = torch.randn(2, ROWS, HEADS, 8)
    begin = torch.tensor([0, ROWS, TOKENS], dtype=torch.int32)
    flat = q.flatten(0, 1)
    calls: list[Callable[[], Any]] = [
        lambda: flash.mha_fwd(q, q, q),
        lambda: flash.mha_varlen_fwd(
            flat, flat, flat, None, begin, begin, None, None, None, ROWS, ROWS
        ),
    ]
    for call in calls:
        forget_calls()
        with torch.inference_mode():
            call()
        assert not any(x.is_inference() for x in call())


def test_a_default_device_draws_nothing() -> None:
    """Dropout's seed is of its generator's device."""
    torch = pytest.importorskip("torch")
    q = torch.randn(2, ROWS, HEADS, 8)
    with torch.device("meta"):
        assert flash.mha_fwd(q, q, q, p_dropout=0.5)[0].isfinite().all()
