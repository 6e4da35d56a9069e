"""``flash_attn_with_kvcache`` on the CPU."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from dlattn.errors import (
    InvalidArgumentError,
    InvalidVariantPackError,
    cudnnGraphNotSupportedError,
)
from dlattn.flash import flash_attn_with_kvcache
from dlattn.flash.kvcache import _calls
from tests.callers import Caller
from tests.flash_strategies import cache_cases
from tests.kvcache import CacheCase, check_cache


@settings(max_examples=300)
@given(cache_cases())
def test_numpy(case: CacheCase) -> None:
    """Of NumPy arrays, outputs and caches are right."""
    check_cache(case, Caller("numpy"))


@settings(max_examples=100)
@given(cache_cases())
def test_torch(case: CacheCase) -> None:
    """Of torch tensors, outputs and caches are right."""
    pytest.importorskip("torch")
    check_cache(case, Caller("torch"))


def test_signature() -> None:
    """The arguments are FlashAttention-2's, in its order, with its defaults; more are keywords."""
    given = inspect.signature(flash_attn_with_kvcache).parameters.values()
    names = """q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx
        cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved
        alibi_slopes num_splits return_softmax_lse"""
    assert [it.name for it in given if it.kind is not it.KEYWORD_ONLY] == names.split()
    defaults = {it.name: it.default for it in given if it.default not in (None, it.empty)}
    assert defaults == {
        "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True,
        "num_splits": 0, "return_softmax_lse": False,
    }  # fmt: skip


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return np.zeros(shape, dtype)


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


