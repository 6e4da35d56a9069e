"""Laws of attention that hold for every case, in double precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlattn.plans.reference import attention_forward
from dlattn.problem import Edit, Values, Where
from tests.builders import make_tensors
from tests.cases import Case
from tests.drivers import dropout_of, edits_of, masks_of, values_of
from tests.engine import backward, forward
from tests.libraries import Library
from tests.pages import by_sequence
from tests.strategies import cases

_doubles = cases(dtype="float64", stats="float64")
_undropped = cases(dtype="float64", stats="float64", dropout=None, rng_dump=False)
_unmasked = cases(
    dropout=None,
    rng_dump=False,
    dtype="float64", stats="float64", left=None, right=None, len_q=None, len_kv=None, alibi=None,
    bias=None, blocks=None,
)  # fmt: skip
_few = settings(max_examples=60)


def _arrays(case: Case) -> dict[str, Any]:
    arrays = {role: t.padded() for role, t in make_tensors(case, Library()).items()}
    return by_sequence(case, arrays)


def _close(x: Any, y: Any, size: float = 1.0) -> bool:
    """Equal up to the rounding of doubles among logits as large as a case has them."""
    same_infinities = (np.isinf(x) == np.isinf(y)).all()
    finite = np.isfinite(y)
    return bool(same_infinities and np.allclose(x[finite], y[finite], rtol=1e-9, atol=1e-9 * size))


@_few
@given(_undropped)
def test_rows_are_convex_combinations(case: Case) -> None:
    """No channel of o leaves the range that the valid values span in it."""
    arrays = _arrays(case)
    o, *_ = forward(case, arrays)
    v = arrays["v"].repeat(case.heads_q // case.heads_v, axis=1)
    for b, (m, n) in enumerate(zip(case.lengths_q(), case.lengths_kv(), strict=True)):
        if m and n:
            low, high = v[b, :, :n].min(1), v[b, :, :n].max(1)
            # A row that attends to nothing is 0, which the values need not span.
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            slack = 1e-12 * (high - low)
            assert (o[b] >= (low - slack)[:, None]).all() and (
                o[b] <= (high + slack)[:, None]
            ).all()


@_few
@given(_unmasked, st.randoms(use_true_random=False))
def test_order_of_keys_is_free(case: Case, random: Any) -> None:
    """Without a band, permuting keys and values together changes nothing."""
    arrays = _arrays(case)
    order = random.sample(range(case.seq_kv), case.seq_kv)
    shuffled = arrays | {role: arrays[role][:, :, order] for role in "kv"}
    for x, y in zip(forward(case, shuffled), forward(case, arrays), strict=True):
        assert _close(x, y)


@_few
@given(_unmasked, st.integers(0, 40))
def test_parts_combine_by_their_stats(case: Case, cut: int) -> None:
    """Attention over two parts of the keys, weighted by exp(stats), is attention over all; a sink
    belongs to one of them."""
    case, cut = replace(case, sink=None), min(cut, case.seq_kv)
    arrays = _arrays(case)
    parts = [
        forward(
            replace(case, seq_kv=keys.stop - keys.start),
            arrays | {role: arrays[role][:, :, keys] for role in "kv"},
        )
        for keys in (slice(0, cut), slice(cut, case.seq_kv))
    ]
    whole_o, whole_stats, largest, total = forward(case, arrays)
    assert _close(np.maximum(*(part.score_max for part in parts)), largest)
    assert _close(sum(p.score_sum_exp * np.exp(p.score_max - largest) for p in parts), total)
    assert _close(np.logaddexp(*(part.stats for part in parts)), whole_stats)
    assert _close(sum(part.o * np.exp(part.stats - whole_stats) for part in parts), whole_o)


@dataclass(frozen=True)
class _AddMinusInfinity(Edit):
    """The masks of a case, as an additive bias."""

    case: Case

    @property
    def cpp(self) -> str:
        return "AddMinusInfinity"

    def apply(self, score: Any, where: Where, values: Values) -> Any:
        keep = np.ones(score.shape, bool)
        for mask in masks_of(self.case):
            keep &= mask.keep(where, values)
        return score + np.where(keep, 0, -np.inf)

    def backward(self, grad: Any, score: Any, where: Where, values: Values) -> Any:
        return grad


@_few
@given(_doubles)
def test_a_mask_is_minus_infinity(case: Case) -> None:
    """Masking a position is adding -inf to its score."""
    arrays = _arrays(case)
    biased = attention_forward(
        *(arrays[role] for role in "qkv"),
        edits=(*edits_of(case), _AddMinusInfinity(case)),
        values=values_of(case, arrays),
        sink=arrays.get("sink_token"),
        dropout=dropout_of(case),
    )
    for x, y in zip(biased, forward(case, arrays), strict=True):
        assert _close(x, y)


@_few
@given(_doubles.filter(lambda case: case.alibi != "cudnn" and not case.is_random))
def test_batch_entries_and_heads_are_independent(case: Case) -> None:
    """Each batch entry and query head alone gives its own slice of o, stats and dQ, unless slopes
    depend on the number of heads, or Philox on the head's own."""
    arrays = _arrays(case)
    whole = (*forward(case, arrays), backward(case, arrays)[0])
    for b, h in np.ndindex(case.batch, case.heads_q):
        alone = replace(
            case,
            batch=1,
            heads_q=1,
            heads_k=1,
            heads_v=1,
            len_q=(case.lengths_q()[b],),
            len_kv=(case.lengths_kv()[b],),
        )
        heads = {"q": h, "dO": h, "k": h * case.heads_k // case.heads_q}
        heads["v"] = h * case.heads_v // case.heads_q
        part = {role: arrays[role][b : b + 1, i : i + 1] for role, i in heads.items()}
        for role in ("bias", "dropout_mask", "block_mask"):
            if role in arrays:
                heads_of = (case.batch, case.heads_q, *arrays[role].shape[2:])
                part[role] = np.broadcast_to(arrays[role], heads_of)[b : b + 1, h : h + 1]
        if case.alibi:
            slopes = values_of(case, arrays).alibi_slopes
            part["alibi_slopes"] = slopes[b % len(slopes), h].reshape(1, 1, 1, 1)
        if case.sink is not None:
            part["sink_token"] = arrays["sink_token"][:, h : h + 1]
        pieces = (*forward(alone, part), backward(alone, part)[0])
        for piece, all_of_it in zip(pieces, whole, strict=True):
            assert _close(piece, all_of_it[b : b + 1, h : h + 1], case.logits)


@_few
@given(cases(), st.sampled_from(("nan", "inf", "huge")))
def test_padding_never_matters(case: Case, tails: str) -> None:
    """What lies past the lengths changes no bit of any result."""
    one, other = (_arrays(replace(case, tails=kind)) for kind in (case.tails, tails))
    for x, y in zip(
        (*forward(case, one), *backward(case, one)),
        (*forward(case, other), *backward(case, other)),
        strict=True,
    ):
        assert x.tobytes() == y.tobytes()


@_few
@given(_doubles)
def test_stats_are_the_maximum_and_the_sum(case: Case) -> None:
    """The log-sum-exp is that of the others; a sum is at least its largest term, 1."""
    o, stats, largest, total = forward(case, _arrays(case))
    with np.errstate(divide="ignore"):
        assert _close(largest + np.log(total), stats, case.logits)
    alive = np.isfinite(stats)
    assert (total[alive] >= 1).all() and (total[~alive] == 0).all()
    assert (largest[~alive] == -np.inf).all() and (o[~alive[..., 0]] == 0).all()


@_few
@given(_doubles)
def test_a_sink_is_a_key_without_a_value(case: Case) -> None:
    """A sink does what one more key would do whose score is the same for every query, and whose
    value is 0; one of -infinity does nothing, in no bit."""
    case = replace(
        case, scale=1.0, scale_as="value", left=None, right=None, len_q=None, len_kv=None
    )
    case = replace(case, heads_k=case.heads_q, sink=0.5)
    arrays = _arrays(case)
    sinks = arrays["sink_token"]
    q, k, v = (arrays[role].astype(float) for role in "qkv")
    # A column of its own in q and k holds the score.
    q = np.concatenate([q, np.ones_like(q[..., :1])], -1)
    k = np.concatenate([k, np.zeros_like(k[..., :1])], -1)
    key = np.zeros_like(k[:, :, :1])
    key[..., -1] = sinks[..., 0]
    with_key = attention_forward(
        q, np.concatenate([k, key], 2), np.concatenate([v, np.zeros_like(v[:, :, :1])], 2)
    )
    for x, y in zip(attention_forward(q, k, v, sink=sinks), with_key, strict=True):
        assert _close(x, y, abs(case.offset) + case.logits)
    nothing = attention_forward(q, k, v, sink=np.full_like(sinks, -np.inf))
    for x, y in zip(nothing, attention_forward(q, k, v), strict=True):
        assert x.tobytes() == y.tobytes()


@_few
@given(_doubles)
def test_values_enter_linearly(case: Case) -> None:
    """o is linear in v."""
    arrays = _arrays(case)
    other = np.random.default_rng(1).standard_normal(arrays["v"].shape)
    mixed, mine, theirs = (
        forward(case, arrays | {"v": v})[0]
        for v in (2 * arrays["v"] - 3 * other, arrays["v"], other)
    )
    assert _close(mixed, 2 * mine - 3 * theirs)
