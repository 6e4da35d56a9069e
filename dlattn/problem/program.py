"""A graph of primitive operations, as an engine that runs them one by one sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from dlattn.dtypes import data_type
from dlattn.records import dataclass


@dataclass(frozen=True)
class Value:
    """A tensor of a program, in memory or not.

    Attributes:
        dim: shape.
        dtype: the type that its elements are rounded to.
        constant: the number that it holds, if the graph knows it.
    """

    dim: tuple[int, ...]
    dtype: data_type
    constant: float | int | None = None


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        operation: the name of the graph's method.
        inputs, outputs: operand -> role.
        numbers: what else the method was given.
        compute: the type of its arithmetic.
    """

    operation: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    numbers: Mapping[str, Any]
    compute: data_type


@dataclass(frozen=True)
class Program:
    """Operations in an order in which every input is known.

    Attributes:
        steps: the operations.
        values: role -> tensor. Those of the geometry that goes with the program have memory.
    """

    steps: tuple[Step, ...] = ()
    values: Mapping[str, Value] = field(default_factory=dict)
