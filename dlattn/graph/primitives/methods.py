"""The primitive operations' signatures, shared by ``pygraph`` and the ``Graph`` wrapper.

Methods, arguments and defaults are those of cuDNN frontend 1.23; ``softmax`` and ``rng``, which it
has in C++ alone, are named as there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlattn.dtypes import data_type
from dlattn.graph.vocabulary import reduction_mode, reshape_mode, rng_distribution

Method = Callable[..., Any]

_NOT_SET = data_type.NOT_SET


def arguments(scope: Mapping[str, Any]) -> dict[str, Any]:
    """A method's arguments by name, from its ``locals()`` before it has any others."""
    return {name: value for name, value in scope.items() if name != "self"}


class _Pointwise:
    """The method of an operation that takes its operands, ``compute_data_type`` and ``name``.

    It takes its own place when it is first asked for: most graphs ask for none.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._operation = owner, name

    def __get__(self, graph: Any, owner: type) -> Method:
        setattr(self._owner, self._operation, _method(self._operation))
        method: Method = getattr(owner if graph is None else graph, self._operation)
        return method


def _method(operation: str) -> Method:
    from inspect import Parameter, Signature

    from dlattn.problem import POINTWISE

    kind = Parameter.POSITIONAL_OR_KEYWORD
    signature = Signature(
        [
            *(Parameter(name, kind) for name in ("self", *POINTWISE[operation].operands)),
            Parameter("compute_data_type", kind, default=_NOT_SET, annotation=data_type),
            Parameter("name", kind, default="", annotation=str),
        ]
    )

    def method(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        return bound.arguments["self"]._add(operation, arguments(bound.arguments))[0]

    method.__name__ = method.__qualname__ = operation
    method.__doc__ = f"{POINTWISE[operation].formula}, for each element."
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


class Primitives(ABC):
    """A graph to which primitive operations can be added.

    Each returns its result, virtual until ``set_output(True)``. Shapes broadcast: sizes of 1, and
    tensors of one element, fit every other. Results without a data type get the graph's
    intermediate type if they are virtual, else its io type. Arithmetic is in ``compute_data_type``,
    else in the graph's: FLOAT, DOUBLE (always, if an operand is), INT32 or INT64.
    """

    @abstractmethod
    def _add(self, operation: str, given: dict[str, Any]) -> list[Any]:
        """Append one operation; its outputs, ``None`` where one was not asked for."""

    def matmul(
        self,
        A: Any,
        B: Any,
        compute_data_type: data_type = _NOT_SET,
        padding: float = 0.0,
        name: str = "",
        *,
        m_override: Any = None,
        n_override: Any = None,
        k_override: Any = None,
    ) -> Any:
        """Matrix products: (..., M, K) times (..., K, N) is (..., M, N).

        Of batch dimensions that differ, one divides the other: of n entries with m matrices, entry
        i takes matrix ``i * m // n``, as grouped heads do.

        Args:
            A, B: the factors.
            m_override, n_override, k_override: actual sizes for each batch entry, integers of
                (B, 1, ..., 1), as in cuDNN's C++: results beyond M and N are ``padding``, and sums
                end at K.
        """
        return self._add("matmul", arguments(locals()))[0]

    def reduction(
        self,
        input: Any,
        mode: reduction_mode,
        compute_data_type: data_type = _NOT_SET,
        name: str = "",
        group_offset: Any = None,
    ) -> Any:
        """Reduce the axes of which the result's ``set_dim`` says 1; without it, none.

        A size that divides the axis reduces neighbours: of n heads, m results are those of n / m
        heads each, as with grouped heads.
        """
        return self._add("reduction", arguments(locals()))[0]

    def softmax(
        self,
        input: Any,
        generate_stats: bool = False,
        compute_data_type: data_type = _NOT_SET,
        name: str = "",
    ) -> list[Any]:
        """Softmax along the last axis, 0 in rows of nothing but -inf.

        Returns:
            ``[s, stats]``; stats, the log-sum-exp of size 1 along that axis, or ``None``.
        """
        return self._add("softmax", arguments(locals()))

    def rng(
        self,
        seed: Any,
        offset: Any,
        distribution: rng_distribution = rng_distribution.BERNOULLI,
        bernoulli_probability: float | None = None,
        compute_data_type: data_type = _NOT_SET,
        name: str = "",
    ) -> Any:
        """1 with ``bernoulli_probability``, else 0: the keep mask of ``dropout=(p, seed, offset)``
        for ``p = 1 - bernoulli_probability``, see :func:`dlattn.philox_dropout_mask`.

        The result, (B, H, Sq, Skv), needs ``set_dim``; seed and offset have one element each.
        """
        return self._add("rng", arguments(locals()))[0]

    def transpose(
        self,
        input: Any,
        permutation: Sequence[int],
        compute_data_type: data_type = _NOT_SET,
        name: str = "",
    ) -> Any:
        """Axis i of the result is axis ``permutation[i]`` of the input."""
        return self._add("transpose", arguments(locals()))[0]

    def reshape(
        self,
        input: Any,
        name: str = "",
        reshape_mode: reshape_mode = reshape_mode.VIEW_ONLY,
    ) -> Any:
        """The same elements in the shape that the result's ``set_dim`` says.

        VIEW_ONLY leaves elements where they are in memory, so that with ``set_stride`` it
        transposes; LOGICAL keeps their row-major order, whatever the strides.
        """
        return self._add("reshape", arguments(locals()))[0]

    def gen_index(
        self, input: Any, axis: int, compute_data_type: data_type = _NOT_SET, name: str = ""
    ) -> Any:
        """Each element's position along an axis of the input, whose shape the result has."""
        return self._add("gen_index", arguments(locals()))[0]

    def binary_select(
        self,
        input0: Any,
        input1: Any,
        mask: Any,
        compute_data_type: data_type = _NOT_SET,
        name: str = "",
    ) -> Any:
        """input0 where mask is true, else input1."""
        return self._add("binary_select", arguments(locals()))[0]

    def relu(
        self,
        input: Any,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: data_type = _NOT_SET,
        name: str = "",
    ) -> Any:
        """input above lower_clip (0), below it lower_clip + negative_slope (0) * (input -
        lower_clip), at most upper_clip (no bound)."""
        return self._add("relu", arguments(locals()))[0]

    def relu_backward(
        self,
        loss: Any,
        input: Any,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: data_type = _NOT_SET,
        name: str = "",
    ) -> Any:
        """loss * relu'(input), with the arguments of :meth:`relu`."""
        return self._add("relu_backward", arguments(locals()))[0]

    def leaky_relu(
        self,
        input: Any,
        negative_slope: float,
        compute_data_type: data_type = _NOT_SET,
        name: str = "",
    ) -> Any:
        """input if positive, else negative_slope * input."""
        return self._add("leaky_relu", arguments(locals()))[0]

    def leaky_relu_backward(
        self,
        loss: Any,
        input: Any,
        negative_slope: float,
        compute_data_type: data_type = _NOT_SET,
        name: str = "",
    ) -> Any:
        """loss * leaky_relu'(input), with the slope of :meth:`leaky_relu`."""
        return self._add("leaky_relu_backward", arguments(locals()))[0]

    def swish(
        self,
        input: Any,
        swish_beta: float | None = None,
        compute_data_type: data_type = _NOT_SET,
        name: str = "",
    ) -> Any:
        """input / (1 + e ** (-swish_beta (1) * input))."""
        return self._add("swish", arguments(locals()))[0]

    def swish_backward(
        self,
        loss: Any,
        input: Any,
        compute_data_type: data_type = _NOT_SET,
        swish_beta: float | None = None,
        name: str = "",
    ) -> Any:
        """loss * swish'(input), with the argument of :meth:`swish`."""
        return self._add("swish_backward", arguments(locals()))[0]

    # Arithmetic
    add = _Pointwise()
    sub = _Pointwise()
    mul = _Pointwise()
    div = _Pointwise()
    bias = _Pointwise()
    scale = _Pointwise()
    max = _Pointwise()
    min = _Pointwise()
    mod = _Pointwise()
    pow = _Pointwise()
    add_square = _Pointwise()
    identity = _Pointwise()
    neg = _Pointwise()
    abs = _Pointwise()

    # Functions
    exp = _Pointwise()
    log = _Pointwise()
    sqrt = _Pointwise()
    rsqrt = _Pointwise()
    reciprocal = _Pointwise()
    ceil = _Pointwise()
    floor = _Pointwise()
    sin = _Pointwise()
    cos = _Pointwise()
    tan = _Pointwise()
    erf = _Pointwise()

    # Activations, and their gradients
    tanh = _Pointwise()
    sigmoid = _Pointwise()
    elu = _Pointwise()
    gelu = _Pointwise()
    gelu_approx_tanh = _Pointwise()
    softplus = _Pointwise()
    tanh_backward = _Pointwise()
    sigmoid_backward = _Pointwise()
    elu_backward = _Pointwise()
    gelu_backward = _Pointwise()
    gelu_approx_tanh_backward = _Pointwise()
    softplus_backward = _Pointwise()

    # Comparisons and booleans
    cmp_eq = _Pointwise()
    cmp_neq = _Pointwise()
    cmp_gt = _Pointwise()
    cmp_ge = _Pointwise()
    cmp_lt = _Pointwise()
    cmp_le = _Pointwise()
    logical_and = _Pointwise()
    logical_or = _Pointwise()
    logical_not = _Pointwise()