GIVEN = {
    "q": zeros(2, 1, 4, 8),
    "k_cache": zeros(3, 48, 2, 8),
    "v_cache": zeros(3, 48, 2, 8),
    "cache_seqlens": ints(5, 7),
}
NEW = {"k": zeros(2, 1, 2, 8), "v": zeros(2, 1, 2, 8)}
ANGLES = {"rotary_cos": zeros(48, 4), "rotary_sin": zeros(48, 4)}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no cache": ({"k_cache": None}, "k_cache: expected a tensor, got None"),
    "dimensions": ({"q": zeros(2, 4, 8)}, "q: expected shape"),
    "no query": ({"q": zeros(2, 0, 4, 8)}, "q: expected one query or more"),
    "heads": ({"q": zeros(2, 1, 3, 8)}, "k_cache: expected a number of heads"),
    "columns": ({"k_cache": zeros(3, 48, 2, 16)}, "k_cache: expected shape"),
    "rows of v": ({"v_cache": zeros(3, 47, 2, 8)}, "v_cache: expected shape"),
    "entries": ({"q": zeros(4, 1, 4, 8)}, "k_cache: expected an entry for each of 4 sequences"),
    "type": ({"v_cache": zeros(3, 48, 2, 8, dtype=np.float32)}, "v_cache: expected elements of"),
    "lengths": ({"cache_seqlens": ints(1, 2, 3)}, "cache_seqlens: expected shape"),
    "negative length": ({"cache_seqlens": -1}, "cache_seqlens: expected 0 or more"),
    "k alone": ({"k": NEW["k"]}, "k and v are given together"),
    "k without lengths": ({**NEW, "cache_seqlens": None}, "cache_seqlens: k and v are written"),
    "new heads": ({**NEW, "k": zeros(2, 1, 1, 8)}, "k: expected shape"),
    "read-only": (
        {**NEW, "k_cache": np.broadcast_to(zeros(1, 48, 2, 8), (3, 48, 2, 8))},
        "k_cache: it is written to",
    ),
    "angles without k": (ANGLES, "rotary_cos and rotary_sin turn queries and new keys"),
    "angles of a type": (
        {
            **{name: np.zeros(x.shape, np.float32) for name, x in {**GIVEN, **NEW}.items()},
            **{name: np.zeros(x.shape) for name, x in ANGLES.items()},
            "cache_seqlens": ints(5, 7),
        },
        "rotary_cos: expected elements of FLOAT, got DOUBLE",
    ),
    "one angle": ({**NEW, "rotary_cos": zeros(48, 4)}, "rotary_cos and rotary_sin are given"),
    "few angles": (
        {**NEW, "rotary_cos": zeros(47, 4), "rotary_sin": zeros(47, 4)},
        "rotary_cos: expected a row for each of the 48 positions",
    ),
    "wide angles": (
        {**NEW, "rotary_cos": zeros(48, 5), "rotary_sin": zeros(48, 5)},
        "rotary_cos: expected 1 to 4 columns",
    ),
    "angles apart": (
        {**NEW, "rotary_cos": zeros(48, 8)[:, ::2], "rotary_sin": zeros(48, 4)},
        "rotary_cos: expected a contiguous tensor",
    ),
    "table": ({"block_table": ints(0, 1)}, "block_table: expected shape"),
    "table and entries": (
        {"block_table": ints(0, 1).reshape(2, 1), "cache_batch_idx": ints(0, 1)},
        "cache_batch_idx: a cache in pages has no entries",
    ),
    "table and padding": (
        {"block_table": ints(0, 1).reshape(2, 1), "cache_leftpad": ints(0, 1)},
        "cache_leftpad: a cache in pages has no entries",
    ),
    "padding": ({"cache_leftpad": ints(0)}, "cache_leftpad: expected shape"),
    "window": ({"window_size": 3}, r"window_size: expected \(left, right\)"),
    "no bound": ({"window_size": (None, 0)}, "^window_size: expected an integer, got None"),
    "causal": ({"causal": "yes"}, "^causal: expected True or False"),
    "splits": ({"num_splits": -1}, "num_splits: expected 0 or more"),
    "slopes": ({"alibi_slopes": zeros(3, dtype=np.float32)}, "alibi_slopes: expected shape"),
    "out": ({"out": zeros(2, 1, 4, 16)}, "out: expected shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """Arguments that contradict each other are refused by name."""
    changes, message = REFUSED[name]
    with pytest.raises(InvalidArgumentError, match=message):
        flash_attn_with_kvcache(**{**GIVEN, **changes})


@pytest.mark.parametrize("rows", [44, 48])
def test_full_cache(rows: int) -> None:
    """In host memory, tokens that do not fit are refused, and nothing is written."""
    caches = {"k_cache": zeros(2, 48, 2, 8), "v_cache": zeros(2, 48, 2, 8)}
    given = {**GIVEN, **caches, "cache_seqlens": ints(3, rows)}
    new = {name: np.ones((2, 5, 2, 8), np.float16) for name in ("k", "v")}
    with pytest.raises(InvalidVariantPackError, match="do not fit the 48 rows"):
        flash_attn_with_kvcache(**given, **new)
    assert not any(cache.any() for cache in caches.values())


def test_no_page() -> None:
    """In host memory, a page that the cache does not have is refused."""
    table = ints(0, 1, 2, 7).reshape(2, 2)
    given = {**GIVEN, "cache_seqlens": ints(5, 48), "block_table": table}
    with pytest.raises(InvalidVariantPackError, match="block_table"):
        flash_attn_with_kvcache(**given, **NEW)


#: Of a cache of 3 entries, or of pages: what tensors say that cannot be, and the refusal.
FALSE: dict[str, tuple[dict[str, Any], str]] = {
    "entry": (
        {"cache_batch_idx": ints(0, 3)},
        r"cache_batch_idx: sequence 1, of . rows, has \[3\]",
    ),
    "negative entry": ({"cache_batch_idx": ints(-1, 1)}, r"cache_batch_idx: sequence 0, .* \[-1\]"),
    "entry, padded": (
        {"cache_batch_idx": ints(3, 0), "cache_leftpad": ints(0, 1)},
        r"cache_batch_idx: sequence 0, of . rows, has \[3\]; expected numbers from 0 to 2",
    ),
    "page": (
        {"block_table": ints(0, 1, 2, 3).reshape(2, 2)},
        r"block_table: sequence 1, .*\[2, 3\]",
    ),
    "page of old tokens": (
        {"block_table": ints(0, 1, 3, 2).reshape(2, 2)},
        r"block_table: sequence 1, .*\[3, 2\]",
    ),
    "negative length": (
        {"cache_seqlens": ints(-1, 7)},
        r"cache_seqlens: expected 0 or more .*-1, 7",
    ),
    "negative length of int64": ({"cache_seqlens": np.array([3, -2])}, "cache_seqlens: expected 0"),
    "negative padding": ({"cache_leftpad": ints(0, -1)}, "cache_leftpad: expected 0 or more"),
}


@pytest.mark.parametrize("rows", [4, 6])
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("name", FALSE)
def test_what_tensors_say_is_checked_first(name: str, appends: bool, rows: int) -> None:
    """In host memory, what cannot be is refused by its name, by every call, and before anything is
    written, also to the pages that there are."""
    changes, message = FALSE[name]
    rows = rows if "block_table" in changes else 2 * rows
    caches = {it: np.ones((3, rows, 2, 8), np.float16) for it in ("k_cache", "v_cache")}
    given = {"q": GIVEN["q"], "cache_seqlens": ints(2, rows + 1 if rows < 8 else 7), **caches}
    given |= NEW if appends else {}
    right = {it: abs(x) % 3 if it != "cache_seqlens" else abs(x) for it, x in changes.items()}
    flash_attn_with_kvcache(**{**given, **right, **{it: x.copy() for it, x in caches.items()}})
    with pytest.raises((InvalidArgumentError, InvalidVariantPackError), match=message):
        flash_attn_with_kvcache(**{**given, **changes})
    assert all((cache == 1).all() for cache in caches.values())


@pytest.mark.parametrize("rows", [4, 6])
@pytest.mark.parametrize("lengths", [(2, 2), (1, 2)])
@pytest.mark.parametrize("name", ["cache_batch_idx", "cache_leftpad", "block_table"])
def test_no_two_sequences_append_to_one_row(name: str, lengths: tuple[int, int], rows: int) -> None:
    """In host memory, it is refused before anything is written; who only reads may share."""
    tables = {"cache_batch_idx": ints(1, 1), "cache_leftpad": ints(0, 1)}
    options = {it: tables[it] for it in ("cache_batch_idx", name) if it in tables}
    if name == "block_table":
        options = {name: ints(0, 1, 0, 1).reshape(2, 2)}
    q, new = np.ones((2, 1, 4, 8)), np.ones((2, 2, 2, 8))
    k, v = np.zeros((2, 3, rows, 2, 8))
    given = {"cache_seqlens": ints(*lengths), **options}
    flash_attn_with_kvcache(q, k, v, **given)
    with pytest.raises(InvalidVariantPackError, match="one row .* sequence 0 and of sequence 1;"):
        flash_attn_with_kvcache(q, k, v, new, new, **given)
    assert (k == 0).all() and (v == 0).all()


def test_entries_of_no_row_mean_nothing() -> None:
    """A sequence that has no row, and gets none, needs no entry or page."""
    q, cache = np.ones((2, 1, 4, 8)), np.ones((3, 4, 2, 8))
    for options in (
        {"cache_batch_idx": ints(7, 1)},
        {"cache_batch_idx": ints(7, 1), "cache_leftpad": ints(0, 1)},
        {"block_table": ints(7, 7, 1, 7).reshape(2, 2)},
    ):
        out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=ints(0, 3), **options)
        assert (out[0] == 0).all() and (out[1] == 1).all()


def test_pages_that_cannot_be_divided() -> None:
    """Pages at no whole number of rows from each other are read if they are of a power of two."""
    memory = zeros(4 * 60)
    pages = np.lib.stride_tricks.as_strided(memory, (4, 3, 2, 8), (100, 32, 16, 2))
    given = {"q": GIVEN["q"], "block_table": ints(0, 1).reshape(2, 1), "cache_seqlens": ints(2, 3)}
    with pytest.raises(cudnnGraphNotSupportedError, match="Pass contiguous caches"):
        flash_attn_with_kvcache(k_cache=pages, v_cache=pages, **given)


def test_a_step_makes_no_new_plan() -> None:
    """The number of cached tokens is no part of what a call looks like."""
    cache = [zeros(2, 48, 2, 8) for _ in "kv"]
    flash_attn_with_kvcache(GIVEN["q"], *cache, *NEW.values(), cache_seqlens=0, causal=True)
    kept = len(_calls)
    for step in range(1, 20):
        flash_attn_with_kvcache(GIVEN["q"], *cache, *NEW.values(), cache_seqlens=step, causal=True)
    assert len(_calls) == kept


def test_jax() -> None:
    """JAX arrays, which nothing can write to, are attended to, and not appended to."""
    jax = pytest.importorskip("jax")
    arrays = {name: jax.numpy.asarray(x) for name, x in GIVEN.items()}
    assert isinstance(flash_attn_with_kvcache(**arrays), jax.Array)
    new = {name: jax.numpy.asarray(x) for name, x in NEW.items()}
    with pytest.raises(InvalidArgumentError, match="k_cache: it is written to"):
        flash_attn_with_kvcache(**arrays, **new)


@pytest.mark.parametrize("length", [2**31 - 1, 2**31, 2**40, np.uint64(2**63)])
def test_a_number_of_any_size_is_a_full_cache(length: Any) -> None:
    """As one in a tensor is, where nothing is appended; else nothing has room."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=GIVEN[name].shape).astype(np.float16)
        for name in ("q", "k_cache", "v_cache")
    }
    full = flash_attn_with_kvcache(**tensors)
    for said in (length, np.full(2, min(int(length), 2**63 - 1))):
        given = {**tensors, "cache_seqlens": said}
        assert (flash_attn_with_kvcache(**given) == full).all()
        with pytest.raises(InvalidVariantPackError, match="do not fit"):
            flash_attn_with_kvcache(**given, **NEW)
