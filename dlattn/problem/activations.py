"""Activations and their derivatives, as lines of simpler operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlattn.problem.expressions import Builder


class Writer:
    """A builder, of which operations are methods: ``w.mul(x, y)``, ``w(0.5)`` for a number."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def __getattr__(self, operation: str) -> Callable[..., int]:
        return lambda *operands: self.builder.pointwise(operation, *operands)

    def __call__(self, value: float) -> int:
        return self.builder.constant(value)


_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBE = 0.044715
_Made = Callable[..., int]


def _normal_cdf(w: Writer, x: int) -> int:
    return w.add(w(0.5), w.mul(w(0.5), w.erf(w.mul(x, w(math.sqrt(0.5))))))


def _gelu_slope(w: Writer, x: int) -> int:
    density = w.mul(w.exp(w.mul(w.mul(x, x), w(-0.5))), w(1 / math.sqrt(2 * math.pi)))
    return w.add(_normal_cdf(w, x), w.mul(x, density))


def _gelu_tanh(w: Writer, x: int) -> int:
    cubic = w.add(w(1.0), w.mul(w(_CUBE), w.mul(x, x)))
    return w.tanh(w.mul(w(_SQRT_2_OVER_PI), w.mul(x, cubic)))


def _gelu_tanh_slope(w: Writer, x: int) -> int:
    tanh = _gelu_tanh(w, x)
    inner = w.mul(w(_SQRT_2_OVER_PI), w.add(w(1.0), w.mul(w(3 * _CUBE), w.mul(x, x))))
    bent = w.mul(w.mul(w(0.5), x), w.mul(_one_minus_square(w, tanh), inner))
    return w.add(w.mul(w(0.5), w.add(w(1.0), tanh)), bent)


def _one_minus_square(w: Writer, x: int) -> int:
    return w.sub(w(1.0), w.mul(x, x))


def _relu(
    w: Writer,
    x: int,
    negative_slope: float = 0,
    lower_clip: float = 0,
    upper_clip: float = math.inf,
) -> int:
    above = w.sub(x, w(lower_clip))
    below = w.add(w(lower_clip), w.mul(above, w(negative_slope)))
    clipped = w.binary_select(x, below, w.cmp_gt(x, w(lower_clip)))
    return clipped if upper_clip == math.inf else w.min(clipped, w(upper_clip))


def _relu_slope(
    w: Writer,
    x: int,
    negative_slope: float = 0,
    lower_clip: float = 0,
    upper_clip: float = math.inf,
) -> int:
    slope = w.binary_select(w(1.0), w(negative_slope), w.cmp_gt(x, w(lower_clip)))
    if upper_clip == math.inf:
        return slope
    return w.binary_select(slope, w(0.0), w.cmp_lt(x, w(upper_clip)))


def _swish(w: Writer, x: int, swish_beta: float = 1) -> int:
    return w.mul(x, w.sigmoid(w.mul(w(swish_beta), x)))


def _swish_slope(w: Writer, x: int, swish_beta: float = 1) -> int:
    scaled = w.mul(w(swish_beta), x)
    gate = w.sigmoid(scaled)
    return w.mul(gate, w.add(w(1.0), w.mul(scaled, w.sub(w(1.0), gate))))


def _sigmoid_slope(w: Writer, x: int) -> int:
    gate = w.sigmoid(x)
    return w.mul(gate, w.sub(w(1.0), gate))


def _elu_slope(w: Writer, x: int) -> int:
    return w.binary_select(w(1.0), w.exp(w.min(x, w(0.0))), w.cmp_gt(x, w(0.0)))


#: Function -> its derivative, for ``*_backward`` and for gradients of programs.
SLOPES: dict[str, _Made] = {
    "tanh": lambda w, x: _one_minus_square(w, w.tanh(x)),
    "sigmoid": _sigmoid_slope,
    "elu": _elu_slope,
    "gelu": _gelu_slope,
    "gelu_approx_tanh": _gelu_tanh_slope,
    "softplus": lambda w, x: w.sigmoid(x),
    "swish": _swish_slope,
    "relu": _relu_slope,
    "leaky_relu": _relu_slope,
}


def _backward(slope: _Made) -> _Made:
    return lambda w, loss, x, **numbers: w.mul(loss, slope(w, x, **numbers))


#: Operation -> the lines that it is made of.
MADE_OF: dict[str, _Made] = {
    "identity": lambda w, x: x,
    "add_square": lambda w, a, b: w.add(a, w.mul(b, b)),
    "relu": _relu,
    "leaky_relu": _relu,
    "swish": _swish,
    "gelu": lambda w, x: w.mul(x, _normal_cdf(w, x)),
    "gelu_approx_tanh": lambda w, x: w.mul(w.mul(w(0.5), x), w.add(w(1.0), _gelu_tanh(w, x))),
    **{f"{name}_backward": _backward(slope) for name, slope in SLOPES.items()},
}
