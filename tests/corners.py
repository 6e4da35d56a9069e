"""Corners that functions of scores, and primitive operations, measure from lengths that may be more
than there are rows, beside NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

import dlattn as cudnn
from dlattn.problem import Problem
from tests.libraries import Library

#: Lengths of queries and of keys of each batch entry, of (SEQ_Q, SEQ_KV) rows.
LENGTHS = {
    "of keys": (None, (90, 75, 2**29, 110)),
    "of queries": ((70, 60, 2**29, 75), None),
    "of both": ((70, 60, 90, 0), (2**29, 75, 130, 110)),
    "of 64 bits": ((2**40, 70, 60, 75), (2**40 + 2**31, 100, 2**40, -3)),
}
SEQ_Q, SEQ_KV, WINDOW, BEHIND = 70, 110, 40, 3
_SCALE = 0.3


def attended(lengths: Any) -> Any:
    """Which keys each query attends to, (4, 1, SEQ_Q, SEQ_KV)."""
    of_q, of_kv = (
        np.full(4, size) if given is None else np.clip(given, 0, 2**30 - 2**10)
        for given, size in zip(lengths, (SEQ_Q, SEQ_KV), strict=True)
    )
    row, col = np.arange(SEQ_Q)[:, None], np.arange(SEQ_KV)
    m, n = (x.reshape(4, 1, 1, 1) for x in (of_q, of_kv))
    ahead = col - row - (n - m)
    return (row < m) & (col < n) & (ahead <= BEHIND) & (ahead > -WINDOW)


def expected(arrays: Any, keep: Any) -> dict[str, Any]:
    """o and gradients of (4, 2, S, D) arrays, in float64."""
    q, k, v, d_o = arrays
    scores = np.where(keep, _SCALE * q @ k.swapaxes(2, 3), -np.inf)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(highest), 0, highest))
    total = weights.sum(-1, keepdims=True)
    p = weights / np.where(total == 0, 1, total)
    o = p @ v
    d_s = p * (d_o @ v.swapaxes(2, 3) - (d_o * o).sum(-1, keepdims=True))
    return {
        "o": o,
        "dQ": _SCALE * d_s @ k,
        "dK": _SCALE * d_s.swapaxes(2, 3) @ q,
        "dV": p.swapaxes(2, 3) @ d_o,
    }


class _Graph:
    """A graph with lengths, and what its packs hold."""

    def __init__(self, library: Library, dtype: str, lengths: Any, inputs: Any) -> None:
        element = {"half": cudnn.data_type.HALF, "double": cudnn.data_type.DOUBLE}[dtype]
        other = cudnn.data_type.DOUBLE if dtype == "double" else cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=element, intermediate_data_type=other, compute_data_type=other
        )
        self.pack: dict[Any, Any] = {}
        self.inputs = [self.held(x) for x in inputs]
        wide = any(abs(n) >= 2**31 for given in lengths for n in given or ())
        kind = "int64" if wide else "int32"
        self.lengths = [
            size if given is None else self.held(_integers(library, given, kind))
            for given, size in zip(lengths, (SEQ_Q, SEQ_KV), strict=True)
        ]

    def held(self, x: Any) -> Any:
        t = self.graph.tensor_like(x)
        self.pack[t] = x
        return t

    def masked(self, graph: Any, scores: Any) -> Any:
        """Scores, -inf where a query does not attend."""
        row, col = (graph.gen_index(scores, axis) for axis in (2, 3))
        m, n = (graph.tensor_scalar(x) if isinstance(x, int) else x for x in self.lengths)
        diagonal = graph.add(row, graph.sub(n, m))
        keeps = [
            graph.cmp_le(col, graph.add(diagonal, graph.tensor_scalar(BEHIND))),
            graph.cmp_gt(graph.add(col, graph.tensor_scalar(WINDOW)), diagonal),
        ]
        for position, length in zip((row, col), self.lengths, strict=True):
            if not isinstance(length, int):
                keeps.append(graph.cmp_lt(position, length))
        keep = keeps[0]
        for other in keeps[1:]:
            keep = graph.logical_and(keep, other)
        return graph.binary_select(scores, graph.tensor_scalar(float("-inf")), keep)

    def run(self, outputs: Any, like: Any, library: Library) -> list[Any]:
        """Results, whose shapes are those of tensors."""
        made = []
        for t, x in zip(outputs, like, strict=True):
            t.set_output(True)
            self.pack[t] = library.filled(x.shape, float("nan"), x)
            made.append(self.pack[t])
        self.graph.build()
        problem = self.graph.lowered.problem
        assert isinstance(problem, Problem) and len(problem.edits) == 1
        assert self.graph.lowered.geometry.bottom_right
        size = self.graph.get_workspace_size()
        self.graph.execute(self.pack, library.full(size, 0, "uint8") if size else None)
        return made


def _integers(library: Library, numbers: Any, kind: str) -> Any:
    return library.values(list(numbers), kind).reshape(4, 1, 1, 1)


def check_score_mod(library: Library, dtype: str, lengths: Any) -> None:
    """Fails unless a function that measures from lengths, which is recognised, masks what it says,
    forward and backward."""
    q, k, v, d_o, exact = _arrays(library, dtype)
    rows = library.filled((4, 2, SEQ_Q, 1), 0.0, library.cast(q[:1, :1, :1, :1], _stats(dtype)))
    forward = _Graph(library, dtype, lengths, (q, k, v))
    results = forward.graph.sdpa(
        *forward.inputs, attn_scale=_SCALE, generate_stats=True, score_mod=forward.masked
    )
    results[1].set_data_type(cudnn.data_type.DOUBLE if dtype == "double" else cudnn.data_type.FLOAT)
    o, stats = forward.run(results, (q, rows), library)
    backward = _Graph(library, dtype, lengths, (q, k, v, o, d_o, stats))
    gradients = backward.run(
        backward.graph.sdpa_backward(
            *backward.inputs, attn_scale=_SCALE, score_mod=backward.masked
        ),
        (q, k, v),
        library,
    )
    found = dict(zip(("o", "dQ", "dK", "dV"), (o, *gradients), strict=True))
    _assert_near(library, dtype, found, expected(exact, attended(lengths)))


def check_primitives(library: Library, dtype: str, lengths: Any) -> None:
    """Fails unless primitive operations that measure from lengths run as attention, and mask what
    they say."""
    q, k, v, _, exact = _arrays(library, dtype)
    made = _Graph(library, dtype, lengths, (q, k, v))
    graph, (query, key, value) = made.graph, made.inputs
    scores = graph.matmul(query, graph.transpose(key, (0, 1, 3, 2)))
    scores = graph.scale(scores, graph.tensor_scalar(_SCALE))
    weights, _ = graph.softmax(made.masked(graph, scores))
    (o,) = made.run([graph.matmul(weights, value)], (q,), library)
    _assert_near(library, dtype, {"o": o}, expected(exact, attended(lengths)))


def _stats(dtype: str) -> str:
    return "float64" if dtype == "double" else "float32"


def _arrays(library: Library, dtype: str) -> Any:
    """q, k, v and dO, and the numbers that they hold."""
    element = {"half": "float16", "double": "float64"}[dtype]
    sizes = (SEQ_Q, SEQ_KV, SEQ_KV, SEQ_Q)
    made = [
        library.cast(library.normal((4, 2, size, 64), seed), element)
        for seed, size in enumerate(sizes)
    ]
    return *made, [_host(library, x) for x in made]


def _host(library: Library, x: Any) -> Any:
    return np.asarray(library.cast(x, "float64").tolist())


def _assert_near(library: Library, dtype: str, found: Any, want: Any) -> None:
    tolerance = {"half": 1e-2, "double": 1e-11}[dtype]
    for role, x in found.items():
        most = max(1.0, abs(want[role]).max())
        np.testing.assert_allclose(
            _host(library, x), want[role], atol=tolerance * most, rtol=tolerance, err_msg=role
        )
