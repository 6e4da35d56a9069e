"""Lengths of packed sequences in host memory: none has rows of another, and none is cut short."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

import dlattn
from dlattn.errors import InvalidArgumentError
from dlattn.flash import mha_varlen_bwd, mha_varlen_fwd

#: Three sequences, and a row of none.
CU = np.array([0, 2, 6, 7], np.int32)
SIZES = np.diff(CU)
ROWS = 8


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def flash(rows: Any, memory: Any, longest: Any, used_q: Any, used_k: Any) -> None:
    mha_varlen_fwd(rows, rows, rows, memory, CU, CU, used_k, None, None, *longest, seqused_q=used_q)


def flash_backward(rows: Any, memory: Any, longest: Any, used_q: Any, used_k: Any) -> None:
    lse = np.zeros((1, ROWS), np.float32)
    mha_varlen_bwd(
        rows, rows, rows, rows, rows, lse, memory, None, None, CU, CU, None, *longest,
        seqused_q=used_q, seqused_k=used_k,
    )  # fmt: skip


def options(longest: Any, used_q: Any, used_k: Any) -> dict[str, Any]:
    return {
        "layout": "thd", "cu_seqlens": CU, "max_seqlens": longest, "lengths": (used_q, used_k),
    }  # fmt: skip


def attention(rows: Any, memory: Any, *given: Any) -> None:
    dlattn.attention(rows, rows, rows, out=memory, **options(*given))


def attention_backward(rows: Any, memory: Any, *given: Any) -> None:
    lse = np.zeros((1, ROWS))
    dlattn.attention_backward(rows, rows, rows, rows, rows, lse, dq=memory, **options(*given))


FUNCTIONS = [flash, flash_backward, attention, attention_backward]
WRONG = {
    "fewer queries": ((3, 4), None, None, "cu_seqlens.*q: expected sequences of at most 3 rows"),
    "fewer keys": ((4, 3), None, None, "cu_seqlens.*k.*: expected sequences of at most 3 rows"),
    "no queries": ((0, 4), None, None, "cu_seqlens.*q: expected sequences of at most 0 rows"),
    "no keys": ((4, 0), None, None, "cu_seqlens.*k.*: expected sequences of at most 0 rows"),
    "fewer used": ((4, 2), None, ints(2, 3, 1), "expected sequences of at most 2 rows"),
    "queries": ((4, 4), ints(3, 4, 1), None, r"q: expected at most the rows .* \[2, 4, 1\], got"),
    "keys": ((4, 4), None, ints(2, 4, 2), r"k.*: expected at most the rows .* \[2, 4, 1\], got"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", WRONG)
def test_lengths_that_are_not_a_sequences_own_are_refused(function: Any, name: str) -> None:
    """A maximum below a length, and a length beyond a sequence, are refused by every call, before
    anything is written."""
    longest, used_q, used_k, message = WRONG[name]
    rows = np.random.default_rng(0).normal(size=(ROWS, 1, 8))
    right = (
        (4, 4),
        *(None if used is None else SIZES.astype(np.int32) for used in (used_q, used_k)),
    )
    for before in ([], [right]):
        for given in before:
            function(rows, np.zeros_like(rows), *given)
        memory = np.full_like(rows, 7)
        with pytest.raises(InvalidArgumentError, match=message):
            function(rows, memory, longest, used_q, used_k)
        assert (memory == 7).all()


@pytest.mark.parametrize("longest", [(4, 4), (5, 100), (10**6, 6)])
def test_maxima_may_be_larger(longest: Any) -> None:
    """They change nothing: each sequence, as far as it is used, attends as it would alone."""
    q, k, v = np.random.default_rng(0).normal(size=(3, ROWS, 1, 8))
    for used in (SIZES, ints(1, 0, 1), ints(2, 3, 0)):
        memory = np.full_like(q, 7)
        mha_varlen_fwd(
            q, k, v, memory, CU, CU, used.astype(np.int32), None, None, *longest, is_causal=False
        )
        for begin, size, count in zip(CU, SIZES, used, strict=False):
            own = slice(begin, begin + size)
            scores = q[own, 0] @ k[begin : begin + count, 0].T / np.sqrt(8)
            weights = np.exp(scores)
            total = weights.sum(1, keepdims=True) if count else 1
            want = weights / total @ v[begin : begin + count, 0]
            np.testing.assert_allclose(memory[own, 0], want, atol=1e-12)
        assert (memory[-1] == 7).all()


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("longest", [(4, 5), (6, 4)])
def test_one_tensor_of_lengths_beside_two_maxima(framework: str, longest: Any) -> None:
    """Maxima are bounds, and say nothing of lengths: one tensor is both of a pair, unless queries
    and keys are packed in other numbers of rows."""
    library = pytest.importorskip(framework)
    maker = {"torch": "from_numpy", "jax": "numpy.asarray", "numpy": "asarray"}[framework]
    made = attrgetter(maker)(library)
    home = import_module("dlattn" if framework == "numpy" else f"dlattn.{framework}")
    rows = np.random.default_rng(0).normal(size=(3, ROWS, 1, 8)).astype(np.float32)
    q, k, v = (made(x) for x in rows)
    used, more = made(ints(1, 3, 1)), made(np.append(CU, ROWS)[[0, 1, 2, 4]].astype(np.int32))

    def attend(lengths: Any, k: Any = k, v: Any = v, ends: Any = more) -> Any:
        packed = {"layout": "thd", "cu_seqlens": (made(CU), ends), "max_seqlens": longest}
        return np.asarray(home.attention(q, k, v, lengths=lengths, **packed))

    some = np.concatenate([np.arange(b, b + n) for b, n in zip(CU, (1, 3, 1), strict=False)])
    np.testing.assert_array_equal(attend(used)[some], attend((used, used))[some])
    with pytest.raises(InvalidArgumentError, match="lengths: .* q has 8 rows and k 7; give a pair"):
        attend(used, k[:7], v[:7], made(CU))


def test_lengths_of_keys_in_pages() -> None:
    """Their cumulative lengths say no more than lengths, which the maximum and the pages bound."""
    q, pages = np.zeros((ROWS, 1, 8)), np.zeros((3, 2, 1, 8))
    table = ints(0, 1, 1, 2, 2, 0).reshape(3, 2)
    where = (table, None, 4, 4)
    mha_varlen_fwd(q, pages, pages, None, CU, CU, ints(4, 4, 4), *where)
    mha_varlen_fwd(q, pages, pages, None, CU, CU, None, *where)
    with pytest.raises(InvalidArgumentError, match="seqused_k: expected sequences of at most 4"):
        mha_varlen_fwd(q, pages, pages, None, CU, CU, ints(4, 5, 4), *where)
    with pytest.raises(InvalidArgumentError, match="cu_seqlens_k: expected sequences of at most 4"):
        mha_varlen_fwd(q, pages, pages, None, CU, CU + ints(0, 3, 4, 4), None, *where)


@pytest.mark.parametrize("sequences", [0, 2])
@pytest.mark.parametrize("sinks", [None, np.zeros(1, np.float32)])
def test_rows_of_no_query_keep_what_they_hold(sequences: int, sinks: Any) -> None:
    """Where there are keys and no query at all, every row is one of no sequence: it is not written,
    or with zero_tensors 0, with a log-sum-exp of -inf."""
    rows = np.random.default_rng(0).normal(size=(ROWS, 1, 8))
    begins_q, begins_k = np.zeros(sequences + 1, np.int32), ints(0, 2, 6)[: sequences + 1]
    for longest in (0, 4):
        for zero_tensors, held in ((False, 7.0), (True, 0.0)):
            memory = np.full_like(rows, 7.0)
            _, _, _, _, lse, *_ = mha_varlen_fwd(
                rows, rows, rows, memory, begins_q, begins_k, None, None, None, longest, 4,
                zero_tensors=zero_tensors, sinks=sinks,
            )  # fmt: skip
            assert (memory == held).all()
            assert not zero_tensors or (lse == -np.inf).all()
