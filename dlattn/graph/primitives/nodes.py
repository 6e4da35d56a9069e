"""Primitive nodes: the arguments of one operation, checked as far as one call can tell."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dlattn.dtypes import data_type, from_any
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.graph.checks import flag, integers
from dlattn.graph.tensor import Attributes, tensor
from dlattn.graph.vocabulary import reduction_mode, reshape_mode, rng_distribution
from dlattn.problem import POINTWISE
from dlattn.records import dataclass

#: Operation -> the operands that it needs, in order.
OPERANDS: dict[str, tuple[str, ...]] = {
    **{name: operation.operands for name, operation in POINTWISE.items()},
    "matmul": ("A", "B"),
    "reduction": ("input",),
    "softmax": ("input",),
    "rng": ("seed", "offset"),
    "gen_index": ("input",),
    "transpose": ("input",),
    "reshape": ("input",),
}

#: Operation -> operands that may be left out.
OPTIONAL: dict[str, tuple[str, ...]] = {"matmul": ("m_override", "n_override", "k_override")}

#: Operation -> its result, as cuDNN names it; of the others, ``OUT_0``.
_RESULTS = {"matmul": "C", "softmax": "S"} | dict.fromkeys(
    ("reduction", "rng", "transpose", "reshape"), "Y"
)


@dataclass(frozen=True)
class PrimitiveNode:
    """One primitive operation of a graph.

    Attributes:
        operation: the name of the graph's method.
        name: the node's name, in messages and in the default names of its outputs.
        inputs, outputs: operand -> tensor.
        numbers: the other arguments; of enumerations, the members' names.
        compute_data_type: as given, or ``NOT_SET``.
    """

    operation: str
    name: str
    inputs: Mapping[str, tensor]
    outputs: Mapping[str, tensor]
    numbers: Mapping[str, Any]
    compute_data_type: data_type

    @property
    def returned(self) -> list[tensor | None]:
        """What ``_add`` returns."""
        if self.operation == "softmax":
            return [self.outputs["S"], self.outputs.get("Stats")]
        return [self.result]

    @property
    def result(self) -> tensor:
        """The first output."""
        return next(iter(self.outputs.values()))

    @property
    def tensors(self) -> dict[str, tensor]:
        """Operand -> tensor."""
        return {**self.inputs, **self.outputs}

    def __str__(self) -> str:
        return f"{self.operation} {self.name!r}"

    def label(self, operand: str) -> str:
        """The user's name for a tensor, or the operand that it is."""
        return self.tensors[operand].get_name() or f"{operand} of {self}"


def primitive_node(operation: str, name: str, given: Mapping[str, Any]) -> PrimitiveNode:
    """The node of a call.

    Raises:
        InvalidArgumentError: a number, or a permutation, that means nothing.
        TypeError: an argument is missing, or has the wrong Python type.
        cudnnGraphNotSupportedError: a valid wish that no engine grants.
    """
    inputs = {}
    for operand in OPERANDS[operation]:
        if given[operand] is None:
            raise TypeError(f"{operation} needs the tensor {operand}; got None.")
        inputs[operand] = given[operand]
    for operand in OPTIONAL.get(operation, ()):
        if given.get(operand) is not None:
            inputs[operand] = given[operand]
    results = [_RESULTS.get(operation, "OUT_0")]
    if operation == "softmax" and flag("generate_stats", given["generate_stats"]):
        results.append("Stats")
    return PrimitiveNode(
        operation=operation,
        name=name,
        inputs=inputs,
        outputs={
            result: tensor(Attributes(name=f"{name}::{result}", is_virtual=True))
            for result in results
        },
        numbers=_NUMBERS.get(operation, _floats)(given),
        compute_data_type=from_any(given.get("compute_data_type")),
    )


def _floats(given: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of activations, those left out aside."""
    names = ("negative_slope", "lower_clip", "upper_clip", "swish_beta")
    return {name: _number(name, given[name]) for name in names if given.get(name) is not None}


def _reduction(given: Mapping[str, Any]) -> dict[str, Any]:
    mode = given["mode"]
    if not isinstance(mode, reduction_mode):
        raise TypeError(f"reduction: mode must be a dlattn.reduction_mode; got {mode!r}.")
    if mode is reduction_mode.NOT_SET:
        raise InvalidArgumentError("reduction: mode is NOT_SET; choose how to reduce, e.g. ADD.")
    if given["group_offset"] is not None:
        raise cudnnGraphNotSupportedError(
            "reduction was given group_offset, which no engine supports; leave it out."
        )
    return {"mode": mode.name}


def _rng(given: Mapping[str, Any]) -> dict[str, Any]:
    distribution, probability = given["distribution"], given["bernoulli_probability"]
    if not isinstance(distribution, rng_distribution):
        raise TypeError(
            f"rng: distribution must be a dlattn.rng_distribution; got {distribution!r}."
        )
    if distribution is not rng_distribution.BERNOULLI:
        raise cudnnGraphNotSupportedError(
            f"rng was given {distribution}; engines draw BERNOULLI only."
        )
    if probability is None:
        raise InvalidArgumentError("rng needs bernoulli_probability, the chance of a 1; got None.")
    probability = _number("bernoulli_probability", probability)
    if not 0 < probability <= 1:
        raise InvalidArgumentError(
            "rng: bernoulli_probability, the chance of a 1, must be above 0 and at most 1; got "
            f"{probability}."
        )
    return {"bernoulli_probability": probability}


def _gen_index(given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"axis": operator.index(given["axis"])}
    except TypeError:
        raise TypeError(f"gen_index: axis must be an int; got {given['axis']!r}.") from None


def _transpose(given: Mapping[str, Any]) -> dict[str, Any]:
    permutation = integers("transpose: permutation", given["permutation"])
    if sorted(permutation) != list(range(len(permutation))):
        raise InvalidArgumentError(
            f"transpose: permutation must have every axis from 0 once; got {list(permutation)}."
        )
    return {"permutation": permutation}


def _reshape(given: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(given["reshape_mode"], reshape_mode):
        raise TypeError(
            f"reshape: reshape_mode must be a dlattn.reshape_mode; got {given['reshape_mode']!r}."
        )
    return {"mode": given["reshape_mode"].name}


def _matmul(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"padding": _number("padding", given["padding"])}


_NUMBERS = {
    "matmul": _matmul,
    "reduction": _reduction,
    "rng": _rng,
    "gen_index": _gen_index,
    "transpose": _transpose,
    "reshape": _reshape,
}


def _number(name: str, value: Any) -> float:
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer that no float64 holds
            number = float(value)
    if math.isnan(number):
        raise TypeError(f"{name} must be a number; got {value!r:.100}.")
    return number
