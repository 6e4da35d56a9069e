"""Score edits: pointwise changes of the score before the softmax, each with its gradient.

An edit is three things in one place: the C++ type that kernels compose (``cuda_src/attn``), its
run-time parameters, and its NumPy twin, which is its definition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


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
        len_q, len_kv: actual lengths, integer arrays of shape (B, 1, 1, 1).
        band_left, band_right: cuDNN's bounds, or None.
        bottom_right: see :class:`dlattn.problem.Geometry`.
    """

    attn_scale: float
    len_q: Array
    len_kv: Array
    band_left: int | None = None
    band_right: int | None = None
    bottom_right: bool = False
    softcap: float | None = None


class Edit(ABC):
    """A pointwise change of the score.

    Attributes:
        constant_derivative: whether the derivative is the same for every score: kernels then need
            not keep scores until they have the gradient.
    """

    constant_derivative: ClassVar[bool] = True

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
        positive: the scale is known to be greater than zero, so that kernels may take row maxima
            before scaling and fold the factor into the exponent.
    """

    positive: bool = True

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

    constant_derivative = False

    @property
    def cpp(self) -> str:
        return "SoftCap"

    def apply(self, score: Array, where: Where, values: Values) -> Array:
        cap = np.asarray(values.softcap, score.dtype)
        return cap * np.tanh(score / cap)

    def backward(self, grad: Array, score: Array, where: Where, values: Values) -> Array:
        cap = np.asarray(values.softcap, score.dtype)
        return grad * (1 - np.tanh(score / cap) ** 2)
