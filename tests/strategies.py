"""Random attention calls: every field of a :class:`tests.cases.Case` has a line that draws it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.cases import RAGGED_KV, RAGGED_Q, Case
from tests.primitive_strategies import SCORE_MODS
from tests.score_mods import names_in
from tests.states import States

#: Mostly those that every kernel has.
HEAD_DIMS = (*4 * [*range(8, 257, 8)], *range(264, 513, 8))

_FLOATS = ("bfloat16", "float16", "float32")
BIAS_DTYPES = (*_FLOATS, "bool", "uint8")

#: Roles whose memory layout a case may choose.
ROLES = (
    *("q", "k", "v", "o", "stats", "dO", "dQ", "dK", "dV"),
    *("score_max", "score_sum_exp", "sink_token", "dSink_token", "dBias"),
)

#: Layouts whose strides keep rows on 16-byte boundaries (see :func:`tests.builders.strides`).
ALIGNED_LAYOUTS = ("bshd", "bhsd", "sbhd", "packed", "padded")


@dataclass(frozen=True)
class Profile:
    """How large and how varied the cases are.

    Attributes:
        dtypes: element types to draw from, with the types of stats that go with each.
        edges: sequence lengths to draw often: one around each tile boundary.
        block_edges: lengths to draw often where there is a block mask.
        longest: longest sequence.
        heads: query heads to draw from.
    """

    dtypes: dict[str, tuple[str, ...]]
    edges: tuple[int, ...]
    block_edges: tuple[int, ...]
    longest: int
    heads: tuple[int, ...]


PROFILES = {
    "cpu": Profile(
        dtypes={
            "bfloat16": ("float32", "float32", "bfloat16"),
            "float16": ("float32",),
            "float32": ("float32", "float64"),
            "float64": ("float64", "float32"),
        },
        edges=(2, 7, 8, 9, 15, 16, 17, 33),
        block_edges=(127, 128, 129, 300),
        longest=40,
        heads=(1, 2, 3, 4, 6),
    ),
    "gpu": Profile(
        dtypes={"bfloat16": ("float32",), "float16": ("float32",)},
        edges=(
            *(2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129),
            *(159, 160, 161, 175, 176, 177, 191, 192, 193, 255, 256, 257, 383, 384, 385, 511, 513),
        ),
        block_edges=(128, 129, 300, 600, 1024, 1030, 1200),
        longest=600,
        heads=(1, 2, 3, 4, 6, 8, 12),
    ),
}


#: What is paged, k and v.
_PAGED = (*[(None, None)] * 4, (1, 1), (1, 1), (1, None), (None, 1))
PAGE_SIZES = (1, 2, 4, 8, 16, 16, 32, 64, 64, 128, 256, 1024)

_MAX, _SUM = "score_max", "score_sum_exp"
_ROW_OUTPUTS: tuple[tuple[str, ...], ...] = ((), (), (), (_MAX,), (_SUM,), (_MAX, _SUM))


#: Those of a bias, or of a mask of dropout's, that are not of size 1.
_AXES = ("bhqk", "bhqk", "hqk", "qk", "bk", "bq", "k", "")

_RAGGED = (
    (*RAGGED_Q, *RAGGED_KV),
    (*RAGGED_Q, *RAGGED_KV),
    ("q", "o", "dO", "dQ", *RAGGED_KV),
    RAGGED_Q,
    RAGGED_KV,
)


def cases(profile: str = "cpu", **fixed: Any) -> st.SearchStrategy[Case]:
    """Any case of a profile; ``fixed`` pins fields."""
    return families(profile, 1).map(lambda family: replace(family[0], **fixed))


@st.composite
def families(
    draw: st.DrawFn, profile: str = "cpu", size: int = 4, least: int = 1
) -> tuple[Case, ...]:
    """From ``least`` to ``size`` cases, no two alike, that share all that changes a kernel's code,
    so that one compilation serves them."""
    kind = draw(_kinds(PROFILES[profile]))
    aligned = draw(st.sampled_from((True, True, False)))
    members = _members(PROFILES[profile], kind, aligned)
    return tuple(draw(st.lists(members, min_size=least, max_size=size, unique=True)))


def for_hopper(case: Case) -> Case:
    """Of what Hopper's kernels leave to the portable ones whatever else a case has, what is next to
    it; so that few cases are theirs alone."""
    pages = {"page_k": case.page_k and max(8, case.page_k)}
    pages["page_v"] = case.page_v and max(8, case.page_v)
    ragged = case.ragged
    if ragged and not any(pages.values()):
        ragged = tuple(r for r in _RAGGED[0] if r in ragged or r in ("dQ", "dK", "dV"))
    return replace(
        case,
        head_dim_qk=min(256, case.head_dim_qk),
        head_dim_v=min(256, case.head_dim_v),
        layouts=tuple((role, "padded" if it == "odd" else it) for role, it in case.layouts),
        ragged=ragged,
        **pages,
    )


@st.composite
def _kinds(draw: st.DrawFn, profile: Profile) -> Case:
    """A case whose fields that change code are drawn; numbers are only present or absent."""
    head_dim_qk = draw(st.sampled_from(HEAD_DIMS))
    scale_as = draw(st.sampled_from(("value", "value", "value", "host", "device")))
    dtype = draw(st.sampled_from(tuple(profile.dtypes)))
    page_k, page_v = draw(st.sampled_from(_PAGED))
    bias = draw(st.sampled_from((*[None] * 6, *BIAS_DTYPES)))
    scales = [1.0, -0.5, 0.0, head_dim_qk**-0.5, head_dim_qk**-0.5]
    dropout = draw(st.sampled_from((*[None] * 6, 0.0, 0.1, 0.1, 0.1, *BIAS_DTYPES)))
    stats = draw(st.sampled_from((*profile.dtypes[dtype] * 3, None)))
    mods = st.just(None) if stats == "bfloat16" else st.none() | st.none() | SCORE_MODS
    mod = draw(mods)
    algorithms = (None, "philox", "flash", "flash") if isinstance(dropout, float) else (None,)
    return Case(
        dtype=dtype,
        head_dim_qk=head_dim_qk,
        head_dim_v=draw(st.just(head_dim_qk) | st.sampled_from(HEAD_DIMS)),
        scale=draw(st.sampled_from(scales if scale_as != "value" else [None, *scales])),
        scale_as=scale_as,
        softcap=draw(st.sampled_from((None, None, 1.0))),
        alibi=draw(st.sampled_from((None, None, None, "cudnn", "H"))),
        bias=bias,
        d_bias=draw(st.sampled_from((None, *_FLOATS))) if bias in _FLOATS else None,
        bias_axes=draw(st.sampled_from(_AXES)),
        bias_layout=draw(st.sampled_from(("keys", "aligned", "aligned", "queries"))),
        blocks=draw(st.sampled_from((*[None] * 5, 0.5))),
        left=draw(st.sampled_from((None, None, 1))),
        right=draw(st.sampled_from((None, 0))),
        page_k=page_k,
        page_v=page_v,
        stats=stats,
        score_mod=mod,
        d_mods=draw(st.sampled_from((None, *_FLOATS))) if mod and any(map(names_in, mod)) else None,
        row_outputs=draw(st.sampled_from(_ROW_OUTPUTS)),
        ragged=draw(st.sampled_from(((), (), _RAGGED[0]))),
        sink=draw(st.sampled_from((None, None, 0.0))),
        deterministic=draw(st.sampled_from((False, False, True))),
        dropout=dropout,
        dropout_algorithm=draw(st.sampled_from(algorithms)),
        dropout_axes=draw(st.sampled_from(_AXES)),
        dropout_layout=draw(st.sampled_from(("keys", "keys", "queries"))),
    )


@st.composite
def _members(draw: st.DrawFn, profile: Profile, kind: Case, aligned: bool) -> Case:
    """A case of the given kind."""
    batch = draw(st.integers(1, 3))
    heads_q = draw(st.sampled_from(profile.heads))
    divisors = st.sampled_from([h for h in range(1, heads_q + 1) if heads_q % h == 0])
    size = st.sampled_from(profile.edges) | st.integers(1, profile.longest)
    if kind.blocks is not None:
        size = st.sampled_from(profile.block_edges) | size
    few = st.integers(1, 16)
    seq_q, seq_kv = draw(size | size | few), draw(size)
    padded = draw(st.sampled_from(("none", "none", "both", "both", "q", "kv")))
    page = st.sampled_from(PAGE_SIZES)
    layouts = st.sampled_from(ALIGNED_LAYOUTS if aligned else (*ALIGNED_LAYOUTS, "odd", "odd"))
    bound = st.integers(0, max(seq_q, seq_kv) + 1) | st.just(0) | st.integers(-20, 0)
    # Stats of bfloat16 are off by more than 1 among large logits, and gradients then meaningless.
    exact_stats = kind.stats != "bfloat16"
    logits = (1.0, 1.0, 1.0, 0.01, 10.0, 10.0, *([100.0, 1000.0] * exact_stats))
    offsets = (0.0, 0.0, 0.0, *([-120.0, 120.0] * exact_stats))
    len_dtype = st.sampled_from(("int32", "int32", "int64"))
    chosen_logits, offset = draw(st.sampled_from(logits)), draw(st.sampled_from(offsets))
    sinks = (0.0, -3.0, offset, offset + chosen_logits)
    # FlashAttention's algorithm always keeps some.
    likely = (0.1, 0.1, 0.5, 0.9, 1e-5, *((1.0,) * (kind.dropout_algorithm != "flash")))
    probability = st.sampled_from(likely) if kind.dropout else st.just(0.0)
    given_mask = kind.dropout and not kind.is_random
    return replace(
        kind,
        batch=batch,
        heads_q=heads_q,
        heads_k=draw(divisors),
        heads_v=draw(divisors),
        seq_q=seq_q,
        seq_kv=seq_kv,
        softcap=None if kind.softcap is None else draw(st.sampled_from((0.5, 3.0, 30.0, 50.0))),
        alibi=draw(st.sampled_from(("H", "BH", "BH11"))) if kind.alibi == "H" else kind.alibi,
        bias_axes=draw(_axes(kind.bias_axes)) if kind.bias else "bhqk",
        blocks=None if kind.blocks is None else draw(st.sampled_from((0.1, 0.5, 0.9))),
        blocks_axes=draw(st.sampled_from(("bh", "bh", "b", "h", ""))) if kind.blocks else "bh",
        blocks_layout=draw(st.sampled_from(("keys", "queries"))) if kind.blocks else "keys",
        left=None if kind.left is None else 1 + draw(bound),
        right=None if kind.right is None else draw(bound),
        bottom_right=draw(st.booleans()),
        len_q=draw(_lengths(batch, seq_q)) if padded in ("both", "q") else None,
        len_kv=draw(_lengths(batch, seq_kv)) if padded in ("both", "kv") else None,
        len_dtypes=draw(st.tuples(len_dtype, len_dtype)),
        page_k=kind.page_k and draw(page),
        page_v=kind.page_v and draw(page),
        packed_tables=draw(st.booleans()),
        ragged=draw(_ragged(kind)) if kind.ragged else (),
        gaps=draw(st.booleans()),
        lengths_as=draw(st.sampled_from(("tensors", "offsets"))),
        offset_dtype=draw(len_dtype),
        bounded=draw(st.booleans()),
        layouts=tuple(
            (role, layout) for role in ROLES if (layout := draw(layouts)) != ALIGNED_LAYOUTS[0]
        ),
        wild_strides=draw(st.booleans()),
        sink=None if kind.sink is None else draw(st.sampled_from(sinks)),
        dropout=draw(probability) if kind.is_random else kind.dropout,
        dropout_as=draw(st.sampled_from(("device", "device", "host", "value"))),
        dropout_dtypes=draw(st.tuples(len_dtype, len_dtype)),
        dropout_axes=draw(_axes(kind.dropout_axes)) if given_mask else "bhqk",
        rng_dump=kind.dropout is not None and draw(st.booleans()),
        debug_softmax=draw(st.sampled_from((False, False, False, True))),
        logits=chosen_logits,
        offset=offset,
        numbers=draw(st.sampled_from(("normal", "normal", "sparse"))),
        tails=draw(st.sampled_from(("nan", "inf", "huge"))),
        seed=draw(st.integers(0, 2**16)),
    )


def _axes(of_kind: str) -> st.SearchStrategy[str]:
    """Keys are one of them, or are not, as of the kind: kernels read rows, or broadcast numbers."""
    return st.sampled_from([axes for axes in _AXES if ("k" in axes) == ("k" in of_kind)])


def _ragged(kind: Case) -> st.SearchStrategy[tuple[str, ...]]:
    """Some roles, of what is not paged; at least one."""
    some = st.sets(st.sampled_from(_RAGGED[0]), min_size=1)
    chosen = st.sampled_from(_RAGGED) | some.map(lambda roles: tuple(sorted(roles)))
    return chosen.map(lambda roles: tuple(r for r in roles if not kind.page(r)) or RAGGED_Q)


def _lengths(batch: int, longest: int) -> st.SearchStrategy[tuple[int, ...]]:
    length = st.sampled_from((longest, 0, longest)) | st.integers(1, longest)
    return st.tuples(*[length] * batch)


@st.composite
def call_cases(draw: st.DrawFn, profile: str = "cpu") -> Case:
    """Cases that ``dlattn.attention`` has arguments for."""
    case = draw(cases(profile))
    return replace(
        case,
        scale_as="value",
        alibi=draw(st.sampled_from((None, "H", "BH"))) if case.alibi else None,
        blocks=None,
        d_bias=case.d_bias and case.bias,
        left=None if case.left is None else max(1, case.left),
        right=None if case.right is None else max(0, case.right),
        page_k=None,
        page_v=None,
        ragged=(),
        stats=case.stats and ("float64" if case.dtype == "float64" else "float32"),
        row_outputs=(),
        score_mod=None,
        d_mods=None,
        dropout=case.dropout if case.is_random else None,
        dropout_algorithm=None,
        rng_dump=False,
    )


@st.composite
def states(draw: st.DrawFn) -> States:
    """Calls of ``merge_states``."""
    layout = draw(st.sampled_from(("bshd", "bhsd", "thd")))
    lead = () if layout == "thd" else draw(st.lists(st.integers(1, 3), max_size=3).map(tuple))
    types = st.sampled_from(("bfloat16", "float16", "float32"))
    first = draw(types)
    padding = draw(st.sampled_from((0, 0, 8, 1)))
    return States(
        dtypes=(first, draw(types)),
        layout=layout,
        lead=lead,
        heads=draw(st.integers(1, 5)),
        tokens=draw(st.integers(1, 40)),
        head_dim=draw(st.sampled_from((1, 7, 8, 24, 40, 64, 72, 128, 256, 300))),
        count=draw(st.sampled_from((2, 2, 1, 3, 8))),
        stacked=draw(st.booleans()),
        column=draw(st.booleans()),
        # Dimensions that lead are then not evenly spaced unless there is but one.
        padding=padding if len(lead) < 2 else 0,
        into=draw(st.sampled_from(("new", "given", "first"))) if len(lead) < 2 else "new",
        empty=draw(st.sampled_from((0.0, 0.2, 1.0))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
