"""Random partial states: what merging them must give, in float64, and the check of what it does."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

import dlattn
from tests.libraries import Library


@dataclass(frozen=True)
class States:
    """One call of ``merge_states``; its repr is one line that evaluates to it.

    Attributes:
        dtypes: element types of the first output, and of the others.
        layout: as the function takes it.
        lead: sizes of the dimensions before heads and tokens.
        count: states; more or fewer than two are given stacked.
        stacked: two states are, too.
        column: log-sum-exps have a last dimension of size 1.
        padding: elements between rows of outputs, and between log-sum-exps.
        into: where results go: ``"new"``, ``"given"`` or ``"first"``, the first state's memory.
        empty: the share of log-sum-exps that are -inf or +inf.
        seed: of the data.
    """

    dtypes: tuple[str, str] = ("bfloat16", "bfloat16")
    layout: str = "bshd"
    lead: tuple[int, ...] = (2,)
    heads: int = 3
    tokens: int = 5
    head_dim: int = 64
    count: int = 2
    stacked: bool = False
    column: bool = False
    padding: int = 0
    into: str = "new"
    empty: float = 0.2
    seed: int = 0

    def __repr__(self) -> str:
        given = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"States({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    @property
    def is_stacked(self) -> bool:
        return self.stacked or self.count != 2

    @property
    def o_shape(self) -> tuple[int, ...]:
        rows = (self.heads, self.tokens) if self.layout == "bhsd" else (self.tokens, self.heads)
        return (*self.lead, *rows, self.head_dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (*self.lead, self.heads, self.tokens, *(1,) * self.column)


def check_states(case: States, library: Library) -> None:
    """Fails unless merging random states gives what it does in float64."""
    try:
        _check(case, library)
    except BaseException:
        print(f'pytest tests/test_repro.py --repro "{case!r}"')
        raise


def _check(case: States, library: Library) -> None:
    rng = np.random.default_rng(case.seed)
    o = rng.standard_normal((case.count, *case.o_shape))
    lse = 4 * rng.standard_normal((case.count, *case.lse_shape))
    is_empty = rng.random(lse.shape) < case.empty
    lse[is_empty] = rng.choice((-np.inf, np.inf), is_empty.sum())
    # What states without keys have for outputs does not matter.
    o[by_output(case, is_empty)] = np.nan
    types = [case.dtypes[0]] + [case.dtypes[0 if case.is_stacked else 1]] * (case.count - 1)
    o_given = [held(library, x, dtype, case.padding) for x, dtype in zip(o, types, strict=True)]
    lse_given = [held(library, x, "float32", case.padding) for x in lse]
    if case.is_stacked:
        arguments = [library.xp.stack(o_given), library.xp.stack(lse_given)]
        first = tuple(x[0] for x in arguments)
    else:
        arguments = [o_given[0], lse_given[0], o_given[1], lse_given[1]]
        first = (o_given[0], lse_given[0])
    out = {
        "new": None,
        "given": (held(library, o[0], types[0], 8), held(library, lse[0], "float32", 1)),
        "first": first,
    }[case.into]
    exact = [np.float64(to_numpy(x)) for x in o_given], [np.float64(to_numpy(x)) for x in lse_given]
    found = dlattn.merge_states(*arguments, layout=case.layout, out=out)
    if out is not None:
        assert found[0] is out[0] and found[1] is out[1]
    assert tuple(found[0].shape) == case.o_shape and tuple(found[1].shape) == case.lse_shape
    assert str(found[0].dtype) == str(o_given[0].dtype)
    assert str(found[1].dtype) == str(lse_given[0].dtype)
    compare(case, found, *exact)


def compare(case: States, found: Any, o: Any, lse: Any) -> None:
    """Against the definition, within rounding of the result and of fp32 arithmetic."""
    o, lse = np.stack(o), np.stack(lse)
    want, want_lse, most = merged(o, lse, lambda x: by_output(case, x))
    got, got_lse = (np.float64(to_numpy(x)) for x in found)
    # Exponents of up to 40 are rounded, and so is their exponential; the result is, too.
    info = ml_dtypes.finfo(case.dtypes[0])
    bound = 2e-5 * most + float(info.eps) / 2 * np.abs(want) + float(info.smallest_subnormal)
    assert (np.abs(got - want) <= bound).all(), f"o is off by {np.abs(got - want).max()}: {case!r}"
    np.testing.assert_allclose(got_lse, want_lse, rtol=3e-7, atol=3e-6, err_msg=repr(case))


def merged(o: Any, lse: Any, by_row: Any) -> tuple[Any, Any, Any]:
    """The definition: weights are exponentials of log-sum-exps, of empty states 0.

    Returns:
        The outputs, log-sum-exps, and outputs of the absolute values.
    """
    empty = np.isinf(lse)
    # Exponentials of numbers this small neither overflow nor vanish in float64.
    weights = np.where(empty, 0.0, np.exp(np.where(empty, 0.0, lse)))
    total = weights.sum(axis=0)
    rows, sums = by_row(weights), by_row(np.broadcast_to(total, lse.shape))[0]
    sums = np.where(sums == 0, 1.0, sums)
    values = np.where(rows == 0, 0.0, o) * rows / sums
    with np.errstate(divide="ignore"):
        union = np.where(total == 0, lse[0], np.log(total))
    return values.sum(axis=0), union, np.abs(values).sum(axis=0)


def by_output(case: States, x: Any) -> Any:
    """Numbers laid out as log-sum-exps, for each element of the outputs."""
    x = x.reshape(*x.shape[: 1 + len(case.lead)], case.heads, case.tokens)
    if case.layout != "bhsd":
        x = x.swapaxes(-1, -2)
    return np.broadcast_to(x[..., None], (*x.shape, case.head_dim))


def held(library: Library, values: Any, dtype: str, padding: int) -> Any:
    """An array of the library's, whose rows have so many elements more in memory."""
    wide = np.full((*values.shape[:-1], values.shape[-1] + padding), 7.0)
    wide[..., : values.shape[-1]] = values
    flat = library.cast(library.values(wide.reshape(-1).tolist(), "float32"), dtype)
    return flat.reshape(wide.shape)[..., : values.shape[-1]]


def to_numpy(x: Any) -> Any:
    """A float32 copy in NumPy."""
    if hasattr(x, "get"):
        x = x.get()
    elif hasattr(x, "cpu"):
        x = x.float().cpu().numpy()
    return np.array(x, np.float32)
