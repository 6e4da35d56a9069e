"""The argument ``dropout``: a probability with Philox's seed and offset, or a mask with scales."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from dlattn.errors import InvalidArgumentError, InvalidGraphError
from dlattn.graph.tensor import tensor
from dlattn.problem.dropout import ALGORITHMS, RandomDropout, signed
from dlattn.problem.score import is_float32
from dlattn.records import dataclass

#: Names of the entries of the tuple, by operation: with a probability, or with a mask.
_WITH_PROBABILITY = ("p", "dropout_seed", "dropout_offset")
_WITH_MASK = {
    "sdpa": ("dropout_mask", "dropout_scale"),
    "sdpa_backward": ("dropout_mask", "dropout_scale", "dropout_scale_inv"),
}


@dataclass(frozen=True)
class DropoutArgument:
    """What was asked for.

    Attributes:
        p: the probability to drop, or ``None`` with a mask.
        inputs: role -> tensor; roles as in :class:`dlattn.problem.Geometry`.
        numbers: role -> number, for those entries that are no tensors.
        form: how elements are drawn, or ``None`` with a mask.
    """

    p: float | None
    inputs: Mapping[str, tensor] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    form: RandomDropout | None = None

    def check(self) -> None:
        """Refuses what no engine can do.

        Raises:
            InvalidGraphError: p is not a probability.
        """
        if self.p is None or self.form is None:
            return
        try:
            self.form.numbers(self.p)
        except ValueError:
            raise InvalidGraphError(
                f"The probability of dropout must be at least 0 and at most 1 (below 1 with "
                f"FlashAttention's algorithm, which keeps some); got {self.p}."
            ) from None


def dropout_argument(operation: str, given: Mapping[str, Any]) -> DropoutArgument | None:
    """``given["dropout"]``, or ``None`` without.

    Raises:
        InvalidArgumentError: it is no tuple of the right entries, or ``rng_dump`` or
            ``dropout_algorithm`` is without what it is about.
        TypeError: an entry is neither a tensor of the graph nor a number.
    """
    entries, algorithm = given["dropout"], given["dropout_algorithm"]
    if algorithm is not None and (not isinstance(algorithm, str) or algorithm not in ALGORITHMS):
        raise InvalidArgumentError(
            f"{operation}: dropout_algorithm must be one of {', '.join(map(repr, ALGORITHMS))}; "
            f"got {algorithm!r}."
        )
    if entries is None:
        if algorithm is not None:
            raise InvalidArgumentError(
                f"{operation} was given dropout_algorithm without dropout; give both, or neither."
            )
        if given["rng_dump"] is not None:
            raise InvalidArgumentError(
                f"{operation} was given rng_dump without dropout, whose mask it takes; give both."
            )
        return None
    with_mask = _WITH_MASK[operation]
    is_tuple = isinstance(entries, tuple) and len(entries) > 0
    by_mask = is_tuple and not _is_number(entries[0])
    if algorithm is not None and by_mask:
        raise InvalidArgumentError(
            f"{operation} was given dropout_algorithm={algorithm!r} with a mask, of which nothing "
            "is drawn; leave it out."
        )
    if by_mask and len(entries) == len(with_mask) - 1 == 2 and _is_number(entries[1]):
        entries = (*entries, 1 / entries[1] if entries[1] else 0.0)
    names: tuple[str, ...] = with_mask if by_mask else _WITH_PROBABILITY
    if not is_tuple or len(entries) != len(names):
        forms = (_WITH_PROBABILITY, with_mask)
        said = " or ".join(
            f"({', '.join(name.removeprefix('dropout_') for name in form)})" for form in forms
        )
        raise InvalidArgumentError(f"{operation}: dropout must be a tuple {said}; got {entries!r}.")
    inputs, given_numbers = {}, {}
    for name, entry in zip(names, entries, strict=True):
        if isinstance(entry, tensor) and entry.attributes.value is None and name != "p":
            inputs[name] = entry
        else:
            given_numbers[name] = _number(name, entry)
    p = given_numbers.pop("p", None)
    form = None if by_mask else ALGORITHMS[algorithm or "philox"]
    return DropoutArgument(p, inputs, given_numbers, form)


def dropout_numbers(asked: DropoutArgument | None) -> dict[str, Any]:
    """What :class:`dlattn.problem.Geometry` knows of dropout besides tensors."""
    if asked is None:
        return {}
    if asked.p is None or asked.form is None:
        return dict(asked.numbers)
    return {**asked.form.numbers(asked.p), **asked.numbers}


def _is_number(entry: Any) -> bool:
    return isinstance(entry, numbers.Real) and not isinstance(entry, bool)


def _number(name: str, entry: Any) -> Any:
    """An entry that is a number, or a tensor whose value the graph keeps."""
    if isinstance(entry, tensor):
        entry = entry.attributes.value
    whole = name in ("dropout_seed", "dropout_offset")
    if not _is_number(entry) or name == "dropout_mask" or (whole and not _is_whole(entry)):
        wanted = "a tensor of the graph"
        if name != "dropout_mask":
            wanted += " or an int" if whole else " or a number"
        raise TypeError(
            f"dropout: {name.removeprefix('dropout_')} must be {wanted}; got {entry!r}."
        )
    if whole:
        return signed(operator.index(entry))
    if is_float32(entry):
        return float(entry)
    if name == "p":  # refused as what it is, with those that are no probabilities
        return entry
    raise InvalidArgumentError(f"dropout: {name} must be a finite number of FLOAT; got {entry}.")


def _is_whole(entry: Any) -> bool:
    return isinstance(entry, numbers.Integral)
