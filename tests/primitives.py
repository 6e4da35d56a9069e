"""Single primitive operations: their definitions in float64, one number at a time, and the check.

Nothing here shares code with dlattn's definitions: forwards are written with :mod:`math`, gradients
are finite differences of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

import dlattn as cudnn

NUMPY = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
}
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def _power(a: float, b: float) -> float:
    if a == 0 and b < 0:
        return math.inf
    return math.nan if a < 0 and not b.is_integer() else math.pow(a, b)


UNARY: dict[str, Callable[..., float]] = {
    "identity": lambda x: x,
    "neg": lambda x: -x,
    "abs": lambda x: x if x > 0 else -x,
    "exp": math.exp,
    "log": lambda x: math.log(x) if x > 0 else -math.inf if x == 0 else math.nan,
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "rsqrt": lambda x: x**-0.5 if x > 0 else math.inf if x == 0 else math.nan,
    "reciprocal": lambda x: 1 / x if x else math.inf,
    "ceil": math.ceil,
    "floor": math.floor,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "erf": math.erf,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "elu": lambda x: x if x > 0 else math.exp(x) - 1,
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_approx_tanh": lambda x: (
        x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    ),
    "softplus": lambda x: math.log(1 + math.exp(x)),
    "swish": lambda x, swish_beta=1: x / (1 + math.exp(-swish_beta * x)),
    "relu": lambda x, negative_slope=0, lower_clip=0, upper_clip=math.inf: min(
        x if x > lower_clip else lower_clip + negative_slope * (x - lower_clip), upper_clip
    ),
    "leaky_relu": lambda x, negative_slope: x if x > 0 else negative_slope * x,
    "logical_not": lambda x: not x,
}
BINARY: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("add", "bias"), lambda a, b: a + b),
    **dict.fromkeys(("mul", "scale"), lambda a, b: a * b),
    "sub": lambda a, b: a - b,
    "div": lambda a, b: a / b if b else math.copysign(math.inf, a) if a else math.nan,
    "add_square": lambda a, b: a + b * b,
    "max": lambda a, b: a if a > b else b,
    "min": lambda a, b: a if a < b else b,
    "mod": lambda a, b: math.fmod(a, b) if b else math.nan,
    "pow": _power,
    "cmp_eq": lambda a, b: a == b,
    "cmp_neq": lambda a, b: a != b,
    "cmp_gt": lambda a, b: a > b,
    "cmp_ge": lambda a, b: a >= b,
    "cmp_lt": lambda a, b: a < b,
    "cmp_le": lambda a, b: a <= b,
    "logical_and": lambda a, b: bool(a) and bool(b),
    "logical_or": lambda a, b: bool(a) or bool(b),
}
_STEP = 2.0**-18


def _gradient(forward: Callable[..., float]) -> Callable[..., float]:
    def of_loss(loss: float, x: float, **numbers: float) -> float:
        above, below = forward(x + _STEP, **numbers), forward(x - _STEP, **numbers)
        return loss * (above - below) / (2 * _STEP)

    return of_loss


BACKWARD = {
    f"{name}_backward": _gradient(UNARY[name])
    for name in (
        *("relu", "leaky_relu", "tanh", "sigmoid", "elu", "gelu", "gelu_approx_tanh"),
        *("softplus", "swish"),
    )
}
SELECT = {"binary_select": lambda a, b, mask: a if mask else b}
EVERY = {**UNARY, **BINARY, **BACKWARD, **SELECT}
_EXACT = ("cmp", "logical", "binary", "identity", "max", "min")


@dataclass(frozen=True)
class Single:
    """One pointwise operation on random numbers; its repr is one line that evaluates to it.

    Attributes:
        dims: of the operands.
        dtypes: of the operands, and of the result.
        scalar: the last operand is a ``tensor_scalar``, if an operation has two.
        order: of the axes in memory, slowest first, cut to the rank.
        gap: elements between rows of operands.
        numbers: other arguments.
    """

    operation: str = "add"
    dims: tuple[tuple[int, ...], ...] = ((2, 3), (2, 3))
    dtypes: tuple[str, ...] = ("float32", "float32", "float32")
    scalar: bool = False
    order: tuple[int, ...] = (0, 1, 2, 3)
    gap: int = 0
    numbers: tuple[tuple[str, float], ...] = ()
    seed: int = 0

    def __repr__(self) -> str:
        given = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Single({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"


def strided(case: Single, x: Any) -> Any:
    """The same numbers in the case's layout."""
    order = [axis for axis in case.order if axis < x.ndim]
    sizes = [x.shape[axis] for axis in order]
    sizes[-1] += case.gap
    memory = np.zeros(sizes, x.dtype).transpose(np.argsort(order))
    view = memory[tuple(slice(0, size) for size in x.shape)]
    view[...] = x
    return view


def check_single(case: Single) -> None:
    """Fails unless the operation gives its definition, to the rounding of its types."""
    rng = np.random.default_rng(case.seed)
    *operands, result = case.dtypes
    # Multiples of 1/8, away from kinks: exact in every type, and sometimes equal.
    given = [
        (rng.integers(-16, 17, dim) / 8 + 1 / 16 * (case.operation in BACKWARD)).astype(NUMPY[x])
        if x != "bool" else rng.random(dim) < 0.5
        for dim, x in zip(case.dims, operands, strict=True)
    ]  # fmt: skip
    graph = cudnn.pygraph(handle=cudnn.create_handle(device="cpu"))
    tensors = []
    pack = {}
    for number, x in enumerate(given):
        if case.scalar and number == 1:
            given[1] = given[1].reshape(-1)[:1].reshape(())
            tensors.append(graph.tensor_scalar(float(given[1])))
            continue
        x = strided(case, x)
        tensors.append(graph.tensor_like(x, name=f"operand{number}"))
        pack[tensors[-1]] = x
    out = getattr(graph, case.operation)(*tensors, **dict(case.numbers), name="node")
    out.set_output(True).set_data_type(bool if result == "bool" else NUMPY[result])
    graph.build()
    made = np.empty(out.get_dim(), bool if result == "bool" else NUMPY[result])
    graph.execute({**pack, out: made})
    expected = defined(case.operation, given, dict(case.numbers))
    assert made.shape == expected.shape
    if result == "bool":
        np.testing.assert_array_equal(made, expected.astype(bool))
        return
    # A tensor_scalar is FLOAT.
    in_double = "float64" in (operands[:1] if case.scalar else operands)
    computed = "float64" if in_double else "float32"
    tolerance = _EPSILON[result]
    if not case.operation.startswith(_EXACT):
        tolerance += 16 * _EPSILON[computed]
    if case.operation in BACKWARD:
        tolerance += 1e-9  # of the finite difference
    with np.errstate(all="ignore"):
        rounded = expected.astype(made.dtype).astype(np.float64)
    same = np.isclose(made.astype(np.float64), rounded, tolerance, 2 * tolerance, equal_nan=True)
    assert same.all(), (made, rounded)


def defined(operation: str, given: list[Any], numbers: dict[str, float]) -> Any:
    """The definition, in float64."""
    wide = [np.asarray(x).astype(np.float64) for x in given]
    full = np.broadcast_arrays(*(x.reshape(()) if x.size == 1 else x for x in wide))
    function = EVERY[operation]
    found = [
        function(*map(float, xs), **numbers) for xs in zip(*(x.flat for x in full), strict=True)
    ]
    return np.array(found, np.float64).reshape(full[0].shape if full[0].shape else given[0].shape)
