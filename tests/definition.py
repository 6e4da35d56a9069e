"""What attention is, written from its definition.

Nothing here uses dlattn. Every function takes arrays of NumPy, CuPy or PyTorch, and works on one
batch entry at a time, cut to its lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from tests import philox
from tests.cases import Case
from tests.score_mods import TENSORS, Dual, holds, on_arrays

Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """One batch entry: k and v repeated for the query heads, lengths cut off.

    Attributes:
        q, k, v, d_o: (Hq, m, Dqk), (Hq, n, Dqk), (Hq, n, Dv), (Hq, m, Dv).
        added, sizes: (Hq, m, n): what edits add to scores, or ``None``, and the sum of its parts'
            magnitudes.
        sink: (Hq, 1, 1), -inf without.
        keep: (m, n) or (Hq, m, n) booleans.
        alive: (Hq, m, 1) booleans: rows that attend to something, be it the sink.
        kept: (Hq, m, n): 1 where a probability is kept, 0 where it is dropped; 1.0 without dropout.
        mod: scores (Hq, m, n), and the name by which to differentiate -> the scores that the user's
            function makes of them; or ``None``.
    """

    xp: Any
    q: Any
    k: Any
    v: Any
    d_o: Any
    added: Any
    sizes: Any
    sink: Any
    keep: Any
    alive: Any
    kept: Any
    mod: Callable[..., Dual] | None = None


@dataclass(frozen=True)
class Rows:
    """A softmax: the weights (Hq, m, n) of the keys, 0 where masked, and numbers (Hq, m, 1) of its
    rows, of which ``sink`` is the sink's weight."""

    p: Any
    sink: Any
    stats: Any
    largest: Any
    total: Any


