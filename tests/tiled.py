"""A fused kernel's arithmetic in NumPy: FlashAttention-2 in float32. It shares nothing with the
oracle, which must admit it, but the meaning of a user's function."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlattn.problem import alibi_slopes
from tests.cases import Case
from tests.definition import kept_by, modified
from tests.libraries import Library


def tiled(case: Case, given: dict[str, Any], tile: int) -> dict[str, Any]:
    """The results of a case, with keys in tiles of so many.

    P is rounded against the running maximum, which later tiles change; exponentials are base 2.
    """
    arrays = {role: given[role].astype(np.float32) for role in ("q", "k", "v", "dO")}
    dims, log2e = case.dims(), np.float32(np.log2(np.e))
    out = {role: np.zeros(dims[role], np.float32) for role in ("o", "dQ", "dK", "dV")}
    out |= {role: np.full(dims[role], -np.inf, np.float32) for role in ("stats", "score_max")}
    out["score_sum_exp"] = np.zeros(dims["stats"], np.float32)
    out["dSink_token"] = np.zeros(dims["dSink_token"], np.float32)
    if case.d_bias:
        out["dBias"] = np.zeros(case.bias_dim(), np.float32)
    sinks = np.full(case.heads_q, -np.inf, np.float32)
    if case.sink is not None:
        sinks = given["sink_token"].reshape(-1)

    mask, drop_scale = np.ones(case.scores_dim(), np.float32), np.float32(case.dropout_scale())
    if case.dropout is not None:
        mask = kept_by(case, given, "float32")

    def store(x: Any) -> Any:
        return given["q"].dtype.type(x).astype(np.float32)

    for b, h in np.ndindex(case.batch, case.heads_q):
        m, n = case.lengths_q()[b], case.lengths_kv()[b]
        hk, hv = h * case.heads_k // case.heads_q, h * case.heads_v // case.heads_q
        q, d_o = arrays["q"][b, h, :m], arrays["dO"][b, h, :m]
        k, v = arrays["k"][b, hk, :n], arrays["v"][b, hv, :n]
        row, column = np.arange(m)[:, None], np.arange(n)[None, :]
        ahead = column - row - (n - m if case.bottom_right else 0)
        keep = (ahead <= (n if case.right is None else case.right)) | (case.right is None)
        keep &= (ahead > -(m if case.left is None else case.left)) | (case.left is None)
        if case.blocks is not None:
            keep &= _blocks(case, given, b, h)[:m, :n]
        if case.softcap:
            tanh = _tanh((q @ k.T) * np.float32(case.scale_value / case.softcap))
            s, slope = tanh * (np.float32(case.softcap) * log2e), 1 - tanh * tanh
        else:
            s, slope = (q @ k.T) * (np.float32(case.scale_value) * log2e), np.float32(1)
        if case.score_mod is not None:
            edited, bend, kept = modified(case, given, arrays["q"], b, h, s / log2e)
            s, slope, keep = edited * log2e, slope * bend, keep & kept
        if case.bias:
            bias = np.broadcast_to(given["bias"], (case.batch, case.heads_q, *case.bias_dim()[2:]))
            bias = bias[b, h][:m, :n]
            if case.bias in ("bool", "uint8"):
                bias = np.where(bias, 0, -np.inf)
            s = s + bias.astype(np.float32) * log2e
        s = np.where(keep, s + _alibi(case, given, b, h, m, n) * log2e, np.float32(-np.inf))
        kept = mask[b, h, :m, :n]
        top = np.full((m, 1), -np.inf, np.float32)
        total, acc = np.zeros((m, 1), np.float32), np.zeros((m, case.head_dim_v), np.float32)
        for j in range(0, n, tile):
            new = np.maximum(top, s[:, j : j + tile].max(1, keepdims=True))
            safe = np.where(np.isinf(new), 0, new)
            shrink, p = np.exp2(top - safe), np.exp2(s[:, j : j + tile] - safe)
            total = total * shrink + p.sum(1, keepdims=True)
            acc = acc * shrink + (store(p) * kept[:, j : j + tile]) @ v[j : j + tile]
            top = new
        sink = sinks[h] * log2e
        new = np.maximum(top, sink)
        safe = np.where(np.isinf(new), 0, new)
        shrink = np.exp2(top - safe)
        total, acc, top = total * shrink + np.exp2(sink - safe), acc * shrink, new
        alive = total > 0
        o = store(acc / np.where(alive, total, 1) * drop_scale)
        stats = np.where(alive, top, 0) / log2e + np.log(np.where(alive, total, 1))
        p = np.exp2(s - np.where(alive, stats * log2e, np.inf))
        delta = (d_o * o).sum(1, keepdims=True)
        d_edited = p * (kept * (d_o @ v.T) - delta / drop_scale)
        if case.d_bias:
            shared = tuple(axis for axis, name in enumerate("qk") if name not in case.bias_axes)
            at = (b if "b" in case.bias_axes else 0, h if "h" in case.bias_axes else 0)
            d_bias = out["dBias"][at][: m if "q" in case.bias_axes else 1]
            d_bias = d_bias[:, : n if "k" in case.bias_axes else 1]
            d_bias += d_edited.sum(axis=shared, keepdims=True) * drop_scale
        d_s = store(slope * d_edited) * drop_scale
        out["o"][b, h, :m] = o
        out["stats"][b, h, :m] = np.where(alive, stats, -np.inf)
        out["score_max"][b, h, :m] = top / log2e
        out["score_sum_exp"][b, h, :m] = total
        out["dSink_token"][0, h] -= (
            np.exp2(sink - np.where(alive, stats * log2e, np.inf)) * delta
        ).sum(0, keepdims=True)
        for j in range(0, n, tile):
            out["dQ"][b, h, :m] += d_s[:, j : j + tile] @ k[j : j + tile]
        out["dK"][b, hk, :n] += d_s.T @ q * np.float32(case.scale_value)
        out["dV"][b, hv, :n] += (store(p) * kept).T @ d_o * drop_scale
    out["dQ"] *= np.float32(case.scale_value)
    if case.d_bias:
        out["dBias"] = out["dBias"].astype(Library().dtype(case.d_bias))
    return out | {role: given["q"].dtype.type(out[role]) for role in ("dQ", "dK", "dV")}


def _tanh(x: Any) -> Any:
    """As ``cuda_src/attn/softcap.cuh`` computes it."""
    square, total = x * x, np.float32(0.01799921877682209)
    for term in (-0.05339105427265167, 0.1333051323890686, -0.3333331048488617):
        total = total * square + np.float32(term)
    small = total * (x * square) + x
    large = 1 - 2 / (1 + np.exp2(np.float32(2 * np.log2(np.e)) * x))
    return np.where(abs(x) > 0.5, large, small)


def _alibi(case: Case, given: dict[str, Any], b: int, h: int, m: int, n: int) -> Any:
    row, column = np.arange(m)[:, None], np.arange(n)[None, :]
    if case.alibi is None:
        return np.float32(0)
    if case.alibi == "cudnn":
        return alibi_slopes(case.heads_q)[0, h, 0, 0] * np.float32(column - row)
    slopes = given["alibi_slopes"].reshape(-1, case.heads_q)
    return -slopes[b % len(slopes), h] * np.float32(abs(row + n - m - column))


def _blocks(case: Case, given: dict[str, Any], b: int, h: int) -> Any:
    """What a block mask keeps, (blocks of queries x 128, blocks of keys x 128)."""
    shape = (case.batch, case.heads_q, *case.blocks_dim()[2:])
    bits = np.unpackbits(np.broadcast_to(given["block_mask"], shape)[b, h], 1, bitorder="little")
    return bits.repeat(128, 0).repeat(128, 1) == 1
