"""Attention on the CPU in NumPy: the definition that every other engine is held to.

The engine knows of edits and masks only what their NumPy twins say, so a feature that has a twin
runs here in every combination. Rows of queries go in blocks: memory grows linearly with the
sequence lengths. Source: FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2, with a block of
keys that spans every key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dlattn.dtypes import data_type
from dlattn.plans.base import Plan
from dlattn.plans.host import HostMemory, lengths
from dlattn.plans.rows import row_delta, row_deltas, sink_gradient
from dlattn.problem import (
    SCORE_MOD_ROLES,
    Bias,
    Direction,
    Dropout,
    Edit,
    Geometry,
    Mask,
    Problem,
    ScoreGradient,
    Values,
    Where,
    alibi_slopes,
)
from dlattn.problem.problem import SCALAR_ROLES
from dlattn.problem.score import Array, add_at
from dlattn.records import dataclass
from dlattn.runtime.target import Target

_DTYPES = (data_type.HALF, data_type.BFLOAT16, data_type.FLOAT, data_type.DOUBLE)

#: Scores held at a time: small enough for a last-level cache, large enough to keep BLAS busy.
_SCORES_PER_BLOCK = 1 << 20


class Reference(Plan):
    """Runs forward and backward problems on host memory.

    Arithmetic is float64 if the problem or its tensors say DOUBLE, else float32; results are
    rounded once, when they are stored.
    """

    name = "reference"

    def __init__(self, problem: Problem, geometry: Geometry, target: Target) -> None:
        super().__init__(problem, geometry, target)
        double = data_type.DOUBLE in (problem.dtype, problem.compute)
        self.compute: type[np.floating[Any]] = np.float64 if double else np.float32

    @classmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        if target.kind != "cpu":
            return f"it runs on the CPU, and the tensors are on {target}"
        if problem.dtype not in _DTYPES:
            return f"it computes in {', '.join(d.name for d in _DTYPES)}, not {problem.dtype.name}"
        if problem.direction is Direction.BACKWARD and "o" not in geometry.tensors:
            return "o is not given"
        return None

    @property
    def workspace_size(self) -> int:
        return 0

    def build(self) -> None:
        """Nothing to compile."""

    def execute(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None:
        memory = HostMemory(self.geometry, pointers)
        tensors = memory.arrays
        q, k, v = (tensors[role] for role in "qkv")
        values = self._values(memory)
        problem, sink = self.problem, tensors.get("sink_token")
        scores: dict[str, Any] = {
            "edits": problem.edits, "masks": problem.masks, "values": values,
            "dropout": problem.dropout, "compute": self.compute,
        }  # fmt: skip
        if problem.direction is Direction.FORWARD:
            debug = np.zeros_like(tensors.get("debug_softmax", np.empty(0)), self.compute)
            results = attention_forward(q, k, v, sink=sink, debug=debug, **scores)._asdict()
            if problem.dropout is not None and debug.size:
                there = debug[..., : self.geometry.seq_q, : self.geometry.seq_kv]
                problem.dropout.mark(there, values)
            results["debug_softmax"] = debug
            if problem.flash_stats:
                results["stats"][np.isneginf(results["stats"])] = np.inf
        else:
            o, stats, d_o = (tensors[role] for role in ("o", "stats", "dO"))
            added = [
                *(["dBias"] if problem.d_bias else ()),
                *(x.role for x in problem.score_gradients),
            ]
            sums = {role: np.zeros(tensors[role].shape, self.compute) for role in added}
            d_reads = [(of, sums[of.role]) for of in problem.score_gradients]
            d_stats = tensors.get("dStats")
            gradients = attention_backward(
                q, k, v, o, d_o, stats,
                d_stats=d_stats, d_bias=sums.get("dBias"), d_reads=d_reads, **scores,
            )  # fmt: skip
            results = {**dict(zip(("dQ", "dK", "dV"), gradients, strict=True)), **sums}
            if problem.delta:
                results["delta"] = row_deltas(o, d_o, values, self.compute)
            if sink is not None and problem.sink:
                results["dSink_token"] = sink_gradient(
                    o, d_o, stats, sink, len_q=values.len_q, d_stats=d_stats, compute=self.compute
                )
        if "rng_dump" in tensors:
            assert problem.dropout is not None
            problem.dropout.dump(tensors["rng_dump"], values)
        with np.errstate(all="ignore"):
            for role, result in results.items():
                if role in tensors:
                    memory.write(role, result)

    def _values(self, memory: HostMemory) -> Values:
        geometry, tensors = self.geometry, memory.arrays
        return Values(
            len_q=memory.len_q,
            len_kv=memory.len_kv,
            given_shift=memory.given_shift,
            band_left=geometry.band_left,
            band_right=geometry.band_right,
            bottom_right=geometry.bottom_right,
            softcap=geometry.softcap,
            bias=tensors.get("bias"),
            block_mask=tensors.get("block_mask"),
            score_tensors=tuple(tensors[r] for r in SCORE_MOD_ROLES if r in tensors),
            alibi_slopes=_slopes(tensors.get("alibi_slopes"), geometry.heads_q),
            heads_q=geometry.heads_q,
            dropout_p=geometry.dropout_p,
            dropout_mask=tensors.get("dropout_mask"),
            **{role: self._number(role, tensors) for role in SCALAR_ROLES},
        )

    def _number(self, role: str, tensors: Mapping[str, Array]) -> Any:
        """What a tensor of one element holds, or what the geometry says in its place."""
        return tensors[role].item() if role in tensors else getattr(self.geometry, role)


class Forward(NamedTuple):
    """A forward's results.

    Attributes:
        o: (B, Hq, Sq, Dv).
        stats: (B, Hq, Sq, 1), the natural log of the sum of a row's exponentials.
        score_max, score_sum_exp: (B, Hq, Sq, 1), a row's largest score, and the sum of its
            exponentials relative to that.
    """

    o: Array
    stats: Array
    score_max: Array
    score_sum_exp: Array


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    edits: Sequence[Edit] = (),
    masks: Sequence[Mask] = (),
    values: Values | None = None,
    dropout: Dropout | None = None,
    sink: Array | None = None,
    debug: Array | None = None,
    compute: type[np.floating[Any]] = np.float64,
) -> Forward:
    """``softmax(masked(edited(q k^T))) v``, and what the softmax knows of its rows.

    Args:
        q, k, v: (B, Hq, Sq, Dqk), (B, Hk, Skv, Dqk), (B, Hv, Skv, Dv), of any float type and
            strides; Hk and Hv divide Hq. Elements past the lengths in ``values`` are never read.
        edits, masks: as in :class:`dlattn.problem.Problem`.
        values: what edits, masks and dropout read; without it, a scale of 1 and full lengths.
        dropout: as in :class:`dlattn.problem.Problem`; statistics are of what was not dropped yet.
        sink: (1, Hq, 1, 1), one more score of every row, for which there is no value.
        debug: (B, Hq, Sq, Skv) or larger, zeros: probabilities before dropout are written here.
        compute: type of all arithmetic and of the results.

    Returns:
        Rows past the query length, and without a sink those that attend to nothing, hold 0 in o
        and score_sum_exp, -inf in stats and score_max.
    """
    batch, heads, seq_q, _ = q.shape
    values = values or _full_values(q, k)
    row = (batch, heads, seq_q, 1)
    results = Forward(
        o=np.zeros((batch, heads, seq_q, v.shape[-1]), compute),
        stats=np.full(row, -np.inf, compute),
        score_max=np.full(row, -np.inf, compute),
        score_sum_exp=np.zeros(row, compute),
    )
    sinks = np.full((heads, 1, 1), -np.inf, compute)
    if sink is not None:
        sinks[...] = sink.reshape(heads, 1, 1)
    for entry in range(batch):
        q_b, k_b, v_b, values_b = _entry(entry, q, k, v, values, compute)
        # What a row is that attends to nothing but its sink.
        valid = slice(0, int(values_b.len_q.item()))
        results.stats[entry, :, valid] = results.score_max[entry, :, valid] = sinks
        results.score_sum_exp[entry, :, valid] = ~np.isneginf(sinks)
        for block in _blocks(entry, heads, masks, values_b):
            scores, _ = _scores(q_b, k_b, block, edits, values_b)
            kept = _kept(dropout, block.where, values_b)
            rows = _softmax_times_v(scores, v_b[:, block.keys], sinks, kept, values.dropout_scale)
            if debug is not None and debug.size:
                safe = np.where(np.isneginf(rows.stats), np.inf, rows.stats)
                debug[entry, :, block.rows, block.keys] = np.exp(scores - safe)
            for whole, part in zip(results, rows, strict=True):
                whole[entry, :, block.rows] = part
    return results


def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    d_o: Array,
    stats: Array,
    *,
    edits: Sequence[Edit] = (),
    masks: Sequence[Mask] = (),
    values: Values | None = None,
    dropout: Dropout | None = None,
    d_stats: Array | None = None,
    d_bias: Array | None = None,
    d_reads: Sequence[tuple[ScoreGradient, Array]] = (),
    compute: type[np.floating[Any]] = np.float64,
) -> tuple[Array, Array, Array]:
    """The gradients of ``sum(o * d_o) + sum(stats * d_stats)`` for q, k and v.

    Args:
        o, d_o, stats: (B, Hq, Sq, Dv), the same, and (B, Hq, Sq, 1), from the forward pass.
        q, k, v, edits, masks, values, dropout, compute: as in :func:`attention_forward`.
        d_stats: as stats; ``None`` is 0. That of rows that attend to nothing does not matter.
        d_bias: the gradient of the bias, in its shape, is added to this.
        d_reads: gradients of tensors that a user's function reads are added to these.

    Returns:
        dQ, dK, dV in the shapes of q, k, v; 0 past the lengths.
    """
    batch, heads = q.shape[:2]
    values = values or _full_values(q, k)
    dq, dk, dv = (np.zeros(x.shape, compute) for x in (q, k, v))
    for entry in range(batch):
        q_b, k_b, v_b, values_b = _entry(entry, q, k, v, values, compute)
        for block in _blocks(entry, heads, masks, values_b):
            rows, keys = block.rows, block.keys
            o_r, d_o_r, stats_r = (x[entry, :, rows].astype(compute) for x in (o, d_o, stats))
            d_stats_r = None if d_stats is None else d_stats[entry, :, rows]
            scores, trail = _scores(q_b, k_b, block, edits, values_b)
            with np.errstate(all="ignore"):
                # Rows that attend to nothing have stats -inf; +inf makes their weights exp(-inf).
                weights = np.exp(scores - np.where(np.isneginf(stats_r), np.inf, stats_r))
                kept = _kept(dropout, block.where, values_b)
                delta = row_delta(o_r, d_o_r, stats_r, d_stats_r) * values.dropout_scale_inv
                d_weights = _times(d_o_r, v_b[:, keys].swapaxes(1, 2)) * kept
                grad = weights * values.dropout_scale * (d_weights - delta)
                for edit, given in zip(reversed(edits), reversed(trail), strict=True):
                    if d_bias is not None and isinstance(edit, Bias):
                        add_at(d_bias, grad[None], block.where)
                    for of, total in d_reads:
                        if of.is_read_by(edit):
                            of.add(total, grad[None], given[None], block.where, values_b)
                    grad = edit.backward(grad[None], given[None], block.where, values_b)[0]
                if block.dropped is not None:
                    np.copyto(grad, 0, where=block.dropped)
                dq[entry, :, rows] = _times(grad, k_b[:, keys])
                dk[entry, :, keys] += _transpose_times(grad, q_b[:, rows], len(k_b))
                weights *= kept * values.dropout_scale
                dv[entry, :, keys] += _transpose_times(weights, d_o_r, len(v_b))
    return dq, dk, dv


@dataclass(frozen=True)
class _Block:
    """Consecutive queries of one batch entry, and the range of keys that any of them attends to.

    Attributes:
        rows, keys: the ranges.
        where: their positions, for all heads.
        dropped: True where a score is masked, broadcastable to (H, rows, keys); ``None`` when
            none is.
    """

    rows: slice
    keys: slice
    where: Where
    dropped: Array | None


def _blocks(entry: int, heads: int, masks: Sequence[Mask], values: Values) -> Iterator[_Block]:
    """The blocks of one batch entry; rows that attend to nothing may be in none of them."""
    len_q, len_kv = int(values.len_q.item()), int(values.len_kv.item())
    step = max(1, _SCORES_PER_BLOCK // max(1, heads * len_kv))
    for start in range(0, len_q, step):
        rows = slice(start, min(start + step, len_q))
        where = _where(entry, heads, rows, slice(0, len_kv))
        keep = np.ones((1, 1, 1, len_kv), bool)
        for mask in masks:
            keep = keep & mask.keep(where, values)
        attended = np.flatnonzero(keep.any(axis=(0, 1, 2)))
        if not attended.size:
            continue
        keys = slice(int(attended[0]), int(attended[-1]) + 1)
        keep = keep[0, ..., keys]
        yield _Block(rows, keys, _where(entry, heads, rows, keys), None if keep.all() else ~keep)


def _where(entry: int, heads: int, rows: slice, keys: slice) -> Where:
    return Where(
        batch=np.full((1, 1, 1, 1), entry),
        head=np.arange(heads).reshape(1, -1, 1, 1),
        query=np.arange(rows.start, rows.stop).reshape(1, 1, -1, 1),
        key=np.arange(keys.start, keys.stop).reshape(1, 1, 1, -1),
    )


def _scores(
    q: Array, k: Array, block: _Block, edits: Sequence[Edit], values: Values
) -> tuple[Array, list[Array]]:
    """The final scores (H, rows, keys), -inf where masked, and what each edit was given."""
    with np.errstate(all="ignore"):
        scores = _times(q[:, block.rows], k[:, block.keys].swapaxes(1, 2))
        trail = []
        for edit in edits:
            trail.append(scores)
            scores = edit.apply(scores[None], block.where, values)[0]
    if block.dropped is not None:
        scores = np.where(block.dropped, np.asarray(-np.inf, scores.dtype), scores)
    return scores, trail


def _kept(dropout: Dropout | None, where: Where, values: Values) -> Any:
    """1 where a probability is kept and 0 where it is dropped, broadcastable to a block."""
    return 1 if dropout is None else dropout.keep(where, values)[0]


def _softmax_times_v(scores: Array, v: Array, sinks: Array, kept: Any, scale: float) -> Forward:
    """Rows of the results; sinks (H, 1, 1) are -inf where there are none."""
    with np.errstate(all="ignore"):
        row_max = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
        # Without this, a row of only -inf would ask for exp(-inf - -inf).
        safe_max = np.where(np.isneginf(row_max), 0, row_max)
        weights = np.exp(scores - safe_max)
        row_sum = weights.sum(axis=-1, keepdims=True) + np.exp(sinks - safe_max)
        sums = _times(weights * kept, v) * scale
        o = np.divide(sums, row_sum, out=np.zeros_like(sums), where=row_sum != 0)
        return Forward(o, row_max + np.log(row_sum), row_max, row_sum)


def _times(x: Array, y: Array) -> Array:
    """``x[h] @ y[h // (H / G)]``: x is (H, rows, n), y is (G, n, m), the result (H, rows, m)."""
    product: Array = x.reshape(len(y), -1, x.shape[-1]) @ y
    return product.reshape(*x.shape[:2], y.shape[-1])


def _transpose_times(x: Array, y: Array, groups: int) -> Array:
    """``x[h].T @ y[h]`` summed over the heads of each group: (H, rows, n), (H, rows, m) ->
    (groups, n, m)."""
    x, y = (a.reshape(groups, -1, a.shape[-1]) for a in (x, y))
    product: Array = x.swapaxes(1, 2) @ y
    return product


def _entry(
    entry: int, q: Array, k: Array, v: Array, values: Values, compute: type[np.floating[Any]]
) -> tuple[Array, Array, Array, Values]:
    """One batch entry in the compute type, cut to its lengths: padding may hold NaN."""
    values = replace(
        values, len_q=values.len_q[entry : entry + 1], len_kv=values.len_kv[entry : entry + 1]
    )
    len_q, len_kv = int(values.len_q.item()), int(values.len_kv.item())
    return (
        np.ascontiguousarray(q[entry, :, :len_q], compute),
        np.ascontiguousarray(k[entry, :, :len_kv], compute),
        np.ascontiguousarray(v[entry, :, :len_kv], compute),
        values,
    )


def _full_values(q: Array, k: Array) -> Values:
    batch = q.shape[0]
    return Values(1.0, lengths(None, batch, q.shape[2]), lengths(None, batch, k.shape[2]))


def _slopes(given: Array | None, heads: int) -> Array:
    """Slopes of ALiBi (B or 1, H, 1, 1): cuDNN's when not given."""
    return alibi_slopes(heads) if given is None else given.reshape(-1, heads, 1, 1)
