"""Ways to run a case through functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import dlattn
from dlattn.errors import cudnnGraphNotSupportedError
from tests import oracle
from tests.builders import Guarded, check_poison_intact, make_tensors
from tests.cases import Case
from tests.drivers import Tensors
from tests.libraries import Library
from tests.states import to_numpy


@dataclass(frozen=True)
class Called:
    """A case that ``dlattn.attention`` and ``dlattn.attention_backward`` run."""

    case: Case

    def __repr__(self) -> str:
        return f"Called({self.case!r})"


#: What calls write, the log-sum-exp included.
_FORWARD = ("o", "stats")
_BACKWARD = ("dQ", "dK", "dV", "dBias", "dSink_token")

#: Where b, h, s and d are in a case's tensors.
_AXES = {"b": 0, "h": 1, "s": 2, "d": 3}


def check_attention(case: Case, library: Library) -> None:
    """Fails unless ``dlattn.attention``, and of cases with statistics its backward, give what the
    case should, and write nothing else."""
    try:
        tensors = make_tensors(case, library)
        run_attention(case, tensors)
        check_poison_intact(tensors)
        arrays = {role: it.padded() for role, it in tensors.items()}
        written = _FORWARD if case.stats is None else (*_FORWARD, *_BACKWARD)
        oracle.assert_close(case, arrays, {x: arrays[x] for x in written if x in arrays})
    except BaseException:
        print(f'pytest tests/test_repro.py --repro "{Called(case)!r}"')
        raise


def run_attention(case: Case, tensors: Tensors) -> None:
    """Runs a case in one of the layouts, into memory of its own or of the calls'."""
    layout = ("bshd", "bhsd", "sbhd")[case.seed % 3]

    def seen(role: str) -> Any:
        return permuted(tensors[role], layout)

    left, right = case.left, case.right
    dropout = None
    if case.dropout:
        seed, offset = case.philox()
        if case.dropout_as == "device":
            seed, offset = (tensors[f"dropout_{x}"].tensor for x in ("seed", "offset"))
        dropout = (case.dropout, seed, offset)
    lengths = [
        tensors[role].tensor[:, 0, 0, 0] if role in tensors else None
        for role in ("seq_len_q", "seq_len_kv")
    ]
    into = case.seed % 2 == 0
    options = {
        "layout": layout,
        "causal": left is None and right == 0,
        "window": None if left is None and right == 0 else (left and left - 1, right),
        "alignment": "bottom_right" if case.bottom_right else "top_left",
        "scale": case.scale_value,
        "softcap": case.softcap,
        "bias": tensors["bias"].tensor if case.bias else None,
        "alibi_slopes": tensors["alibi_slopes"].tensor if case.alibi else None,
        "sinks": tensors["sink_token"].tensor[0, :, 0, 0] if case.sink is not None else None,
        "lengths": tuple(lengths) if case.length_tensors() else None,
        "dropout": dropout,
    }
    found = dlattn.attention(
        *(seen(role) for role in "qkv"),
        **options,
        return_lse=case.stats is not None,
        out=seen("o") if into else None,
    )
    o, lse = found if case.stats else (found, None)
    if not into:
        seen("o")[...] = o
    if not case.stats:
        return
    tensors["stats"].tensor[..., 0] = lse

    def backward(deterministic: bool) -> dlattn.Gradients:
        return dlattn.attention_backward(
            *(seen(role) for role in ("dO", "q", "k", "v", "o")),
            lse,
            **options,
            bias_gradient=case.d_bias is not None,
            sinks_gradient=case.sink is not None,
            deterministic=deterministic,
            **({f"d{x}": seen(f"d{x.upper()}") for x in "qkv"} if into else {}),
        )

    try:
        gradients = backward(case.deterministic)
    except cudnnGraphNotSupportedError as refusal:
        if not (case.deterministic and "use_deterministic_algorithm" in str(refusal)):
            raise
        gradients = backward(False)
    for role, gradient in zip(("dQ", "dK", "dV"), gradients, strict=False):
        if not into:
            seen(role)[...] = gradient
    if case.d_bias:
        tensors["dBias"].tensor[...] = gradients.dbias
    if case.sink is not None:
        tensors["dSink_token"].tensor[0, :, 0, 0] = gradients.dsinks


def permuted(it: Guarded, layout: str) -> Any:
    """A (B, H, S, D) tensor with its dimensions in another order."""
    return (
        it.tensor.permute(*axes_of(layout))
        if it.library.is_torch
        else it.tensor.transpose(axes_of(layout))
    )


def axes_of(layout: str) -> tuple[int, ...]:
    return tuple(_AXES[letter] for letter in layout)


#: The pages of three sequences, of which the last entries of two are no pages of theirs.
TABLE = ((3, 0, 7), (5, -1, 2**31 - 1), (1, 4, 9))


