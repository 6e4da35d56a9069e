"""Pointwise operations: their operands, and their NumPy twins, which are their definitions.

Names, operands and meanings are those of cuDNN frontend 1.23 (``cudnnPointwiseMode_t``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from dlattn.problem.score import Array
from dlattn.records import dataclass

Function = Callable[..., Any]


class Arithmetic(Enum):
    """What an operation computes in: its compute type, exact comparisons, booleans, or nothing."""

    FLOATS = "floats"
    NUMBERS = "numbers"
    COMPARES = "compares"
    BOOLEANS = "booleans"
    MOVES = "moves"


@dataclass(frozen=True)
class Pointwise:
    """One operation.

    Attributes:
        operands: the names of its tensors, in order.
        formula: what it computes, of the operands' names.
        function: arrays that broadcast, in the order of the operands, to an array; numbers by
            keyword.
        arithmetic: FLOATS if only floats have a result, NUMBERS if integers have one, too.
    """

    operands: tuple[str, ...]
    formula: str
    function: Function
    arithmetic: Arithmetic


_erf: Function = np.vectorize(math.erf, otypes=[np.float64])
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def _sigmoid(x: Array) -> Array:
    below = np.exp(-abs(x))
    result: Array = np.where(x < 0, below, 1) / (1 + below)
    return result


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-abs(x)))


def _normal_cdf(x: Array) -> Array:
    cdf: Array = (0.5 + 0.5 * _erf(x / math.sqrt(2))).astype(x.dtype)
    return cdf


def _gelu_backward(loss: Array, x: Array) -> Array:
    return loss * (_normal_cdf(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


def _gelu_tanh(x: Array) -> Array:
    return np.tanh(_SQRT_2_OVER_PI * (x + _CUBE * x**3))


def _gelu_approx_tanh_backward(loss: Array, x: Array) -> Array:
    tanh = _gelu_tanh(x)
    inner = _SQRT_2_OVER_PI * (1 + 3 * _CUBE * x * x)
    return loss * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner)


def _relu(
    x: Array, negative_slope: float = 0, lower_clip: float = 0, upper_clip: float = math.inf
) -> Array:
    below = np.full_like(x, lower_clip)
    if negative_slope:  # or else 0 times -inf would be added
        below += x.dtype.type(negative_slope) * (x - x.dtype.type(lower_clip))
    return np.minimum(np.where(x <= lower_clip, below, x), x.dtype.type(upper_clip))


def _relu_backward(
    loss: Array,
    x: Array,
    negative_slope: float = 0,
    lower_clip: float = 0,
    upper_clip: float = math.inf,
) -> Array:
    slope = np.where(x > lower_clip, 1, negative_slope).astype(x.dtype)
    return loss * np.where((x < upper_clip) | (upper_clip == math.inf), slope, x.dtype.type(0))


def _swish(x: Array, swish_beta: float = 1) -> Array:
    return x * _sigmoid(swish_beta * x)


def _swish_backward(loss: Array, x: Array, swish_beta: float = 1) -> Array:
    gate = _sigmoid(swish_beta * x)
    return loss * gate * (1 + swish_beta * x * (1 - gate))


def _family(
    operands: tuple[str, ...],
    arithmetic: Arithmetic,
    members: Mapping[str, tuple[str, Function]],
) -> dict[str, Pointwise]:
    return {
        name: Pointwise(operands, formula, function, arithmetic)
        for name, (formula, function) in members.items()
    }


_FLOATS = Arithmetic.FLOATS
_NUMBERS = Arithmetic.NUMBERS

#: Operation -> what it is.
POINTWISE: dict[str, Pointwise] = {
    **_family(("a", "b"), _NUMBERS, {
        "add": ("a + b", np.add),
        "sub": ("a - b", np.subtract),
        "mul": ("a * b", np.multiply),
        "add_square": ("a + b * b", lambda a, b: a + b * b),
    }),
    **_family(("a", "b"), _FLOATS, {"div": ("a / b", np.divide)}),
    **_family(("input", "bias"), _NUMBERS, {"bias": ("input + bias", np.add)}),
    **_family(("input", "scale"), _NUMBERS, {"scale": ("input * scale", np.multiply)}),
    **_family(("input0", "input1"), _NUMBERS, {
        "max": ("the greater of input0 and input1; NaN if either is", np.maximum),
        "min": ("the less of input0 and input1; NaN if either is", np.minimum),
        "mod": ("the remainder of input0 / input1, with the sign of input0", np.fmod),
    }),
    **_family(("input0", "input1"), _FLOATS, {"pow": ("input0 ** input1", np.power)}),
    **_family(("input",), _NUMBERS, {
        "identity": ("input", np.positive),
        "neg": ("-input", np.negative),
        "abs": ("|input|", np.abs),
    }),
    **_family(("input",), _FLOATS, {
        "exp": ("e ** input", np.exp),
        "log": ("the natural logarithm of input", np.log),
        "sqrt": ("sqrt(input)", np.sqrt),
        "rsqrt": ("1 / sqrt(input)", lambda x: 1 / np.sqrt(x)),
        "reciprocal": ("1 / input", lambda x: 1 / x),
        "ceil": ("the least integer not below input", np.ceil),
        "floor": ("the greatest integer not above input", np.floor),
        "sin": ("sin(input)", np.sin),
        "cos": ("cos(input)", np.cos),
        "tan": ("tan(input)", np.tan),
        "erf": ("erf(input)", lambda x: _erf(x).astype(x.dtype)),
        "tanh": ("tanh(input)", np.tanh),
        "sigmoid": ("1 / (1 + e ** -input)", _sigmoid),
        "elu": ("input if positive, else e ** input - 1",
                lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))),
        "gelu": ("input * (1 + erf(input / sqrt(2))) / 2", lambda x: x * _normal_cdf(x)),
        "gelu_approx_tanh": (
            "input * (1 + tanh(sqrt(2 / pi) * (input + 0.044715 * input ** 3))) / 2",
            lambda x: 0.5 * x * (1 + _gelu_tanh(x)),
        ),
        "softplus": ("log(1 + e ** input)", _softplus),
        "swish": ("input / (1 + e ** (-swish_beta * input))", _swish),
        "relu": ("input above lower_clip, below it lower_clip + negative_slope * (input - "
                 "lower_clip), at most upper_clip", _relu),
        "leaky_relu": ("input if positive, else negative_slope * input", _relu),
    }),
    **_family(("loss", "input"), _FLOATS, {
        "tanh_backward": ("loss * tanh'(input)", lambda dy, x: dy * (1 - np.tanh(x) ** 2)),
        "sigmoid_backward": ("loss * sigmoid'(input)",
                             lambda dy, x: dy * _sigmoid(x) * _sigmoid(-x)),
        "elu_backward": ("loss * elu'(input)",
                         lambda dy, x: dy * np.where(x > 0, 1, np.exp(np.minimum(x, 0)))),
        "gelu_backward": ("loss * gelu'(input)", _gelu_backward),
        "gelu_approx_tanh_backward": ("loss * gelu_approx_tanh'(input)",
                                      _gelu_approx_tanh_backward),
        "softplus_backward": ("loss * softplus'(input)", lambda dy, x: dy * _sigmoid(x)),
        "swish_backward": ("loss * swish'(input)", _swish_backward),
        "relu_backward": ("loss * relu'(input)", _relu_backward),
        "leaky_relu_backward": ("loss * leaky_relu'(input)", _relu_backward),
    }),
    **_family(("input", "comparison"), Arithmetic.COMPARES, {
        "cmp_eq": ("input == comparison", np.equal),
        "cmp_neq": ("input != comparison", np.not_equal),
        "cmp_gt": ("input > comparison", np.greater),
        "cmp_ge": ("input >= comparison", np.greater_equal),
        "cmp_lt": ("input < comparison", np.less),
        "cmp_le": ("input <= comparison", np.less_equal),
    }),
    **_family(("a", "b"), Arithmetic.BOOLEANS, {
        "logical_and": ("a and b", np.logical_and),
        "logical_or": ("a or b", np.logical_or),
    }),
    **_family(("input",), Arithmetic.BOOLEANS, {"logical_not": ("not input", np.logical_not)}),
    **_family(("input0", "input1", "mask"), Arithmetic.MOVES, {
        "binary_select": ("input0 where mask is true, else input1",
                          lambda x, y, mask: np.where(mask.astype(bool), x, y)),
    }),
}  # fmt: skip
