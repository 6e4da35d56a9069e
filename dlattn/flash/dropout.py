"""FlashAttention's dropout: the random numbers that a call draws, and how a backward knows them."""

from __future__ import annotations

from typing import Any

from dlattn.calls.arguments import number
from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.problem import Dropout


def dropout_of(
    p_dropout: Any, return_softmax: Any = False
) -> tuple[Dropout | None, dict[str, Any]]:
    """How probabilities are dropped, and the numbers that a geometry has of it.

    Raises:
        InvalidArgumentError: p is not a probability below 1, or nothing is dropped and
            ``return_softmax`` is asked for.
        cudnnGraphNotSupportedError: p is not 0.
    """
    p = number("p_dropout", p_dropout)
    if not 0 <= p < 1:
        raise InvalidArgumentError(f"p_dropout: expected at least 0 and below 1, got {p}.")
    if p > 0:
        raise cudnnGraphNotSupportedError(
            f"p_dropout={p}: these functions have no dropout yet; pass 0, or declare a graph with "
            "dropout=(p, seed, offset)."
        )
    if return_softmax:
        raise InvalidArgumentError(
            "return_softmax: it shows what dropout dropped, and p_dropout is 0; pass False."
        )
    return None, {}
