"""What the reference engine's backward computes of rows alone, without keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlattn.problem import Values
from dlattn.problem.score import Array


def row_deltas(o: Array, d_o: Array, values: Values, compute: type[np.floating[Any]]) -> Array:
    """``rowsum(dO * O)``, (B, Hq, Sq, 1), over what kept probabilities are multiplied by; 0 past
    the lengths."""
    row = np.arange(o.shape[2]).reshape(1, 1, -1, 1)
    with np.errstate(all="ignore"):
        products = np.where(row < values.len_q, o.astype(compute) * d_o.astype(compute), 0)
        deltas: Array = products.sum(axis=-1, keepdims=True) * values.dropout_scale_inv
    return deltas


def row_delta(o: Array, d_o: Array, stats: Array, d_stats: Array | None) -> Array:
    """What is taken from every dP of a row: ``rowsum(dO * O) - dStats``, (..., 1)."""
    delta: Array = (d_o * o).sum(axis=-1, keepdims=True)
    return delta if d_stats is None else delta - np.where(np.isneginf(stats), 0, d_stats)


def sink_gradient(
    o: Array,
    d_o: Array,
    stats: Array,
    sink: Array,
    *,
    len_q: Array,
    d_stats: Array | None = None,
    compute: type[np.floating[Any]] = np.float64,
) -> Array:
    """The gradient of ``sum(o * d_o) + sum(stats * d_stats)`` for the sink, (1, Hq, 1, 1).

    Args:
        o, d_o, stats, d_stats: as in :func:`attention_backward`.
        sink: as in :func:`attention_forward`.
        len_q: (B, 1, 1, 1); rows past it are not read.
    """
    gradient = np.zeros(sink.shape, compute)
    for entry, length in enumerate(len_q.ravel()):
        o_b, d_o_b, stats_b = (x[entry, :, :length].astype(compute) for x in (o, d_o, stats))
        d_stats_b = None if d_stats is None else d_stats[entry, :, :length]
        delta = row_delta(o_b, d_o_b, stats_b, d_stats_b)
        # A row without a sum has no share to give.
        stats_b[np.isneginf(stats_b)] = np.inf
        share = np.exp(sink[0].astype(compute) - stats_b)
        gradient[0] -= (share * delta).sum(axis=1, keepdims=True)
    return gradient
