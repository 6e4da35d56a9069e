"""Calls of FlashAttention's functions, as data, and their tensors.

Nothing of dlattn is used. What the functions mean is said once more, from PyTorch's
``flash_api.cpp``: the window is that file's, line by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

from tests.callers import Caller
from tests.cases import Case

#: What memory holds that must not be written to.
SENTINEL = 7.0


@dataclass(frozen=True)
class FlashCase:
    """One call; its repr is one line that evaluates to it.

    Attributes:
        lens_q, lens_k: of each sequence.
        packed: sequences follow each other; else they lie in one tensor of the longest length.
        used: lengths are given as seqused_k, among keys that are more, and if not packed as
            seqused_q, too. Without packing, needed for lengths that differ.
        page: rows of a page of packed k and v; ``None`` for none.
        slack: tokens of packed tensors before the first and behind the last sequence.
        more: how much longer max_seqlens are than the longest sequences.
        alibi: the shape of the slopes, ``"H"`` or ``"BH"``; or ``None``.
        dropout: the probability to drop.
        given: results go to memory of the caller's.
        layout: of all tensors in memory; see :func:`_laid_out`.
        logits: about the standard deviation of the scaled scores.
    """

    dtype: str = "float16"
    heads: int = 1
    heads_k: int = 1
    head_size: int = 8
    head_size_v: int = 8
    lens_q: tuple[int, ...] = (1,)
    lens_k: tuple[int, ...] = (1,)
    packed: bool = False
    used: bool = False
    page: int | None = None
    slack: int = 0
    more: int = 0
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    alibi: str | None = None
    scale: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    given: bool = False
    zero_tensors: bool = False
    deterministic: bool = False
    layout: str = "plain"
    logits: float = 1.0
    seed: int = 0

    def __repr__(self) -> str:
        given = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"FlashCase({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    @property
    def batch(self) -> int:
        return len(self.lens_q)

    @property
    def is_padded(self) -> bool:
        """Head sizes are no multiples of 8."""
        return bool(self.head_size % 8 or self.head_size_v % 8)

    @property
    def longest(self) -> tuple[int, int]:
        """What the functions take for the longest sequences."""
        more = self.more if self.packed else 0
        return max(self.lens_q) + more, max(self.lens_k) + more + self._unused_rows

    @property
    def _unused_rows(self) -> int:
        return 3 if self.used and not self.packed else 0

    def window(self) -> tuple[int | None, int | None]:
        """``mha_fwd`` and ``set_params_fprop``."""
        (seqlen_q, seqlen_k), left, right = self.longest, self.left, self.right
        if left >= seqlen_k:
            left = -1
        if right >= seqlen_k:
            right = -1
        is_causal = self.causal and not (seqlen_q == 1 and self.alibi is None)
        if is_causal:
            right = 0
        if left < 0 and right >= 0:
            left = seqlen_k
        if left >= 0 and right < 0:
            right = seqlen_k
        return (None, None) if left < 0 and right < 0 else (left, right)

    def as_case(self) -> Case:
        """The same as cuDNN would say it, for the oracle."""
        left, right = self.window()
        return Case(
            dtype=self.dtype,
            batch=self.batch,
            heads_q=self.heads,
            heads_k=self.heads_k,
            heads_v=self.heads_k,
            seq_q=max(1, *self.lens_q),
            seq_kv=max(1, *self.lens_k),
            head_dim_qk=self.head_size,
            head_dim_v=self.head_size_v,
            scale=self.head_size**-0.5 if self.scale is None else self.scale,
            softcap=self.softcap or None,
            alibi=self.alibi,
            left=None if left is None else left + 1,
            right=right,
            bottom_right=True,
            len_q=self.lens_q,
            len_kv=self.lens_k,
            sink=0.0 if self.sinks else None,
            dropout=self.dropout or None,
            dropout_algorithm="flash" if self.dropout else None,
            seed=self.seed,
        )


class Memory:
    """A tensor of the caller's inside of other memory, that a view in NumPy shows afterwards."""

    def __init__(self, caller: Caller, array: Any, layout: str, beside: float) -> None:
        self._layout, self._caller, self._shape = layout, caller, array.shape
        buffer = np.full(_buffer_shape(array.shape, layout), beside, array.dtype)
        _view(buffer, array.shape, layout)[...] = array
        self._buffer = caller.tensor(buffer)
        self.tensor = _view(self._buffer, array.shape, layout)

    def check_rest(self) -> None:
        """Fails if memory beside the tensor was written to."""
        whole = self._caller.host(self._buffer)
        _view(whole, self._shape, self._layout)[...] = SENTINEL
        assert (whole == SENTINEL).all(), "memory beside a result was written to"


