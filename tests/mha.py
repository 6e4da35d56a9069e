"""Random attention written as primitive operations, beside ``sdpa`` of the same function."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import ml_dtypes
import numpy as np

import dlattn as cudnn
from tests.callers import Caller

FLOAT, INT32 = cudnn.data_type.FLOAT, cudnn.data_type.INT32
_TYPES = {
    "float16": (cudnn.data_type.HALF, np.float16),
    "bfloat16": (cudnn.data_type.BFLOAT16, ml_dtypes.bfloat16),
    "float32": (cudnn.data_type.FLOAT, np.float32),
    "float64": (cudnn.data_type.DOUBLE, np.float64),
}


@dataclass(frozen=True)
class Mha:
    """One attention of primitive operations; its repr is one line that evaluates to it.

    Attributes:
        k: how k is transposed: by what is ``"declared"``, by ``"transpose"`` or by ``"reshape"``.
        scale: what is scaled: ``"q"``, ``"k"`` or ``"scores"``, or None.
        scale_by: ``"constant"``, ``"value"`` (in the pack) or ``"div"`` (by a constant).
        bias: which sizes of the bias are whole, or None without.
        padding: which of q and k have lengths.
        overrides: products are told lengths, too.
        causal: keys that a query sees beyond the diagonal, or None.
        window: keys before the diagonal and on it, or None.
        bottom_right: where the diagonal ends.
        mask: a boolean tensor of the user's selects scores; it leaves one row none.
        mask_keys: another selects keys, of bytes.
        nans: where the masks of tensors hide all that a number of the bias is added to, it is NaN.
        joined: masks are joined by ``logical_and``; else each selects, some by its negation.
        softmax: ``"primitives"`` or ``"node"``.
        dropout: by ``"rng"``, by a ``"mask"`` of the user's, or None.
        fill: what is masked is set to ``"-1e20"`` or ``"-inf"``, a constant, or a ``"value"``.
        stats: the log-sum-exp is an output; of primitives the maximum and the sum, too.
        seed: of the data.
    """

    dtype: str = "float32"
    batch: int = 2
    heads_q: int = 4
    heads_k: int = 2
    heads_v: int = 2
    seq_q: int = 9
    seq_kv: int = 13
    head_dim_qk: int = 16
    head_dim_v: int = 24
    k: str = "declared"
    scale: str | None = None
    scale_by: str = "constant"
    bias: tuple[bool, bool, bool, bool] | None = None
    padding: str = ""
    overrides: bool = False
    causal: int | None = None
    window: int | None = None
    bottom_right: bool = False
    mask: bool = False
    mask_keys: bool = False
    nans: bool = True
    joined: bool = True
    softmax: str = "primitives"
    dropout: str | None = None
    fill: str = "-1e20"
    stats: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        given = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Mha({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    @property
    def scores_dim(self) -> tuple[int, ...]:
        return (self.batch, self.heads_q, self.seq_q, self.seq_kv)

    @property
    def has_function(self) -> bool:
        """Whether more than one tensor is added or masks, which takes a function of scores."""
        return (self.bias is not None) + self.mask + self.mask_keys > 1

    @property
    def numpy(self) -> Any:
        return _TYPES[self.dtype][1]

    @property
    def data_type(self) -> cudnn.data_type:
        return _TYPES[self.dtype][0]


MASKS = {"mask", "mask_keys"}
SCALE, P_KEEP, SEED, OFFSET = 0.25, 0.5, 1234, 56


def arrays(case: Mha) -> dict[str, Any]:
    """The inputs: role -> NumPy array."""
    rng = np.random.default_rng(case.seed)
    b, skv = case.batch, case.seq_kv
    made: dict[str, Any] = {
        "q": rng.standard_normal((b, case.heads_q, case.seq_q, case.head_dim_qk)),
        "k": rng.standard_normal((b, case.heads_k, skv, case.head_dim_qk)),
        "v": rng.standard_normal((b, case.heads_v, skv, case.head_dim_v)),
    }
    if case.bias is not None:
        sizes = zip(case.bias, case.scores_dim, strict=True)
        made["bias"] = rng.standard_normal([size if whole else 1 for whole, size in sizes])
    if case.dropout == "mask":
        made["keep"] = rng.random(case.scores_dim) < P_KEEP
    made = {role: x.astype(case.numpy) for role, x in made.items()}
    for side, most in (("q", case.seq_q), ("k", skv)):
        if side in case.padding:
            made[f"len_{side}"] = rng.integers(0, most + 1, (b, 1, 1, 1)).astype(np.int32)
    if case.mask:
        made["mask"] = rng.random((1, case.heads_q, case.seq_q, skv)) < 0.7
        made["mask"][:, 0, case.seed % case.seq_q] = False
    if case.mask_keys:
        made["mask_keys"] = (rng.random((b, 1, 1, skv)) < 0.7).astype(np.uint8)
    if case.bias is not None and case.nans:
        shared = tuple(axis for axis, whole in enumerate(case.bias) if not whole)
        made["bias"][~selected(case, made).any(axis=shared, keepdims=True)] = np.nan
    if case.dropout == "rng":
        for role, number in (("seed", SEED), ("offset", OFFSET)):
            made[role] = np.full((1, 1, 1, 1), number, np.int64)
    return made


def selected(case: Mha, given: dict[str, Any]) -> Any:
    """What the masks of tensors select, of all scores."""
    kept = np.ones(case.scores_dim, bool)
    for role in MASKS & given.keys():
        kept &= given[role].astype(bool)
    return kept


class Built:
    """A graph of a case, and what its packs hold; but of those that are declared as views."""

    def __init__(self, case: Mha, given: dict[str, Any], views: tuple[str, ...] = ()) -> None:
        self.case = case
        self.graph = cudnn.pygraph(
            io_data_type=case.data_type,
            intermediate_data_type=FLOAT if case.dtype != "float64" else case.data_type,
        )
        self.given = given
        self.inputs = {
            role: self.graph.tensor_like(x, role) for role, x in given.items() if role not in views
        }
        self.pack: dict[Any, Any] = {t: given[role] for role, t in self.inputs.items()}
        self.outputs: dict[str, Any] = {}

    def number(self, value: float, by_value: bool, name: str) -> Any:
        """A number that the graph knows, or that the pack holds."""
        if not by_value:
            return self.graph.tensor_scalar(float(value))
        made = self.graph.tensor((1, 1, 1, 1), data_type=FLOAT, is_pass_by_value=True, name=name)
        self.pack[made] = float(value)
        return made

    def run(self, caller: Caller) -> dict[str, Any]:
        """The outputs as NumPy arrays."""
        self.graph.build()
        memory = {}
        for role, t in self.outputs.items():
            dtype = np.float32 if t.get_data_type() is FLOAT else self.case.numpy
            memory[role] = self.pack[t] = caller.tensor(np.full(t.get_dim(), 77, dtype))
        size = self.graph.get_workspace_size()
        workspace = caller.tensor(np.empty(size, np.uint8)) if size else None
        self.graph.execute(self.pack, workspace)
        return {role: caller.host(x).astype(np.float64) for role, x in memory.items()}


def sdpa(case: Mha, given: dict[str, Any]) -> Built:
    """The graph of one ``sdpa``."""
    built = Built(replace(case, k="natural"), given)
    t = built.inputs
    dropout = None
    if case.dropout == "rng":
        dropout = (1 - P_KEEP, t["seed"], t["offset"])
    if case.dropout == "mask":
        dropout = (t["keep"], 1 / P_KEEP)
    rows = {}
    if case.stats and case.softmax == "primitives":
        for role in ("score_max", "score_sum_exp"):
            rows[role] = built.graph.tensor((*case.scores_dim[:3], 1), data_type=FLOAT, name=role)
    scale = None
    if case.scale is not None:
        is_value = case.scale_by == "value"
        scale = built.number(SCALE, True, "scale") if is_value else SCALE
    alignment = cudnn.diagonal_alignment
    o, stats = built.graph.sdpa(
        t["q"],
        t["k"],
        t["v"],
        attn_scale=scale,
        **added(case, t),
        use_padding_mask=bool(case.padding),
        seq_len_q=t.get("len_q"),
        seq_len_kv=t.get("len_k"),
        diagonal_band_right_bound=case.causal,
        diagonal_band_left_bound=case.window,
        diagonal_alignment=alignment.BOTTOM_RIGHT if case.bottom_right else alignment.TOP_LEFT,
        dropout=dropout,
        generate_stats=case.stats,
        **rows,
    )
    built.outputs = {"o": o, **rows} | ({"stats": stats} if case.stats else {})
    for output in built.outputs.values():
        output.set_output(True)
    return built


def added(case: Mha, t: dict[str, Any]) -> dict[str, Any]:
    """What is added and what masks, of tensors, as arguments of ``sdpa``."""
    if not case.has_function:
        return {"bias": t.get("bias", t.get("mask", t.get("mask_keys")))}

    def function(graph: Any, score: Any) -> Any:
        if "bias" in t:
            score = graph.add(score, t["bias"])
        masks = [t[role] for role in ("mask", "mask_keys") if role in t]
        keep = graph.logical_and(*masks) if len(masks) > 1 else masks[0]
        return graph.binary_select(score, graph.tensor_scalar(-np.inf), keep)

    return {"score_mod": function}


def primitives(
    case: Mha, given: dict[str, Any], keep_s: bool = False, opaque: bool = False
) -> Built:
    """The graph of primitive operations.

    Args:
        keep_s: S is an output, too, so that it is not run as attention.
        opaque: S is an output that only attention reads.
    """
    built = Built(case, given, views=("k",) * (case.k == "declared"))
    graph, t = built.graph, built.inputs
    q, (_, k) = t["q"], transposed(built, "k", case.k, keep_s)
    by_value = case.scale_by == "value"
    factor = built.number(1 / SCALE if case.scale_by == "div" else SCALE, by_value, "scale")
    scale = graph.div if case.scale_by == "div" else graph.scale
    q = scale(q, factor, name="scale_q") if case.scale == "q" else q
    k = scale(k, factor, name="scale_k") if case.scale == "k" else k
    lengths = case.overrides and {"m_override": t.get("len_q"), "n_override": t.get("len_k")}
    scores = graph.matmul(q, k, padding=-5.0, name="bmm1", **lengths or {})
    if case.scale == "scores":
        scores = scale(scores, factor, name="scale_scores")
    if case.bias is not None:
        scores = graph.bias(scores, t["bias"], name="add_bias")
    scores = masked(built, scores)
    weights = s = _softmax(built, scores)
    if case.dropout is not None:
        if case.dropout == "rng":
            drawn = graph.rng(t["seed"], t["offset"], bernoulli_probability=P_KEEP, name="rng")
            drawn.set_dim(case.scores_dim)
        else:
            drawn = t["keep"]
        by_value = case.fill == "value" and case.dropout == "rng"
        inverse = built.number(1 / P_KEEP, by_value, "inverse")
        s = graph.mul(weights, drawn, name="drop")
        weights = graph.mul(s, inverse, name="scale_kept")
    for output in built.outputs.values():
        output.set_output(True)
        if not keep_s:
            output.set_data_type(FLOAT)
    if keep_s or opaque:
        built.outputs["s"] = s.set_output(True)
        s.set_data_type(case.data_type)
    if opaque:
        s.set_reordering_type(cudnn.tensor_reordering.F16x16)
    if lengths:
        lengths["k_override"] = lengths.pop("n_override")
    o = graph.matmul(weights, t["v"], name="bmm2", **lengths or {})
    built.outputs["o"] = o.set_output(True)
    return built


def transposed(built: Built, role: str, how: str, as_declared: bool) -> tuple[Any, Any]:
    """k or v, and what it is transposed, where both are of one tensor of the graph."""
    case, graph = built.case, built.graph
    b, h, s, d = built.given[role].shape
    dim, stride = (b, h, d, s), (h * s * d, s * d, 1, d)
    if how == "declared":
        t = graph.tensor(dim, stride, name=role)
        # Packs may hold k as it is declared; and as it is, where attention is found.
        as_it_is = case.seed % 3 == 0 and not as_declared
        given = built.given[role]
        built.pack[t] = given if as_it_is else given.swapaxes(2, 3)
        return graph.transpose(t, (0, 1, 3, 2), name=f"{role}_as_rows"), t
    t = built.inputs[role]
    if how == "transpose":
        return t, graph.transpose(t, (0, 1, 3, 2), name=f"{role}_transposed")
    return t, graph.reshape(t, name=f"{role}_viewed").set_dim(dim).set_stride(stride)


def masked(built: Built, scores: Any, fill: Any = None) -> Any:
    """Scores, or their gradients, with what is masked set to a number."""
    case, graph, t = built.case, built.graph, built.inputs
    value = -np.inf if case.fill == "-inf" else -1e20
    fill = fill or built.number(value, case.fill == "value", "fill")
    row, col = (graph.gen_index(scores, axis, name=f"index{axis}") for axis in (2, 3))
    keeps = []
    if "q" in case.padding:
        keeps.append(graph.cmp_lt(row, t["len_q"], name="in_q"))
    if "k" in case.padding:
        keeps.append(graph.cmp_gt(t["len_k"], col, name="in_k"))
    diagonal = row
    if case.bottom_right:
        if case.padding:
            ends = [
                t.get(f"len_{side}") or graph.tensor_scalar(size)
                for side, size in (("k", case.seq_kv), ("q", case.seq_q))
            ]
            diagonal = graph.sub(graph.add(row, ends[0]), ends[1], name="diagonal")
        else:
            shift = graph.tensor_scalar(case.seq_kv - case.seq_q)
            diagonal = graph.add(shift, row, name="diagonal")
    if case.causal is not None:
        last = graph.add(diagonal, graph.tensor_scalar(case.causal), name="last")
        keeps.append(graph.cmp_ge(last, col, name="causal"))
    if case.window is not None:
        first = graph.sub(diagonal, graph.tensor_scalar(case.window), name="first")
        keeps.append(graph.cmp_lt(first, col, name="window"))
    keeps += [t[role] for role in ("mask", "mask_keys") if role in t]
    if case.joined and keeps:
        together = keeps[0]
        for keep in keeps[1:]:
            together = graph.logical_and(together, keep)
        return graph.binary_select(scores, fill, together, name="select")
    for number, keep in enumerate(keeps):
        if number % 2 and keep not in (t.get("mask"), t.get("mask_keys")):
            dropped = graph.logical_not(keep, name=f"not{number}")
            scores = graph.binary_select(fill, scores, dropped, name=f"select{number}")
        else:
            scores = graph.binary_select(scores, fill, keep, name=f"select{number}")
    return scores


def _softmax(built: Built, scores: Any) -> Any:
    case, graph = built.case, built.graph
    if case.softmax == "node":
        weights, stats = graph.softmax(scores, generate_stats=case.stats, name="softmax")
        if case.stats:
            built.outputs["stats"] = stats
        return weights
    row = (*case.scores_dim[:3], 1)
    highest = graph.reduction(scores, cudnn.reduction_mode.MAX, name="max").set_dim(row)
    exp = graph.exp(graph.sub(scores, highest, name="shift"), name="exp")
    total = graph.reduction(exp, cudnn.reduction_mode.ADD, name="sum").set_dim(row)
    if case.stats:
        stats = graph.add(graph.log(total, name="log"), highest, name="stats")
        built.outputs |= {"score_max": highest, "score_sum_exp": total, "stats": stats}
    if case.seed % 2:
        return graph.mul(exp, graph.reciprocal(total, name="inverse"), name="divide")
    return graph.div(exp, total, name="divide")
