"""Calling ``score_mod`` and ``score_mod_bprop``, and the operations that they add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, Signature, signature
from typing import Any, NoReturn, Protocol

from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError, InvalidGraphError, cudnnGraphNotSupportedError
from dlattn.graph.checks import text
from dlattn.graph.primitives.methods import Primitives
from dlattn.graph.primitives.nodes import OPERANDS, PrimitiveNode, primitive_node
from dlattn.graph.tensor import Attributes, Tensor, tensor
from dlattn.problem import POINTWISE, SCORE_MOD_ROLES
from dlattn.records import dataclass

Callback = Callable[..., Any]


class Declaring(Protocol):
    """A graph in which tensors are declared."""

    def tensor(self, *args: Any, **kwargs: Any) -> Tensor: ...
    def tensor_like(self, *args: Any, **kwargs: Any) -> Tensor: ...
    def tensor_scalar(self, *args: Any, **kwargs: Any) -> Tensor: ...


@dataclass(frozen=True)
class ScoreMod:
    """What the callbacks of a node have added.

    Attributes:
        nodes: the operations, in order.
        score: what they are given: the score after the scale, (B, Hq, Sq, Skv).
        result: the new score.
        gradient: what ``score_mod_bprop`` is given: the gradient of the result; or None.
        d_score: what it returned: the gradient of the score; or None.
    """

    nodes: tuple[PrimitiveNode, ...]
    score: tensor
    result: tensor
    gradient: tensor | None = None
    d_score: tensor | None = None

    @property
    def given(self) -> list[tensor]:
        """What no operation makes, and no pack holds."""
        return [self.score] if self.gradient is None else [self.score, self.gradient]

    @property
    def results(self) -> list[tensor]:
        return [self.result] if self.d_score is None else [self.result, self.d_score]

    def described(self) -> list[Any]:
        """Operations and results as JSON values, in which tensors have numbers."""
        numbers: dict[tensor, int] = {t: n for n, t in enumerate(self.given)}

        def tensors(some: Mapping[str, tensor]) -> dict[str, Any]:
            return {
                operand: [numbers.setdefault(t, len(numbers)), t.get_data_type().name]
                if t.attributes.value is None
                else t.attributes.value
                for operand, t in some.items()
            }

        nodes = [
            [node.operation, node.compute_data_type.name, dict(node.numbers)]
            + [tensors(node.inputs), tensors(node.outputs)]
            for node in self.nodes
        ]
        return [nodes, [numbers.get(t) for t in self.results]]

    @property
    def inputs(self) -> dict[str, tensor]:
        """Role -> tensor of the graph that the results depend on, numbers that it knows aside.

        Raises:
            cudnnGraphNotSupportedError: there are more of them than kernels can be given.
        """
        wanted = set(self.results)
        for node in reversed(self.nodes):
            if wanted & set(node.outputs.values()):
                wanted |= set(node.inputs.values())
        made = {t for node in self.nodes for t in node.outputs.values()}
        read: dict[tensor, None] = {}
        for node in self.nodes:
            for t in node.inputs.values():
                if t in wanted - made - set(self.given) and t.attributes.value is None:
                    # The input of gen_index has a shape, of which nothing is read.
                    if node.operation != "gen_index":
                        read[t] = None
        if len(read) > len(SCORE_MOD_ROLES):
            raise cudnnGraphNotSupportedError(
                f"score_mod reads {len(read)} tensors; kernels take {len(SCORE_MOD_ROLES)} at most."
                " Compute some of them from others, or join them."
            )
        return dict(zip(SCORE_MOD_ROLES, read, strict=False))


class ScoreGraph(Primitives):
    """What a callback is given: a graph to which pointwise operations can be added.

    ``tensor``, ``tensor_like`` and ``tensor_scalar`` are those of the graph that the user calls for
    the attention: a ``Graph`` has to know later what its tensors are called.
    """

    def __init__(self, graph: Declaring, node: str) -> None:
        self.nodes: list[PrimitiveNode] = []
        self.tensor = graph.tensor
        self.tensor_like = graph.tensor_like
        self.tensor_scalar = graph.tensor_scalar
        self._node = node

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"The graph that score_mod is given has no {name!r}: it has pointwise operations such "
            "as add, mul and exp, gen_index, tensor, tensor_like and tensor_scalar. Anything else "
            "belongs outside of the function."
        )

    def _add(self, operation: str, given: dict[str, Any]) -> list[Any]:
        if operation not in POINTWISE and operation != "gen_index":
            raise cudnnGraphNotSupportedError(
                f"score_mod of {self._node!r}: {operation} is no pointwise operation; a function "
                "of scores computes each of them from itself, its position, and tensors that "
                "broadcast."
            )
        for operand in OPERANDS[operation]:
            if given[operand] is not None and not isinstance(given[operand], Tensor):
                raise TypeError(
                    f"score_mod of {self._node!r}: {operation}: {operand} must be a tensor of the "
                    "graph, which graph.tensor_like() makes of an array, and "
                    f"graph.tensor_scalar() of a number; got a {type(given[operand]).__qualname__}."
                )
        if given["name"] is not None:
            text("name", given["name"])
        name = given["name"] or f"{self._node}::{operation}.{len(self.nodes)}"
        node = primitive_node(operation, name, given)
        self.nodes.append(node)
        return list(node.returned)


def score_mod(graph: Declaring, operation: str, given: Mapping[str, Any]) -> ScoreMod:
    """Calls what a node was given, of which there is one or both, once.

    ``score_mod(graph, score)`` returns the new score. ``score_mod_bprop(graph, gradient)``, called
    after it, returns the gradient of the score from that of the new one, as in cuDNN; it may use
    what ``score_mod`` has computed. One with a third parameter is also given the score.

    Raises:
        InvalidArgumentError: ``score_mod_bprop`` without ``score_mod``.
        TypeError: not a function of as many arguments, or it returns no tensor.
    """
    function, bprop = given["score_mod"], given.get("score_mod_bprop")
    if function is None:
        raise InvalidArgumentError(
            f"{operation} was given score_mod_bprop without score_mod, and computes scores anew; "
            "give the forward's score_mod, too."
        )
    name = given["name"] or operation
    sub = ScoreGraph(graph, name)
    score = _virtual(f"{name}::score")
    result = _call("score_mod", function, sub, score)
    found = ScoreMod(tuple(sub.nodes), score, result)
    if bprop is None:
        return found
    gradient = _virtual(f"{name}::d_score_mod")
    more = (score,) if _takes_three(bprop) else ()
    d_score = _call("score_mod_bprop", bprop, sub, gradient, *more)
    return replace(found, nodes=tuple(sub.nodes), gradient=gradient, d_score=d_score)


def _virtual(name: str) -> tensor:
    return tensor(Attributes(name=name, is_virtual=True, dtype=data_type.FLOAT))


def _call(argument: str, function: Callback, *given: Any) -> tensor:
    if not callable(function):
        raise TypeError(
            f"{argument} must be a function of a graph and a tensor that returns a tensor; got "
            f"{function!r}."
        )
    _check_arguments(argument, function, given)
    made = function(*given)
    if not isinstance(made, Tensor):
        raise TypeError(
            f"{argument} must return a tensor of the graph that it is given; got {made!r}."
        )
    sub, known = given[0], set(given[1:])
    if made not in known and not any(made in node.outputs.values() for node in sub.nodes):
        raise InvalidGraphError(
            f"{argument} returned {made.get_name()!r}, which none of its operations computes; "
            "return the result of one."
        )
    return made


def _check_arguments(argument: str, function: Callback, given: Sequence[Any]) -> None:
    taken = _signature(function)
    if taken is None:
        return
    try:
        taken.bind(*given)
    except TypeError as error:
        raise TypeError(
            f"{argument} is called with {len(given)} arguments, a graph and "
            f"{'a tensor' if len(given) == 2 else 'tensors'}, which {function!r} cannot take: "
            f"{error}. Give a function such as lambda graph, score: graph.tanh(score)."
        ) from None


def _takes_three(function: Callback) -> bool:
    """Whether a third positional argument has a parameter that is there for it."""
    taken = _signature(function)
    if taken is None:
        return False
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = taken.parameters.values()
    needed = [p for p in parameters if p.kind in positional and p.default is Parameter.empty]
    return len(needed) == 3


def _signature(function: Callback) -> Signature | None:
    try:
        return signature(function)
    except (TypeError, ValueError):  # it is no function, or one of C's that tells nothing
        return None
