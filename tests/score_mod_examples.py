"""Attention calls with a function of scores, for every kernel, and with gradients of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

import dlattn as cudnn
from tests.cases import RAGGED_KV, RAGGED_Q, Case
from tests.libraries import Library

_DISTANCE = ("sub", "col", "row")
_SAME = ("cmp_eq", "documents_q", "documents_k")
_CAP = ("mul", ("tanh", ("div", "s", 4.0)), 4.0)

#: Functions that are recognised, and others.
MODS: dict[str, tuple[Any, Any]] = {
    "soft cap": (_CAP, None),
    "slopes": (("add", _CAP, ("mul", "slopes", _DISTANCE)), ("cmp_ge", "row", "col")),
    "window": ("s", ("logical_and", ("cmp_ge", "row", "col"), ("cmp_lt", _DISTANCE, 40))),
    "lengths": (
        "s",
        ("logical_and", ("cmp_lt", "row", "limit_q"), ("cmp_lt", "col", "limit_k")),
    ),
    "by value": (("mul", ("tanh", ("mul", "s", 0.5)), "factor"), None),
    "documents": ("s", ("logical_and", _SAME, ("cmp_ge", "row", "col"))),
    "table": (("add", ("mul", "table", "columns"), "s"), None),
    "near": (
        ("binary_select", "s", ("mul", "s", -0.5), ("cmp_lt", ("abs", _DISTANCE), 17)),
        None,
    ),
    "windows of heads": (
        "s",
        ("cmp_lt", ("sub", "row", "col"), ("mul", "slopes", 400.0)),
    ),
    "marked documents": ("s", ("logical_and", _SAME, ("cmp_lt", "table", 0.5))),
    "greater rows": ("s", ("cmp_gt", "rows", "columns")),
    "low scores of documents": (
        ("binary_select", "s", -math.inf, ("cmp_lt", "s", 1e4)),
        _SAME,
    ),
    "activations": (("add", ("softplus", "s"), ("mul", ("sin", "rows"), ("sigmoid", "s"))), _SAME),
}

_SIZES: dict[str, Any] = {
    "batch": 2, "heads_q": 4, "heads_k": 2, "heads_v": 1, "seq_q": 193, "seq_kv": 259,
    "head_dim_qk": 64, "head_dim_v": 64, "scale": 0.125,
}  # fmt: skip
_LENGTHS: dict[str, Any] = {"len_q": (193, 70), "len_kv": (200, 259)}

#: What a function meets.
TOGETHER: dict[str, dict[str, Any]] = {
    "alone": {},
    "wide": {"head_dim_qk": 128, "head_dim_v": 128, "right": 0},
    "widest": {"head_dim_qk": 256, "head_dim_v": 256, "right": 0, "bottom_right": True},
    "unequal": {"head_dim_qk": 192, "head_dim_v": 128, "left": 30, "right": 0},
    "padding": {**_LENGTHS, "right": 0, "bottom_right": True},
    "edits": {"softcap": 30.0, "bias": "float32", "alibi": "BH", "d_bias": "float32"},
    "aligned": {"bias": "bfloat16", "bias_layout": "aligned", "head_dim_qk": 128},
    "dropout": {"dropout": 0.25, "right": 0},
    "sink": {"sink": 0.5, "row_outputs": ("score_max", "score_sum_exp"), "debug_softmax": True},
    "blocks": {"blocks": 0.5, "seq_q": 300, "seq_kv": 400},
    "ragged": {**_LENGTHS, "ragged": (*RAGGED_Q, *RAGGED_KV), "gaps": True, "right": 0},
    "paged": {**_LENGTHS, "page_k": 16, "page_v": 64, "right": 0, "bottom_right": True},
    "decode": {"seq_q": 3, "seq_kv": 700, "len_q": (3, 1), "len_kv": (700, 33)},
    "elements": {"layouts": (("q", "odd"), ("k", "odd"))},
    "deterministic": {"deterministic": True, "right": 0},
    "long": {"batch": 1, "seq_q": 650, "seq_kv": 900, "head_dim_qk": 128, "head_dim_v": 128},
    "long and causal": {"seq_q": 520, "seq_kv": 520, "right": 0, "softcap": 9.0},
}


def examples(dtype: str = "bfloat16") -> dict[str, Case]:
    """Every function with everything that it may meet, and the gradients of what it reads."""
    plain, types = Case(dtype=dtype, **_SIZES), ("float32", "bfloat16", "float16")
    return {
        f"{mod}, {other}": replace(
            plain, score_mod=MODS[mod], d_mods=types[seed % len(types)], seed=seed, **fields
        )
        for seed, (other, fields) in enumerate(TOGETHER.items())
        for mod in MODS
    }


def gradients(library: Library, dtype: str, score_mod: Any, bprop: Any) -> list[Any]:
    """dQ, dK and dV of a causal attention with a function of scores, in float64."""
    dim, types = (2, 3, 70, 64), {"data_type": getattr(cudnn.data_type, dtype.upper())}
    element = {"half": "float16", "float": "float32"}[dtype]
    q, k, v, d_o = (
        library.cast(library.normal(dim, seed), element).reshape(dim) for seed in range(4)
    )

    def empty(like: Any) -> Any:
        return library.filled(like.shape, float("nan"), like)

    o, stats = empty(q), empty(library.cast(q[..., :1], "float32"))
    made = [empty(x) for x in (q, k, v)]
    forward = cudnn.pygraph(io_data_type=types["data_type"])
    given = [forward.tensor_like(x) for x in (q, k, v)]
    results = forward.sdpa(
        *given, attn_scale=0.3, generate_stats=True, use_causal_mask=True, score_mod=score_mod
    )
    for t in results:
        t.set_output(True)
    _run(forward, dict(zip([*given, *results], [q, k, v, o, stats], strict=True)), library)
    backward = cudnn.pygraph(io_data_type=types["data_type"])
    inputs = [q, k, v, o, d_o, stats]
    given = [backward.tensor_like(x) for x in inputs]
    results = backward.sdpa_backward(
        *given, attn_scale=0.3, use_causal_mask=True, score_mod=score_mod, score_mod_bprop=bprop
    )
    for t in results:
        t.set_output(True)
    _run(backward, dict(zip([*given, *results], [*inputs, *made], strict=True)), library)
    return [np.asarray(library.cast(x, "float64").tolist()) for x in made]


def _run(graph: cudnn.pygraph, pack: dict[Any, Any], library: Library) -> None:
    graph.build()
    size = graph.get_workspace_size()
    graph.execute(pack, library.full(size, 0, "uint8") if size else None)


def assert_gradients_are_as_given(library: Library, dtype: str) -> None:
    """A ``score_mod_bprop`` that is the derivative has the same gradients as none; one of another
    function has that function's, where both have the same scores."""

    def curved(graph: Any, score: Any) -> Any:
        return graph.mul(graph.tanh(score), graph.tensor_scalar(2.0))

    def slope(graph: Any, gradient: Any, score: Any) -> Any:
        return graph.mul(graph.tanh_backward(gradient, score), graph.tensor_scalar(2.0))

    symbolic = gradients(library, dtype, curved, None)
    for got, want in zip(gradients(library, dtype, curved, slope), symbolic, strict=True):
        np.testing.assert_array_equal(got, want)

    def three(graph: Any, gradient: Any) -> Any:
        return graph.mul(gradient, graph.tensor_scalar(3.0))

    def same(graph: Any, score: Any) -> Any:
        return graph.identity(score)

    once = gradients(library, dtype, same, None)
    for got, want, factor in zip(
        gradients(library, dtype, same, three), once, (3, 3, 1), strict=True
    ):
        np.testing.assert_allclose(got, factor * want, rtol=2e-2, atol=1e-2 * abs(want).max())
