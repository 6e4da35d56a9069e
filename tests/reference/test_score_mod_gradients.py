"""Gradients of tensors that functions of scores read: the derivative of the forward, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import dlattn as cudnn
from tests.score_mods import TENSORS, Tree, names_in, on_graph, reads_score

_DOUBLE = cudnn.data_type.DOUBLE
_SIZES = {"b": 2, "h": 3, "q": 9, "k": 13}
_FLOATS = tuple(name for name, (_, dtype) in TENSORS.items() if "float" in dtype)

_LEAVES = st.sampled_from(("s", "s", *_FLOATS)) | st.sampled_from((0.5, -1.25))
_FAR = ("mul", ("sub", "col", "row"), 0.125)
#: Smooth, so that central differences tell the derivative everywhere.
TREES = (
    st.recursive(
        _LEAVES | st.just(_FAR),
        lambda x: (
            st.tuples(st.sampled_from(("add", "sub", "mul")), x, x)
            | st.tuples(st.sampled_from(("tanh", "sigmoid", "sin", "cos", "softplus", "neg")), x)
            | st.tuples(st.just("binary_select"), x, x, st.just(("cmp_ge", "row", "col")))
        ),
        max_leaves=8,
    )
    .map(lambda tree: tree if reads_score(tree) else ("add", "s", tree))
    .filter(names_in)
)


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """q, k, v and dO, and what trees read."""
    rng = np.random.default_rng(seed)
    rows = {"q": "q", "k": "k", "v": "k", "dO": "q"}
    batch, heads = _SIZES["b"], _SIZES["h"]
    given = {x: rng.normal(size=(batch, heads, _SIZES[axis], 8)) for x, axis in rows.items()}

    def dim(name: str) -> list[int]:
        return [size if axis in TENSORS[name][0] else 1 for axis, size in _SIZES.items()]

    return given, {name: 0.5 * rng.normal(size=dim(name)) for name in _FLOATS}


def run(
    tree: Tree, given: Mapping[str, Any], read: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """o, and the gradients of what the tree reads, by two graphs."""
    names = sorted(names_in(tree))
    q, k, v, d_o = (given[role] for role in ("q", "k", "v", "dO"))
    o, stats = np.zeros_like(q), np.zeros((*q.shape[:3], 1))

    def graph_of(inputs: list[Any], attention: Any) -> tuple[list[Any], Any, dict[Any, Any]]:
        graph = cudnn.pygraph(io_data_type=_DOUBLE, compute_data_type=_DOUBLE)
        declared = [graph.tensor_like(x) for x in inputs]
        tensors = {name: graph.tensor_like(read[name], name=name) for name in names}
        results = attention(
            graph, declared, [tensors[name] for name in names],
            attn_scale=0.4,
            score_mod=lambda graph, score: on_graph(graph, score, tree, tensors), **options,
        )  # fmt: skip
        for t in results:
            t.set_output(True).set_data_type(_DOUBLE)
        graph.build()
        pack = dict(zip(declared, inputs, strict=True))
        return results, graph, {**pack, **{tensors[name]: read[name] for name in names}}

    results, graph, pack = graph_of(
        [q, k, v], lambda graph, x, _, **more: graph.sdpa(*x, generate_stats=True, **more)
    )
    graph.execute({**pack, **dict(zip(results, (o, stats), strict=True))})
    results, graph, pack = graph_of(
        [q, k, v, o, d_o, stats],
        lambda graph, x, of, **more: graph.sdpa_backward(*x, score_mod_gradients=of, **more),
    )
    made = [np.full(t.get_dim(), np.nan) for t in results]
    graph.execute({**pack, **dict(zip(results, made, strict=True))})
    return o, dict(zip(names, made[3:], strict=True))


@settings(max_examples=300, deadline=None)
@given(
    TREES, st.integers(0, 2**16), st.sampled_from(({}, {"softcap": 2.0}, {"use_causal_mask": True}))
)
def test_adjoint(tree: Tree, seed: int, options: dict[str, Any]) -> None:
    """<dO, J t> = <J^T dO, t> for any direction t of what is read; J t by central differences."""
    given, read = drawn(seed)
    rng, step = np.random.default_rng(seed + 1), 1e-5
    direction = {name: rng.normal(size=x.shape) for name, x in read.items()}
    ahead, behind = (
        run(tree, given, {n: x + sign * direction[n] for n, x in read.items()}, options)[0]
        for sign in (step, -step)
    )
    _, gradients = run(tree, given, read, options)
    moved = (given["dO"] * (ahead - behind)).sum() / (2 * step)
    terms = [(gradient * direction[name]).sum() for name, gradient in gradients.items()]
    assert abs(moved - sum(terms)) <= 1e-6 * (1 + np.abs(terms).sum())