def check_pages(layout: str, library: Library, dtype: str, page: int = 16) -> None:
    """Fails unless keys in pages give what they give in one piece, in a layout."""
    lengths = (2 * page + 3, 0, 3 * page)
    ends = (0, 5, 5, 7) if layout == "thd" else None
    q = library.cast(library.normal((7, 4, 64) if ends else (3, 5, 4, 64), 0), dtype)
    pages = [
        library.cast(library.normal((10, page, 2, d), i + 1), dtype) for i, d in enumerate((64, 32))
    ]
    counts, table = library.values(lengths, "int32"), library.values(TABLE, "int32")
    options = {"causal": True, "softcap": 20.0, "return_lse": True}
    axes = "bshd" if ends else layout
    order = ["bshd".index(letter) for letter in axes]
    given = [_turned(x, order, library) for x in ([*pages] if ends else [q, *pages])]
    where = {"cu_seqlens": (library.values(ends, "int32"), None)} if ends else {}
    found = dlattn.attention(
        *([q, *given] if ends else given),
        layout=layout, block_table=table, lengths=(None, counts), **where, **options,
    )  # fmt: skip
    for b, count in enumerate(lengths):
        rows = [max(0, number) % 10 for number in TABLE[b]]
        whole = [x[rows].reshape(1, 3 * page, *x.shape[2:])[:, :count] for x in pages]
        own = q[None, ends[b] : ends[b + 1]] if ends else q[b : b + 1]
        if 0 in own.shape:
            continue
        out, lse = dlattn.attention(own, *whole, **options)
        if ends:
            mine = found[0][None, ends[b] : ends[b + 1]], found[1][None, :, ends[b] : ends[b + 1]]
        else:
            back = [order.index(axis) for axis in range(4)]
            mine = _turned(found[0], back, library)[b : b + 1], found[1][b : b + 1]
        for one, other in zip(mine, (out, lse), strict=True):
            tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
            np.testing.assert_allclose(
                to_numpy(one), to_numpy(other), rtol=tolerance, atol=tolerance
            )


def check_full_pages(library: Library, dtype: str, page: int = 16) -> None:
    """Fails unless, without lengths, pages are full."""
    q = library.cast(library.normal((2, 5, 4, 64), 0), dtype)
    k = library.cast(library.normal((6, page, 2, 64), 1), dtype)
    rows = [[3, 0, 5], [1, 4, 2]]
    found = dlattn.attention(q, k, k, block_table=library.values(rows, "int32"), causal=True)
    for b, own in enumerate(rows):
        whole = k[own].reshape(1, 3 * page, 2, 64)
        alone = dlattn.attention(q[b : b + 1], whole, whole, causal=True)
        np.testing.assert_allclose(
            to_numpy(found[b : b + 1]), to_numpy(alone), rtol=2e-2, atol=2e-2
        )


def _turned(x: Any, order: list[int], library: Library) -> Any:
    return x.permute(order) if library.is_torch else x.transpose(order)


def check_huge_scores(library: Library, dtype: str) -> None:
    """Fails unless gradients are finite where float32 has scores in steps of 2 and more."""
    d_o = library.cast(library.normal((1, 64, 2, 128), 3) / 100, dtype)
    v = library.cast(library.normal((1, 40, 2, 128), 2), dtype)
    for size in (1592, 2480, 2784, 4392, 8744, 11364):
        q, k = (library.values(np.full((1, n, 2, 128), size + n % 16), dtype) for n in (64, 40))
        out, lse = dlattn.attention(q, k, v, return_lse=True)
        gradients = dlattn.attention_backward(d_o, q, k, v, out, lse)
        assert all(np.isfinite(to_numpy(x)).all() for x in (out, *gradients[:3]))


def check_added_mask(library: Library, dtype: str, low: float, seq_q: int, dim: int) -> None:
    """Fails unless adding so low a number masks keys as a boolean does, forward and backward, and
    what masks all keys of a row does no harm."""
    q, d_o = (library.cast(library.normal((4, seq_q, 4, dim), seed), dtype) for seed in (0, 3))
    k, v = (library.cast(library.normal((4, 300, 2, dim), seed), dtype) for seed in (1, 2))
    seen = np.arange(300) < np.array((300, 17, 130, 0))[:, None, None, None]
    seen[2] = seen[2, ..., ::-1]  # the first keys are masked

    def found(mask: Any) -> list[Any]:
        out, lse = dlattn.attention(q, k, v, bias=mask, return_lse=True)
        gradients = dlattn.attention_backward(d_o, q, k, v, out, lse, bias=mask)
        return [to_numpy(x) for x in (out, lse, *gradients[:3])]

    by_boolean = found(library.values(seen, "bool"))
    by_number = found(library.values(np.where(seen, 0.0, low), "float32"))
    tolerance = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}[dtype]
    for one, other in zip(by_number, by_boolean, strict=True):
        assert np.isfinite(one[:3]).all() and (one < np.inf).all()
        np.testing.assert_allclose(one[:3], other[:3], rtol=tolerance, atol=tolerance)
