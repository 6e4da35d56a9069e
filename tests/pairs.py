"""Few cases in which every two features meet: a covering array over features of ``Case``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from tests.cases import RAGGED_KV, RAGGED_Q, Case

Level = Callable[[Case], Case]
#: Of some features, levels that are left out.
Without = Mapping[str, Sequence[int]]
NOTHING: Without = {}

#: What every case begins as.
PLAIN = Case(
    dtype="float16",
    batch=2,
    heads_q=4,
    heads_k=4,
    heads_v=4,
    seq_q=140,
    seq_kv=140,
    head_dim_qk=64,
    head_dim_v=64,
    scale=0.125,
)


def _with(**fields: Any) -> Level:
    return lambda case: replace(case, **fields)


def _paged(**fields: Any) -> Level:
    """With lengths, which pages need."""
    return lambda case: replace(case, len_q=case.lengths_q(), len_kv=case.lengths_kv(), **fields)


def _ragged(*roles: str, **fields: Any) -> Level:
    """Those of the roles that do not lie in pages."""
    return lambda case: replace(
        case, ragged=tuple(role for role in roles if not case.page(role)), **fields
    )


def _padded(case: Case) -> Case:
    m, n = case.seq_q, case.seq_kv
    return replace(case, len_q=(m, m // 2), len_kv=(n - n // 3, n))


_CAPPED = ("mul", ("tanh", ("div", "s", 4.0)), 4.0)
_BENT = ("add", ("mul", ("sigmoid", "s"), "factor"), ("mul", "table", ("sin", "s")))

#: A feature and its levels, one of which each case has. A new one is a line; later lines see the
#: fields of those before.
FEATURES: dict[str, tuple[Level, ...]] = {
    "dtype": (_with(), _with(dtype="bfloat16")),
    "lengths": (_with(), _with(seq_kv=300), _with(seq_q=300), _with(seq_q=1)),
    "padding": (_with(), _padded),
    "pages": (
        _with(),
        _paged(page_k=16, page_v=64),
        _paged(page_k=256, page_v=8, packed_tables=True),
        _paged(page_v=2),
    ),
    "ragged": (
        _with(),
        _ragged(*RAGGED_Q, *RAGGED_KV, lengths_as="offsets", offset_dtype="int64"),
        _ragged(*RAGGED_Q, gaps=True, bounded=True),
    ),
    "heads": (_with(), _with(heads_k=2, heads_v=1)),
    "head dims": (_with(), _with(head_dim_v=32), _with(head_dim_qk=128, head_dim_v=264)),
    "scale": (_with(), _with(scale_as="host"), _with(scale_as="device")),
    "softcap": (_with(), _with(softcap=2.0)),
    "score mod": (
        _with(),
        _with(score_mod=(_CAPPED, ("cmp_eq", "documents_q", "documents_k")), d_mods="float16"),
        _with(score_mod=(_BENT, ("cmp_ge", ("add", "row", 60), "col")), d_mods="float32"),
    ),
    "bias": (
        _with(),
        _with(bias="float16", d_bias="float16"),
        _with(bias="bool", bias_axes="bqk"),
        _with(bias="float32", bias_axes="hk", d_bias="bfloat16"),
    ),
    "alibi": (_with(), _with(alibi="cudnn"), _with(alibi="BH")),
    "right": (_with(), _with(right=0)),
    "left": (_with(), _with(left=70)),
    "bottom right": (_with(), _with(bottom_right=True)),
    "blocks": (_with(), _with(blocks=0.6)),
    "sink": (_with(), _with(sink=0.5)),
    "dropout": (
        _with(),
        _with(dropout=0.3),
        _with(dropout="uint8", dropout_axes="hqk"),
        _with(dropout=0.3, dropout_algorithm="flash"),
    ),
    "dropout's numbers": (_with(), _with(dropout_as="value"), _with(dropout_as="host")),
    "keep mask": (_with(), lambda case: replace(case, rng_dump=case.dropout is not None)),
    "a look inside": (_with(), _with(debug_softmax=True)),
    "rows": (_with(), _with(row_outputs=("score_max", "score_sum_exp"))),
    "deterministic": (_with(), _with(deterministic=True)),
    "layouts": (_with(), _with(layouts=(("q", "odd"), ("k", "packed"), ("dV", "sbhd")))),
}

#: Levels, by their index, that a family of kernels leaves to others whatever the other levels are.
LEFT_BY: dict[str, Without] = {
    "sm90": {"pages": (3,), "ragged": (2,), "head dims": (2,), "layouts": (1,)},
    "sm80": {"deterministic": (1,)},
}

#: Fields of ``Case`` that are no features, but numbers, or kinds of one.
NO_FEATURES = frozenset(
    (
        *(
            "batch",
            "heads_q",
            "scale",
            "stats",
            "bias_layout",
            "blocks_axes",
            "blocks_layout",
            "len_dtypes",
            "dropout_dtypes",
            "dropout_layout",
        ),
        *("wild_strides", "logits", "offset", "numbers", "tails", "seed"),
    )
)

#: A level of each feature, by its index.
Row = dict[str, int]
Pair = tuple[tuple[str, int], tuple[str, int]]


def levels_of(feature: str, without: Without) -> list[int]:
    """Of a feature, all but those that are left out."""
    return [n for n in range(len(FEATURES[feature])) if n not in without.get(feature, ())]


def every_pair(without: Without = NOTHING) -> set[Pair]:
    """Of levels of two features."""
    return {
        ((one, i), (other, j))
        for one, other in combinations(FEATURES, 2)
        for i in levels_of(one, without)
        for j in levels_of(other, without)
    }


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(((feature, row[feature]) for feature in FEATURES), 2))


def rows(without: Without = NOTHING) -> list[Row]:
    """Rows that have every pair between them, made one after another: each begins with a pair that
    none has yet, and takes of each other feature the level that adds most."""
    missing, found = sorted(every_pair(without)), []
    while missing:
        row = dict(missing[0])
        for feature in FEATURES:
            if feature not in row:
                levels = levels_of(feature, without)
                gains = [_gain(missing, row, (feature, level)) for level in levels]
                row[feature] = levels[gains.index(max(gains))]
        covered = pairs_of(row)
        missing = [pair for pair in missing if pair not in covered]
        found.append(row)
    return found


def cases(without: Without = NOTHING) -> list[Case]:
    """The case of each row; the data differ."""
    made = []
    for seed, row in enumerate(rows(without)):
        case = replace(PLAIN, seed=seed)
        for feature, levels in FEATURES.items():
            case = levels[row[feature]](case)
        made.append(case)
    return made


def _gain(missing: list[Pair], row: Row, new: tuple[str, int]) -> int:
    have = set(row.items())
    return sum(
        one == new and other in have or other == new and one in have for one, other in missing
    )