def by_entry(
    case: Case,
    given: Tensors,
    compute: Callable[[Entry], dict[str, Any]],
    dtype: str,
    dead: float = -np.inf,
) -> dict[str, Any]:
    """Runs ``compute`` on each batch entry, and gathers the results in full-size tensors.

    What no entry computes is 0, and ``dead`` in stats and score_max. Key and value gradients are
    summed over the query heads that share them, the sinks' over the batch, the bias's where it
    broadcasts over that.
    """
    q, k, v, d_o = (cast(given[role], dtype) for role in ("q", "k", "v", "dO"))
    xp, row = _module(q), q[..., :1]
    like = {"o": d_o, "stats": row, "score_max": row, "score_sum_exp": row}
    like |= {"dQ": q, "dK": k, "dV": v, "dSink_token": row[:1, :, :1]}
    if case.d_bias:
        like["dBias"] = cast(given["bias"], dtype)
    for name in case.mod_gradients():
        tensor = given[f"mod_{name}"] if TENSORS[name][0] else row[:1, :1, :1]
        like[f"d_mod_{name}"] = cast(tensor, dtype)
    if case.looks_inside:
        like["debug_softmax"] = xp.zeros_like(row) + xp.zeros_like(k[:, :1, None, :, 0])
    full = {role: xp.zeros_like(x) for role, x in like.items()}
    full["stats"], full["score_max"] = full["stats"] + dead, full["score_max"] + dead
    sink = full["dSink_token"][0] - np.inf
    if case.sink is not None:
        sink = cast(given["sink_token"], dtype)[0]
    not_dropped = None if case.dropout is None else kept_by(case, given, dtype)
    heads_of = {"dK": case.heads_k, "dV": case.heads_v}
    for index, (m, n) in enumerate(zip(case.lengths_q(), case.lengths_kv(), strict=True)):
        if m == 0:
            continue
        # Without keys, one that is masked: no library takes the maximum of nothing.
        keys, values = (x[index, :, :n] if n else xp.zeros_like(x[index, :, :1]) for x in (k, v))
        keep, added, sizes = _keep(case, xp, q, m, n), None, None
        if case.alibi:
            added = _alibi(case, given, q, index, m, n)
            sizes = abs(added)
        if case.bias and n:
            kept, bias = _bias(case, given, q, index, m, n)
            keep = keep & kept
            if bias is not None:
                sizes = abs(bias) if added is None else sizes + abs(bias)
                added = bias if added is None else added + bias
        if case.blocks is not None:
            keep = keep & _blocks(given, q, index, m, n)
        mod = None
        if case.score_mod is not None:
            edited, mask = case.score_mod
            names = _names(case, given, q, index, m, n)
            mod = partial(_edited, xp, edited, names)
            if mask is not None:
                like = 0 * (names["row"] + names["col"])
                keep = keep & holds(mask, partial(_named, xp, names), like, xp)
        e = Entry(
            xp=xp,
            q=q[index, :, :m],
            k=_repeat(keys, case.heads_q),
            v=_repeat(values, case.heads_q),
            d_o=d_o[index, :, :m],
            added=added,
            sizes=sizes,
            sink=sink,
            keep=keep,
            alive=keep.any(-1)[..., None] | (sink > -np.inf),
            kept=1.0 if not_dropped is None else not_dropped[index, :, :m, : max(n, 1)],
            mod=mod,
        )
        for role, x in compute(e).items():
            if role in heads_of:
                heads = heads_of[role]
                x = xp.sum(x.reshape(heads, case.heads_q // heads, *x.shape[1:]), 1)
                full[role][index, :, :n] = x[:, :n]
            elif role == "dSink_token":
                full[role][0] += x
            elif role == "debug_softmax":
                full[role][index, :, :m, :n] = x[..., :n]
            elif role in case.added_axes():
                at, rows, columns = index % full[role].shape[0], x.shape[1], min(n, x.shape[2])
                full[role][at, :, :rows, :columns] += x[..., :columns]
            else:
                full[role][index, :, :m] = x
    return full


def _names(case: Case, given: Tensors, like: Any, index: int, m: int, n: int) -> dict[str, Any]:
    """What a function of scores reads of one batch entry; each broadcasts to (Hq, m, n)."""
    xp = _module(like)
    names = {
        "row": _positions(xp, like, m)[None, :, None],
        "col": _positions(xp, like, max(n, 1))[None, None, :],
    }
    for name, dim in case.mod_dims().items():
        tensor = given[f"mod_{name}"]
        if not TENSORS[name][0]:
            names[name] = float(tensor.reshape(1)[0]) + 0 * names["row"]
            continue
        # Of no keys, one that is masked.
        entry = cast(tensor[index % dim[0], :, :m, :n], _dtype(like))
        names[name] = entry if entry.shape[-1] else 0 * names["row"]
    return names


def modified(
    case: Case, given: Tensors, like: Any, index: int, head: int, scores: Any
) -> tuple[Any, Any, Any]:
    """What the user's function makes of the scores (m, n) of one head, its derivative there, and
    what it keeps.

    Args:
        like: the queries (B, Hq, S_q, Dqk), of the type to compute in.
    """
    (m, n), xp = scores.shape, _module(like)
    if case.score_mod is None or not n:
        return scores, scores.dtype.type(1), True
    names = _names(case, given, like, index, m, n)
    names = {name: x[head % x.shape[0]] for name, x in names.items()}
    made, mask = _edited(xp, case.score_mod[0], names, scores), case.score_mod[1]
    keep = mask is None or holds(mask, partial(_named, xp, names), 0 * scores, xp)
    return made.value, made.slope, keep


def _named(xp: Any, names: Mapping[str, Any], name: str) -> Dual:
    return Dual(xp, names[name])


def _edited(
    xp: Any,
    tree: Any,
    names: Mapping[str, Any],
    scores: Any,
    by: str = "s",
    error: Any = 0.0,
    unit: float = 0.0,
) -> Dual:
    """What a tree makes of scores that are off by so many units."""

    def leaf(name: str) -> Dual:
        value, off = (scores, error) if name == "s" else (names[name], 0.0)
        return Dual(xp, value, 1 + 0 * value if name == by else 0.0, off, unit=unit)

    made = on_arrays(tree, leaf, scores, xp, unit)
    return made.of(*(x + 0 * scores for x in (made.value, made.slope, made.error, made.jump)))


def _alibi(case: Case, given: Tensors, like: Any, index: int, m: int, n: int) -> Any:
    """ALiBi's part of the scores of one batch entry, (Hq, m, n)."""
    xp = _module(like)
    row, column = _positions(xp, like, m)[:, None], _positions(xp, like, max(n, 1))[None, :]
    if case.alibi == "cudnn":
        return xp.stack(
            [_cudnn_slope(h, case.heads_q) * (column - row) for h in range(case.heads_q)]
        )
    slopes = cast(given["alibi_slopes"], _dtype(like))
    slopes = slopes.reshape(-1, case.heads_q)
    slopes = slopes[index % slopes.shape[0]][:, None, None]
    return -slopes * abs(row + (n - m) - column)


def _bias(case: Case, given: Tensors, like: Any, index: int, m: int, n: int) -> tuple[Any, Any]:
    """Which positions of a batch entry a bias keeps, and what it adds to them."""
    bias = cast(given["bias"][index % given["bias"].shape[0]][:, :m, :n], _dtype(like))
    if case.bias in ("bool", "uint8"):
        return bias != 0, None
    kept = bias != -np.inf
    return kept, _module(like).where(kept, bias, 0.0)


def _blocks(given: Tensors, like: Any, index: int, m: int, n: int) -> Any:
    """Which positions of a batch entry a block mask keeps, (H or 1, m, n)."""
    xp, mask = _module(like), given["block_mask"]
    row, column = (_positions(xp, like, max(size, 1)) for size in (m, n))
    row, block = cast(row // 128, "int64"), cast(column // 128, "int64")
    byte = cast(mask[index % mask.shape[0]], "int64")[:, row][:, :, block // 8]
    return (byte >> (block % 8)) % 2 == 1


def kept_by(case: Case, given: Tensors, dtype: str) -> Any:
    """1 where dropout keeps a probability, else 0, (B, Hq, S_q, S_kv)."""
    q = given["q"]
    xp = _module(q)
    if isinstance(case.dropout, float):
        kept = philox.flash_kept if case.dropout_algorithm == "flash" else philox.kept
        mask = kept(case.dropout, *case.philox(), case.scores_dim())
        device = {"device": q.device} if xp.__name__ == "torch" else {}
        return cast(xp.asarray(mask, **device), dtype)
    return xp.broadcast_to(cast(given["dropout_mask"] != 0, dtype), case.scores_dim())


def _cudnn_slope(head: int, heads: int) -> float:
    """A slope of the ALiBi paper's recipe, as cuDNN has it: fp32."""
    n = 1
    while 2 * n <= heads:
        n *= 2
    exponent = -8 * (head + 1) / n if head < n else -4 * (2 * (head - n) + 1) / n
    return float(np.float32(2.0**exponent))


def _keep(case: Case, xp: Any, like: Any, m: int, n: int) -> Any:
    """Which of (m, n) positions are attended: cuDNN's diagonal band. Of no keys, one is not."""
    row = _positions(xp, like, m)[:, None]
    column = _positions(xp, like, max(n, 1))[None, :]
    ahead = column - row - (n - m if case.bottom_right else 0)
    keep = (ahead == ahead) & (column < n)
    if case.right is not None:
        keep = keep & (ahead <= case.right)
    if case.left is not None:
        keep = keep & (ahead > -case.left)
    return keep


def _positions(xp: Any, like: Any, size: int) -> Any:
    """0, 1, ... on the device of ``like``."""
    return xp.cumsum(xp.ones_like(like[0, 0, :1, :1].reshape(1).repeat(size)), 0) - 1


def _repeat(x: Any, heads: int) -> Any:
    """Head h of the result is head ``h // (heads / H)`` of x (H, n, D)."""
    return _module(x).stack([x[h * x.shape[0] // heads] for h in range(heads)])


def capped(case: Case, e: Entry, off: float = 0.0) -> tuple[Any, Any, Any]:
    """What :func:`scores_of` says, of what the user's function is given."""
    scores = case.scale_value * (e.q @ transposed(e.k)) + off
    if not case.softcap:
        return scores, 1.0, 0.0
    tanh = e.xp.tanh(scores / case.softcap)
    return case.softcap * tanh, 1 - tanh**2, abs(case.softcap * tanh)


def slopes_of(case: Case, e: Entry, off: float = 0.0) -> dict[str, Any]:
    """Gradients of what is added to or read by scores -> the derivative (H, m, n) of a score, where
    the user's function is given scores that are off by so much."""
    if not case.added_axes():
        return {}
    scores = capped(case, e)[0] + off
    slopes = {"dBias": 1 + 0 * scores} if case.d_bias else {}
    for name in case.mod_gradients():
        assert e.mod is not None
        slopes[f"d_mod_{name}"] = e.mod(scores, by=name).slope
    return slopes


def scores_of(case: Case, e: Entry, off: float = 0.0) -> tuple[Any, Any, Any]:
    """The scores (H, m, n) before the masks, their derivative by the scaled products, and the
    largest number that edits round on the way, where those products are off by so much."""
    scores, slope, largest = capped(case, e, off)
    if e.mod is not None:
        made = e.mod(scores)
        largest = abs(made.slope) * largest + made.error
        scores, slope = made.value, made.slope * slope
    if e.added is not None:
        largest = largest + abs(scores) + e.sizes if e.mod is not None else abs(scores) + e.sizes
        scores = scores + e.added
    return scores, slope, largest


def softmax(e: Entry, scores: Any) -> Rows:
    """Of the kept scores and the sink."""
    low = e.xp.where(e.keep, scores, -np.inf)
    largest = e.xp.maximum(row_max(e, low), e.sink)
    top = e.xp.where(e.alive, largest, 0.0)
    weights = e.xp.where(e.keep, e.xp.exp(low - top), 0.0)
    sink = e.xp.exp(e.sink - top)
    total = row_sum(e, weights) + sink
    safe = e.xp.where(e.alive, total, 1.0)
    stats = e.xp.where(e.alive, top + e.xp.log(safe), -np.inf)
    return Rows(weights / safe, sink / safe, stats, largest, total)


def transposed(x: Any) -> Any:
    """The transpose within each head."""
    return x.swapaxes(-1, -2)


def row_sum(e: Entry, x: Any) -> Any:
    return e.xp.sum(x, -1)[..., None]


def sum_of_rows(e: Entry, x: Any) -> Any:
    return e.xp.sum(x, -2)[..., None]


def sum_of_shared(e: Entry, x: Any, axes: str) -> Any:
    """The sum of x (Hq, m, n) over the axes of which all share one element of what has others."""
    for axis, name in enumerate("hqk"):
        if name not in axes:
            x = e.xp.sum(x, axis).reshape(*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return x


def row_max(e: Entry, x: Any) -> Any:
    return e.xp.amax(x, -1)[..., None]


def _module(x: Any) -> Any:
    """The library that made an array."""
    return sys.modules[type(x).__module__.partition(".")[0]]


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def cast(x: Any, dtype: str) -> Any:
    if _module(x).__name__ == "torch":
        return x.to(getattr(_module(x), dtype))
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
