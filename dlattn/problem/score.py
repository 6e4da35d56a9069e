"""Score edits: pointwise changes of the score before the softmax, each with its gradient.

An edit is three things in one place: the C++ type that kernels compose (``cuda_src/attn``), its
run-time parameters, and its NumPy twin, which is its definition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlattn.dtypes import BOOLEANS, data_type, to_cpp
from dlattn.records import dataclass

#: Soft caps that float32 can divide by.
SOFTCAPS = (1e-30, 1e30)

Array = NDArray[Any]

#: Scales that kernels may have as a factor of exponents: in units of raw products that others
#: multiply, float32 may have no log-sum-exps.
_FACTORS = (1e-30, 1e30)

#: The largest number of float32.
_MOST_FLOAT = 3.4028234663852886e38


def is_float32(number: Any) -> bool:
    """Whether a real number is one to float32, and neither infinite nor none."""
    try:
        # In float64, as the bound is infinite to NumPy's float16.
        return abs(float(number)) <= _MOST_FLOAT
    except OverflowError:  # an integer that no float64 holds
        return False


@dataclass(frozen=True)
class Where:
    """Positions of score elements, as integer arrays that broadcast to (B, H, S_q, S_kv)."""

    batch: Array
    head: Array
    query: Array
    key: Array


@dataclass(frozen=True)
class Values:
    """Run-time values that edits and masks read on the reference engine.

    Attributes:
        attn_scale: the scale.
        softcap: the bound of soft-capped scores, or None.
        bias: added to scores, or if boolean, whether they are kept; broadcasts to
            (B, H, S_q, S_kv); or None.
        alibi_slopes: slopes of ALiBi, float32, of shape (B or 1, H, 1, 1), or None.
        block_mask: uint8 bits of blocks that are kept, (B or 1, H or 1, blocks of queries, bytes
            of blocks of keys), or None.
        len_q, len_kv: actual lengths, integer arrays of shape (B, 1, 1, 1).
        band_left, band_right: cuDNN's bounds, or None.
        bottom_right: see :class:`dlattn.problem.Geometry`.
        given_shift: lengths of keys less those of queries, as they were given, (B, 1, 1, 1), or
            None.
        heads_q: query heads of a batch entry.
        score_tensors: what a function of scores reads; each broadcasts like bias.
        dropout_p, dropout_seed, dropout_offset: of Philox.
        dropout_mask: nonzero where probabilities are kept; broadcasts like bias; or None.
        dropout_scale: what kept probabilities are multiplied by.
        dropout_scale_inv: its inverse.
    """

    attn_scale: float
    len_q: Array
    len_kv: Array
    band_left: int | None = None
    band_right: int | None = None
    bottom_right: bool = False
    given_shift: Array | None = None
    softcap: float | None = None
    alibi_slopes: Array | None = None
    bias: Array | None = None
    block_mask: Array | None = None
    score_tensors: tuple[Array, ...] = ()
    heads_q: int = 1
    dropout_p: float = 0.0
    dropout_seed: int = 0
    dropout_offset: int = 0
    dropout_mask: Array | None = None
    dropout_scale: float = 1.0
    dropout_scale_inv: float = 1.0


def read_at(tensor: Array, where: Where) -> Array:
    """The elements of a tensor that broadcasts to (B, H, S_q, S_kv), where they are needed alone:
    memory stays linear in the lengths."""
    places = zip(tensor.shape, (where.batch, where.head, where.query, where.key), strict=True)
    elements: Array = tensor[tuple(at if size > 1 else np.zeros_like(at) for size, at in places)]
    return elements


def add_at(total: Array, terms: Array, where: Where) -> None:
    """Adds terms, one for each score, to a total that broadcasts to (B, H, S_q, S_kv): summed where
    it does."""
    positions = (where.batch, where.head, where.query, where.key)
    places = list(zip(total.shape, positions, strict=True))
    shared = tuple(axis for axis, (size, _) in enumerate(places) if size == 1)
    at = tuple(at if size > 1 else np.zeros_like(at[:1, :1, :1, :1]) for size, at in places)
    total[at] += terms.sum(axis=shared, keepdims=True)


class Edit(ABC):
    """A pointwise change of the score."""

    @property
    def constant_derivative(self) -> bool:
        """Whether the derivative is the same for every score: kernels then need not keep scores
        until they have the gradient."""
        return True

    @property
    @abstractmethod
    def cpp(self) -> str:
        """The C++ type in ``cuda_src/attn/score.cuh``."""

    @abstractmethod
    def apply(self, score: Array, where: Where, values: Values) -> Array:
        """The edited score."""

    @abstractmethod
    def backward(self, grad: Array, score: Array, where: Where, values: Values) -> Array:
        """The gradient for the score that :meth:`apply` was given, from that of its result."""


@dataclass(frozen=True)
class Scale(Edit):
    """``score * attn_scale``.

    Attributes:
        positive: the scale is known to be greater than zero, and neither tiny nor huge, so that
            kernels may take row maxima before scaling and fold the factor into the exponent.
    """

    positive: bool = True

    @classmethod
    def by(cls, number: float) -> Scale:
        """The edit of a scale that is known."""
        return cls(positive=_FACTORS[0] <= number <= _FACTORS[1])

    @property
    def cpp(self) -> str:
        return "PositiveScale" if self.positive else "Scale"

    def apply(self, score: Array, where: Where, values: Values) -> Array:
        return score * np.asarray(values.attn_scale, score.dtype)

    def backward(self, grad: Array, score: Array, where: Where, values: Values) -> Array:
        return grad * np.asarray(values.attn_scale, grad.dtype)


@dataclass(frozen=True)
class SoftCap(Edit):
    """``softcap * tanh(score / softcap)``, the first edit after the scale."""

    @property
    def constant_derivative(self) -> bool:
        return False

    @property
    def cpp(self) -> str:
        return "SoftCap"

    def apply(self, score: Array, where: Where, values: Values) -> Array:
        cap = np.asarray(values.softcap, score.dtype)
        return cap * np.tanh(score / cap)

    def backward(self, grad: Array, score: Array, where: Where, values: Values) -> Array:
        cap = np.asarray(values.softcap, score.dtype)
        return grad * (1 - np.tanh(score / cap) ** 2)


def alibi_slopes(heads: int) -> Array:
    """cuDNN's slopes, float32, (1, heads, 1, 1): ``2^(-8 (i + 1) / n)`` for the first n heads, the
    greatest power of two of them, and ``2^(-4 (2 k + 1) / n)`` for head ``n + k``.

    Source: the cuDNN frontend's ``alibi_slopes``; ALiBi is arXiv 2108.12409.
    """
    first = 2 ** (heads.bit_length() - 1)
    exponents = [-8 * (i + 1) / first for i in range(first)]
    exponents += [-4 * (2 * k + 1) / first for k in range(heads - first)]
    return np.exp2(exponents).astype(np.float32).reshape(1, heads, 1, 1)


@dataclass(frozen=True)
class Alibi(Edit):
    """A slope of the head for each step from the diagonal.

    Attributes:
        symmetric: FlashAttention's form, ``score - slope * |query + len_kv - len_q - key|``; else
            cuDNN's, ``score + slope * (key - query)``.
    """

    symmetric: bool

    @property
    def cpp(self) -> str:
        return f"Alibi<{str(self.symmetric).lower()}>"

    def apply(self, score: Array, where: Where, values: Values) -> Array:
        slopes = values.alibi_slopes
        assert slopes is not None
        of_entry = where.batch if len(slopes) > 1 else np.zeros_like(where.batch)
        slope = slopes[of_entry, where.head, 0, 0].astype(score.dtype)
        if self.symmetric:
            return score - slope * abs(where.query + values.len_kv - values.len_q - where.key)
        return score + slope * (where.key - where.query)

    def backward(self, grad: Array, score: Array, where: Where, values: Values) -> Array:
        return grad


@dataclass(frozen=True)
class Bias(Edit):
    """``score + bias``; a boolean bias keeps scores where it is true, and masks the others.

    Attributes:
        dtype: of the elements; UINT8 is boolean, too.
        contiguous: neighbouring keys are neighbours in memory.
        aligned: the copy engine can move tiles of it: booleans or 16-bit numbers, contiguous, rows
            on 16-byte boundaries.
        one_row: of these, one row is there for all queries.
        staged: and the plan has the copy engine move them.
    """

    dtype: data_type
    contiguous: bool
    aligned: bool = False
    one_row: bool = False
    staged: bool = False

    @property
    def is_boolean(self) -> bool:
        return self.dtype in BOOLEANS

    @property
    def cpp(self) -> str:
        element = "bool" if self.is_boolean else to_cpp(self.dtype)
        flags = [self.contiguous, self.staged]
        flags += [True] * (self.staged and self.one_row)
        return f"Bias<{element}, {', '.join(str(flag).lower() for flag in flags)}>"

    def apply(self, score: Array, where: Where, values: Values) -> Array:
        assert values.bias is not None
        bias = read_at(values.bias, where)
        if self.is_boolean:
            return np.where(bias, score, np.asarray(-np.inf, score.dtype))
        return score + bias.astype(score.dtype)

    def backward(self, grad: Array, score: Array, where: Where, values: Values) -> Array:
        return grad


@dataclass(frozen=True)
class Stored(Bias):
    """The logarithm of a probability that a forward stored, S of primitive operations, in the place
    of the score, whatever that is; its sign is for :class:`dlattn.problem.StoredSigns` to read.

    The gradient is that of the score which the forward had: what comes before says by what that was
    scaled. Always right after the scale.
    """

    @property
    def cpp(self) -> str:
        flags = (str(flag).lower() for flag in (self.contiguous, self.staged))
        return f"Stored<{to_cpp(self.dtype)}, {', '.join(flags)}>"

    def apply(self, score: Array, where: Where, values: Values) -> Array:
        assert values.bias is not None
        stored = read_at(values.bias, where).astype(score.dtype)
        return np.broadcast_to(np.log(abs(stored)), score.shape)
