"""Python's operators, in the place of which graphs have methods: they refuse, and say which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def _refusing(operator: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *others: Any) -> NoReturn:
        raise TypeError(
            f"Tensors of a graph hold no numbers, so that {operator} computes nothing; call "
            f"graph.{instead}, where a number is graph.tensor_scalar(1.0)."
        )

    return refuse


class Operators:
    """What a tensor has of them. Equality is that of keys, as in every variant pack."""

    __slots__ = ()

    __add__ = __radd__ = _refusing("+", "add(a, b)")
    __sub__ = __rsub__ = _refusing("-", "sub(a, b)")
    __mul__ = __rmul__ = _refusing("*", "mul(a, b)")
    __truediv__ = __rtruediv__ = _refusing("/", "div(a, b)")
    __floordiv__ = __rfloordiv__ = _refusing("//", "floor(graph.div(a, b))")
    __mod__ = __rmod__ = _refusing("%", "mod(input0, input1)")
    __pow__ = __rpow__ = _refusing("**", "pow(input0, input1)")
    __matmul__ = __rmatmul__ = _refusing("@", "matmul(A, B)")
    __and__ = __rand__ = _refusing("&", "logical_and(a, b)")
    __or__ = __ror__ = _refusing("|", "logical_or(a, b)")
    __lt__ = _refusing("<", "cmp_lt(input, comparison)")
    __le__ = _refusing("<=", "cmp_le(input, comparison)")
    __gt__ = _refusing(">", "cmp_gt(input, comparison)")
    __ge__ = _refusing(">=", "cmp_ge(input, comparison)")
    __neg__ = _refusing("-", "neg(input)")
    __abs__ = _refusing("abs()", "abs(input)")
    __invert__ = _refusing("~", "logical_not(input)")
