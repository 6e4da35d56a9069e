"""Declaring a graph: its tensors and its operations."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias

from dlattn.dtypes import data_type
from dlattn.errors import InvalidArgumentError, InvalidGraphError, InvalidVariantPackError
from dlattn.graph.checks import flag, integer, integers, member, text
from dlattn.graph.nodes import TENSOR_ARGUMENTS, AttentionNode, sdpa_backward_node, sdpa_node
from dlattn.graph.operations import Operations
from dlattn.graph.tensor import Attributes, Tensor, packed_strides
from dlattn.graph.vocabulary import scalar_type as ScalarType
from dlattn.graph.vocabulary import tensor_reordering
from dlattn.problem.score import is_float32
from dlattn.runtime.tensors import view

if TYPE_CHECKING:
    from dlattn.graph.primitives.nodes import PrimitiveNode
    from dlattn.graph.score_mod.callback import Declaring

Node: TypeAlias = "AttentionNode | PrimitiveNode"

#: Arguments that are functions, of which nodes keep the operations that they have added: what else
#: they hold, such as the memory of the tensors that they declare, is their caller's.
_CALLBACKS = ("score_mod", "score_mod_bprop")

_BUILDERS = {"sdpa": sdpa_node, "sdpa_backward": sdpa_backward_node}


def tensor_arguments(operation: str) -> tuple[str, ...]:
    """An operation's arguments that are tensors of the graph.

    Raises:
        KeyError: there is no such operation.
    """
    if operation in TENSOR_ARGUMENTS:
        return TENSOR_ARGUMENTS[operation]
    from dlattn.graph.primitives.nodes import OPERANDS, OPTIONAL

    return (*OPERANDS[operation], *OPTIONAL.get(operation, ()))


class Declarations(Operations):
    """The tensors and operations of a graph, in the order of their declaration."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors: list[Tensor] = []
        self._nodes: list[Node] = []
        #: Of each node, what its operation was given, functions aside.
        self._calls: list[dict[str, Any]] = []
        #: Of each tensor of a built graph, what that has inferred: of a tensor that another graph
        #: takes too, its attributes say what is left to infer there.
        self._inferred: dict[Tensor, frozenset[str]] = {}
        self._is_built = False

    def tensor(
        self,
        dim: Iterable[int],
        stride: Iterable[int] | None = None,
        data_type: Any = data_type.NOT_SET,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: tensor_reordering = tensor_reordering.NONE,
        name: str = "",
        uid: int = -1,
    ) -> Tensor:
        """Declare a tensor.

        Args:
            dim: shape.
            stride: strides in elements; row-major when left out.
            data_type: a ``data_type``, or a torch or NumPy dtype; the graph's io type if not set.
            is_virtual: it has no memory of its own.
            is_pass_by_value: its one element is read from host memory when the graph is executed.
            ragged_offset: where packed sequences begin; see :meth:`tensor.set_ragged_offset`.
            reordering_type: the order of elements; see :meth:`tensor.set_reordering_type`.
            name: for messages, and for the names of ``Graph``.
            uid: key in variant packs; negative leaves the choice to the graph.

        Raises:
            InvalidGraphError: dim and stride differ in length, or the type means nothing.
            TypeError: an argument has the wrong Python type.
        """
        dim = integers("dim", dim)
        stride = packed_strides(dim) if stride is None else integers("stride", stride)
        if len(dim) != len(stride):
            raise InvalidGraphError(
                f"Tensor {name!r} has dim {dim} and stride {stride}; expected one stride per "
                "dimension."
            )
        declared = Tensor(
            Attributes(
                dim=dim,
                stride=stride,
                is_virtual=flag("is_virtual", is_virtual),
                is_pass_by_value=flag("is_pass_by_value", is_pass_by_value),
            )
        )
        declared.set_name(name).set_data_type(data_type).set_reordering_type(reordering_type)
        if ragged_offset is not None:
            declared.set_ragged_offset(ragged_offset)
        if integer("uid", uid) >= 0:
            declared.set_uid(uid)
        return self._keep(declared)

    def tensor_like(self, source: Any, name: str = "") -> Tensor:
        """Declare a tensor like another one, without its uid.

        Args:
            source: a graph tensor, or a tensor of any DLPack framework. Of the latter, shape,
                strides, type and device are read, and an alignment below 16 bytes if its address
                has no better one; a CPU tensor of one element is passed by value. One without axes
                is declared as (1, 1, 1, 1).
            name: of the new tensor; left out, that of a graph tensor.

        Raises:
            InvalidGraphError: neither of the two.
        """
        if isinstance(source, Tensor):
            like = copy.copy(source)
            like.attributes.uid, like.attributes.uid_from_user = None, False
            like.attributes.inferred = frozenset()
            if name:
                like.set_name(name)
            return self._keep(like)
        return self._keep(Tensor(_attributes_of(source))).set_name(name)

    def tensor_scalar(
        self, value: float, scalar_type: ScalarType = ScalarType.RUNTIME_PARAM
    ) -> Tensor:
        """Declare a number, (1, 1, 1, 1), that the graph keeps; variant packs need not hold it.

        It is INT64 of an int, and FLOAT of a float.

        Raises:
            TypeError: the value is neither.
            InvalidGraphError: its type does not hold it.
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"tensor_scalar takes an int or a float; got {value!r}.")
        member("scalar_type", scalar_type, ScalarType)
        whole = isinstance(value, int)
        holds = -(2**63) <= value < 2**63 if whole else is_float32(value) or not isfinite(value)
        if not holds:
            raise InvalidGraphError(
                f"tensor_scalar takes what {'INT64' if whole else 'FLOAT'} holds; got {value}."
            )
        return self._keep(
            Tensor(
                Attributes(
                    dtype=data_type.INT64 if whole else data_type.FLOAT,
                    dim=(1, 1, 1, 1),
                    stride=(1, 1, 1, 1),
                    is_pass_by_value=True,
                    value=value,
                    is_compile_time_constant=scalar_type is ScalarType.COMPILE_TIME_CONST,
                )
            )
        )

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """A copy of the tensor with this uid.

        Raises:
            InvalidArgumentError: there is none.
        """
        uid = integer("uid", uid)
        for t in self._tensors:
            if t.attributes.uid == uid:
                return copy.copy(t)
        raise InvalidArgumentError(f"No tensor of graph {self._name!r} has uid {uid}.")

    def _keep(self, t: Tensor) -> Tensor:
        self._tensors.append(t)
        return t

    def _add(
        self, operation: str, given: dict[str, Any], user: Declaring | None = None
    ) -> list[Any]:
        """Add a node; ``user`` is the graph that callbacks declare tensors in, if not this one."""
        if self._is_built:
            raise InvalidGraphError(
                f"Graph {self._name!r} is built, so {operation} cannot be added; make a new graph."
            )
        for argument in tensor_arguments(operation):
            value = given[argument]
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(
                    f"{operation}: {argument} must be a tensor of the graph, made by tensor() or "
                    f"tensor_like(); got a {type(value).__qualname__}."
                )
        if given["name"] is not None:
            text("name", given["name"])
        asked = given.get("score_mod_gradients")
        if asked is not None and not (
            isinstance(asked, Sequence) and all(isinstance(x, Tensor) for x in asked)
        ):
            raise TypeError(
                f"{operation}: score_mod_gradients must be tensors of the graph that score_mod "
                f"reads; got {asked!r:.100}."
            )
        if asked is not None:
            given = {**given, "score_mod_gradients": tuple(asked)}
        node = self._node(operation, given, user or self)
        self._nodes.append(node)
        self._calls.append({name: it for name, it in given.items() if name not in _CALLBACKS})
        self._keep_tensors_of(node)
        return list(node.returned)

    def _node(self, operation: str, given: dict[str, Any], user: Declaring) -> Node:
        """The node of a call; what few graphs hold is imported for those."""
        if operation in _BUILDERS:
            if given["score_mod"] is not None or given.get("score_mod_bprop") is not None:
                from dlattn.graph.score_mod.callback import score_mod

                given = {**given, "score_mod": score_mod(user, operation, given)}
            return _BUILDERS[operation](given["name"] or operation, given)
        from dlattn.graph.primitives.nodes import primitive_node

        earlier = sum(node.operation == operation for node in self._nodes)
        return primitive_node(operation, given["name"] or f"{operation}.{earlier}", given)

    def _keep_tensors_of(self, node: Node) -> None:
        for t in node.tensors.values():
            is_new = not any(t is known for known in self._tensors)
            if is_new or t.is_frozen:
                t.attributes.inferred = frozenset()  # what another graph inferred is given here
            if is_new:
                self._keep(t)


def _attributes_of(source: Any) -> Attributes:
    try:
        seen = view(source)
    except InvalidVariantPackError as error:
        raise InvalidGraphError(
            f"tensor_like takes a tensor of the graph or of a DLPack framework. {error}"
        ) from error
    # One element without axes is declared as a tensor_scalar is: tensors of a graph have some.
    dim, stride = (seen.shape, seen.stride) if seen.shape else ((1,) * 4, (1,) * 4)
    attributes = Attributes(
        dtype=seen.dtype, dim=tuple(dim), stride=tuple(stride), device=seen.device
    )
    address_alignment = seen.ptr & -seen.ptr
    if address_alignment:
        attributes.alignment = min(attributes.alignment, address_alignment)
    attributes.is_pass_by_value = seen.device[0] == "cpu" and attributes.elements == 1
    return attributes
