"""Primitive operations in NumPy: the definition of what a graph of them computes.

Each takes arrays as they lie in memory and returns arrays in its compute type; the engine rounds
them to the type of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dlattn.dtypes import to_numpy
from dlattn.problem.dropout import Philox
from dlattn.problem.pointwise import POINTWISE, Arithmetic
from dlattn.problem.program import Step, Value
from dlattn.problem.score import Array

Arrays = dict[str, Array]


def evaluate(step: Step, arrays: Arrays, values: Mapping[str, Value]) -> Arrays:
    """The results of one operation.

    Args:
        arrays: operand -> array, of the step's inputs.
        values: role -> tensor, of the program.

    Returns:
        operand -> array, of the step's outputs.
    """
    made = {operand: values[role] for operand, role in step.outputs.items()}
    with np.errstate(all="ignore"):
        if step.operation in POINTWISE:
            return {"OUT_0": _pointwise(step, arrays)}
        return _OTHERS[step.operation](step, arrays, made)


def _pointwise(step: Step, arrays: Arrays) -> Array:
    operation = POINTWISE[step.operation]
    operands = [arrays[operand] for operand in operation.operands]
    # One element broadcasts to every rank.
    operands = [x.reshape(()) if x.size == 1 else x for x in operands]
    if operation.arithmetic is Arithmetic.MOVES:
        *moved, mask = operands
        if len({x.dtype for x in moved}) > 1:
            moved = [x.astype(to_numpy(step.compute)) for x in moved]
        return np.asarray(operation.function(*moved, mask))
    if operation.arithmetic is Arithmetic.BOOLEANS:
        dtype: np.dtype[Any] = np.dtype(bool)
    else:
        dtype = to_numpy(step.compute)
    operands = [x.astype(dtype) for x in operands]
    return np.asarray(operation.function(*operands, **step.numbers))


def _matmul(step: Step, arrays: Arrays, made: Mapping[str, Value]) -> Arrays:
    dtype = to_numpy(step.compute)
    batch = made["C"].dim[:-2]
    a, b = (_batched(arrays[operand].astype(dtype), batch) for operand in "AB")
    if "k_override" in arrays:
        a, b = _up_to(arrays["k_override"], a, -1, 0), _up_to(arrays["k_override"], b, -2, 0)
    product: Array = a @ b
    for operand, axis in (("m_override", -2), ("n_override", -1)):
        if operand in arrays:
            product = _up_to(arrays[operand], product, axis, step.numbers["padding"])
    return {"C": product}


def _up_to(lengths: Array, x: Array, axis: int, beyond: float) -> Array:
    """What an axis holds up to lengths (B, 1, ..., 1), and a number beyond."""
    shape = [1] * x.ndim
    shape[axis] = -1
    within = np.arange(x.shape[axis]).reshape(shape) < lengths
    return np.where(within, x, x.dtype.type(beyond))


def _batched(x: Array, batch: tuple[int, ...]) -> Array:
    """Matrices repeated along each batch dimension: entry i of n is that of entry i * m // n."""
    for axis, size in enumerate(batch):
        if x.shape[axis] not in (1, size):
            x = np.repeat(x, size // x.shape[axis], axis)
    return x


#: Reduction -> array and axes to array, without the axes' sizes.
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ADD": np.sum,
    "MUL": np.prod,
    "MIN": np.min,
    "MAX": np.max,
    "AMAX": lambda x, **axes: np.max(abs(x), **axes),
    "AVG": np.mean,
    "NORM1": lambda x, **axes: np.sum(abs(x), **axes),
    "NORM2": lambda x, **axes: np.sqrt(np.sum(x * x, **axes)),
    "MUL_NO_ZEROS": lambda x, **axes: np.prod(np.where(x == 0, x.dtype.type(1), x), **axes),
}


def _reduction(step: Step, arrays: Arrays, made: Mapping[str, Value]) -> Arrays:
    """Of an axis of n entries with m results, result i is that of entries from ``i * n // m`` on,
    as matmul takes matrices."""
    x, dim = arrays["input"].astype(to_numpy(step.compute)), made["Y"].dim
    groups = [(m, n // m) for n, m in zip(x.shape, dim, strict=True)]
    axes = tuple(2 * axis + 1 for axis, (_, size) in enumerate(groups) if size > 1)
    parts = x.reshape([size for group in groups for size in group])
    return {"Y": _REDUCTIONS[step.numbers["mode"]](parts, axis=axes, keepdims=True).reshape(dim)}


def _softmax(step: Step, arrays: Arrays, made: Mapping[str, Value]) -> Arrays:
    x = arrays["input"].astype(to_numpy(step.compute))
    highest = x.max(axis=-1, keepdims=True)
    # A row of -inf alone would ask for exp(-inf - -inf); as in attention, its weights are 0.
    weights = np.exp(x - np.where(np.isneginf(highest), 0, highest))
    total = weights.sum(axis=-1, keepdims=True)
    s = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)
    return {"S": s, "Stats": highest + np.log(total)}


def _rng(step: Step, arrays: Arrays, made: Mapping[str, Value]) -> Arrays:
    batch, heads, queries, keys = made["Y"].dim
    seed, offset = (int(arrays[operand].item()) for operand in ("seed", "offset"))
    kept = Philox().kept(
        1 - step.numbers["bernoulli_probability"],
        seed,
        offset,
        np.arange(batch * heads),
        slice(0, queries),
        slice(0, keys),
    )
    return {"Y": kept.reshape(made["Y"].dim)}


def _gen_index(step: Step, arrays: Arrays, made: Mapping[str, Value]) -> Arrays:
    dim, axis = made["OUT_0"].dim, step.numbers["axis"]
    along = np.arange(dim[axis]).reshape([-1 if n == axis else 1 for n in range(len(dim))])
    return {"OUT_0": np.broadcast_to(along, dim)}


def _transpose(step: Step, arrays: Arrays, made: Mapping[str, Value]) -> Arrays:
    return {"Y": arrays["input"].transpose(step.numbers["permutation"])}


def _reshape(step: Step, arrays: Arrays, made: Mapping[str, Value]) -> Arrays:
    """Of a view, the elements stay where they are in memory; else their order stays."""
    x, dim = arrays["input"], made["Y"].dim
    strides = step.numbers.get("strides")
    if strides is None:
        return {"Y": x.reshape(dim)}
    before, after = strides
    memory = np.zeros(_extent(x.shape, before), x.dtype)
    _strided(memory, x.shape, before)[...] = x
    return {"Y": _strided(memory, dim, after)}


def _extent(dim: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(dim, stride, strict=True))


def _strided(memory: Array, dim: tuple[int, ...], stride: tuple[int, ...]) -> Array:
    strides = [step * memory.itemsize for step in stride]
    return np.ndarray(dim, memory.dtype, memory, strides=strides)


_OTHERS: dict[str, Callable[[Step, Arrays, Mapping[str, Value]], Arrays]] = {
    "matmul": _matmul,
    "reduction": _reduction,
    "softmax": _softmax,
    "rng": _rng,
    "gen_index": _gen_index,
    "transpose": _transpose,
    "reshape": _reshape,
}