def _buffer_shape(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    *first, rows, heads, columns = shape
    if layout == "heads first":
        return (*first, heads, rows, columns)
    if layout == "of more heads":
        return (*first, rows, heads + 3, columns)
    return (*first, rows, heads, columns + (layout == "odd"))


def _view(buffer: Any, shape: Sequence[int], layout: str) -> Any:
    """The tensor in its buffer: ``"plain"`` is all of it, rows of ``"odd"`` are not aligned."""
    if layout == "heads first":
        return buffer.swapaxes(-3, -2)
    if layout == "of more heads":
        return buffer[..., 2 : 2 + shape[-2], :]
    return buffer[..., layout == "odd" :] if layout == "odd" else buffer


class FlashCall:
    """The tensors of a case, in host memory and as the caller's."""

    def __init__(self, case: FlashCase, caller: Caller) -> None:
        self.case, self.caller = case, caller
        self.rng = np.random.default_rng(case.seed)
        self.numpy_type = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
        heads, heads_k, size, size_v = case.heads, case.heads_k, case.head_size, case.head_size_v
        scale = case.head_size**-0.5 if case.scale is None else abs(case.scale) or 1.0
        wide = (case.logits / (scale * size**0.5)) ** 0.5
        self.arrays = {
            "q": self._rows(case.lens_q, heads, size, wide),
            "k": self._rows(case.lens_k, heads_k, size, wide),
            "v": self._rows(case.lens_k, heads_k, size_v),
            "dO": self._rows(case.lens_q, heads, size_v),
        }
        if case.alibi:
            shape = (heads,) if case.alibi == "H" else (case.batch, heads)
            self.arrays["alibi_slopes"] = self.rng.uniform(0, 0.3, shape).astype(np.float32)
        if case.sinks:
            self.arrays["sink_token"] = self.rng.normal(size=(1, heads, 1, 1)).astype(np.float32)
        #: Rows of each sequence of keys that are no part of it.
        self.extra = 2 if case.used and case.packed and not case.page else 0

    def _rows(self, lengths: Sequence[int], heads: int, columns: int, size: float = 1.0) -> Any:
        """(B, heads, longest, columns), NaN past the lengths."""
        rows = self.rng.normal(size=(len(lengths), heads, max(1, *lengths), columns)) * size
        for entry, length in enumerate(lengths):
            rows[entry, :, length:] = np.nan
        return rows.astype(self.numpy_type)

    def place(self, padded: Any, lengths: Sequence[int], extra: int, fill: float = np.nan) -> Any:
        """(B, H, S, D) as the functions take it, with ``fill`` in rows of no sequence."""
        _, heads, _, columns = padded.shape
        if self.case.packed:
            total = 2 * self.case.slack + sum(lengths) + extra * len(lengths)
            placed = np.full((total, heads, columns), fill, padded.dtype)
            for entry, first in enumerate(self.starts(lengths, extra)[:-1]):
                rows = slice(first, first + lengths[entry])
                placed[rows] = padded[entry, :, : lengths[entry]].swapaxes(0, 1)
            return placed
        longest = max(lengths) + (3 if self.case.used and extra else 0)
        placed = np.full((len(lengths), longest, heads, columns), fill, padded.dtype)
        for entry, length in enumerate(lengths):
            placed[entry, :length] = padded[entry, :, :length].swapaxes(0, 1)
        return placed

    def gather(
        self, placed: Any, lengths: Sequence[int], extra: int, like: Any, dead: float
    ) -> Any:
        """Back to (B, H, S, D); ``dead`` past the lengths."""
        rows = np.full(like.shape[:3] + placed.shape[-1:], dead, placed.dtype)
        starts = self.starts(lengths, extra)
        for entry, length in enumerate(lengths):
            own = placed[starts[entry] :] if self.case.packed else placed[entry]
            rows[entry, :, :length] = own[:length].swapaxes(0, 1)
        return rows

    def starts(self, lengths: Sequence[int], extra: int) -> Any:
        """cu_seqlens."""
        sums = np.cumsum([0, *(length + extra for length in lengths)])
        return (sums + self.case.slack).astype(np.int32)

    def memory(self, array: Any, beside: float = np.nan) -> Memory:
        return Memory(self.caller, array, self.case.layout, beside)

    def result(self, shape: Sequence[int]) -> Memory | None:
        if not (self.case.given and self.caller.can_give):
            return None
        array = np.full(shape, SENTINEL, self.numpy_type)
        return self.memory(array, SENTINEL)

    def vector(self, numbers: Any) -> Any:
        return self.caller.tensor(np.ascontiguousarray(numbers))

    @property
    def options(self) -> dict[str, Any]:
        case = self.case
        slopes = self.arrays.get("alibi_slopes")
        options = {
            "softmax_scale": case.scale,
            "is_causal": case.causal,
            "window_size_left": case.left,
            "window_size_right": case.right,
            "softcap": case.softcap,
            "p_dropout": case.dropout,
            "alibi_slopes_": None if slopes is None else self.vector(slopes),
        }
        if case.used:
            options["seqused_k"] = self.vector(np.array(case.lens_k, np.int32))
        if case.used and not case.packed:
            options["seqused_q"] = self.vector(np.array(case.lens_q, np.int32))
        if case.packed:
            longest_q, longest_k = case.longest
            options |= {
                "cu_seqlens_q": self.vector(self.starts(case.lens_q, 0)),
                "cu_seqlens_k": self.vector(self.starts(case.lens_k, self.extra)),
                "max_seqlen_q": longest_q,
                "max_seqlen_k": longest_k,
                "zero_tensors": case.zero_tensors,
            }
        return options

    @property
    def key_rows(self) -> int:
        """What :meth:`place` takes as ``extra`` of keys."""
        return self.extra if self.case.packed else int(self.case.used)

    def pages(self) -> tuple[Any, Any, Any]:
        """k and v in pages, and the table."""
        case, page = self.case, self.case.page
        assert page is not None
        counts = [-(-length // page) for length in case.lens_k]
        wide = max(1, -(-case.longest[1] // page))
        numbers = self.rng.permutation(sum(counts) + 2)
        table = np.full((case.batch, wide), -1, np.int32)
        containers = []
        for role in ("k", "v"):
            padded = self.arrays[role]
            shape = (len(numbers), page, padded.shape[1], padded.shape[3])
            container = np.full(shape, np.nan, padded.dtype)
            used = iter(numbers)
            for entry, count in enumerate(counts):
                for index in range(count):
                    number = next(used)
                    table[entry, index] = number
                    rows = padded[
                        entry, :, index * page : min((index + 1) * page, case.lens_k[entry])
                    ]
                    container[number, : rows.shape[1]] = rows.swapaxes(0, 1)
            containers.append(container)
        return (*containers, table)
